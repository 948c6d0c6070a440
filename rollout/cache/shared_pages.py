"""Pages with several readers: samples of one prompt, and the prefix cache, hold the same ones.

A page has one owner in the pool, this book; it goes back when the last holder lets go. Only a page with one holder may
be written.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_k3.rollout.cache.contract import CacheError
from miles_k3.rollout.cache.memory import BlockPool


class SharedPages:
    """Implements `contract.Memory` for a prefix cache, which holds each page once."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._holders: dict[int, int] = {}

    def take(self, count: int) -> list[int]:
        """Fresh pages with one holder. Raises PoolError, and takes none, if so many aren't free."""
        pages = self.pool.take_pages(count)
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """One holder more for each."""
        for page in pages:
            self._refuse_free(page)
            self._holders[page] += 1

    def give_pages(self, pages: Sequence[int]) -> None:
        """One holder less for each; those that nobody holds go back to the pool."""
        free = []
        for page in pages:
            self._refuse_free(page)
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                free.append(page)
        self.pool.give_pages(free)

    def give_slots(self, slots: Sequence[int]) -> None:
        self.pool.give_slots(slots)

    def num_holders(self, page: int) -> int:
        return self._holders.get(page, 0)

    def _refuse_free(self, page: int) -> None:
        if page not in self._holders:
            raise CacheError(f"page {page} is held by nobody: given back twice, or never taken here")
