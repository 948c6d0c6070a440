"""The split pool: a fixed number of slots and of pages, each in memory of its own. The baseline of `unified`.

An id is a row and never moves. What one kind doesn't use, the other can't have.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.rollout.cache.blocks import Kind, Ledger
from miles_k3.rollout.cache.contract import PoolError
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.cache.layout import Layout
from miles_k3.rollout.cache.memory import BlockPool


class SplitPool(BlockPool):
    """`num_slots` and `num_pages`, and one padding block of each kind beside them. Lowest ids are taken first."""

    def __init__(self, layout: Layout, num_slots: int, num_pages: int, device: torch.device) -> None:
        if num_slots < 1 or num_pages < 1:
            raise EngineError(f"a cache of {num_slots} slots and {num_pages} pages; expected at least one of each")
        self.layout, self.device, self.page_size = layout, device, layout.page_size
        self.block_bytes = {Kind.SLOT: layout.slot_bytes, Kind.PAGE: layout.page_bytes}
        self._counts = {Kind.SLOT: num_slots, Kind.PAGE: num_pages}
        self._tensors: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self.wake()  # first: what doesn't fit is refused by the allocator, before a book of as many blocks is made
        self._free = {kind: list(range(1, count + 1)) for kind, count in self._counts.items()}
        super().__init__({kind: Ledger(kind, count + 1) for kind, count in self._counts.items()})

    @classmethod
    def of_budget(cls, layout: Layout, num_bytes: int, slot_share: float, device: torch.device) -> SplitPool:
        """At most `num_bytes`, about `slot_share` of them for slots."""
        num_slots = int(num_bytes * slot_share) // layout.slot_bytes - 1
        num_pages = (num_bytes - (num_slots + 1) * layout.slot_bytes) // layout.page_bytes - 1
        if num_slots < 1 or num_pages < 1:
            counts = f"{max(0, num_slots)} slots and {max(0, num_pages)} pages"
            raise EngineError(f"a cache of {num_bytes} bytes, {slot_share:.0%} for slots, holds {counts}")
        return cls(layout, num_slots, num_pages, device)

    # --- books --------------------------------------------------------------------------------------------------
    def fits(self, *, slots: int = 0, pages: int = 0) -> bool:
        return slots <= self.num_free(Kind.SLOT) and pages <= self.num_free(Kind.PAGE)

    def could_fit(self, *, slots: int = 0, pages: int = 0) -> bool:
        return slots <= self._counts[Kind.SLOT] and pages <= self._counts[Kind.PAGE]

    def lacking(self, *, slots: int = 0, pages: int = 0) -> tuple[int, int]:
        return max(0, slots - self.num_free(Kind.SLOT)), max(0, pages - self.num_free(Kind.PAGE))

    def num_free(self, kind: Kind) -> int:
        return len(self._free[kind])

    def _take(self, kind: Kind, count: int) -> list[int]:
        free = self._free[kind]
        if count > len(free):
            raise PoolError(f"{count} {kind}s taken, {len(free)} of {self._counts[kind]} are free")
        blocks = [heapq.heappop(free) for _ in range(count)]
        for block in blocks:
            self.ledgers[kind].take(block)
        return blocks

    def _freed(self, kind: Kind, block: int) -> None:
        heapq.heappush(self._free[kind], block)

    @property
    def num_bytes(self) -> int:
        return sum((count + 1) * self.block_bytes[kind] for kind, count in self._counts.items())

    @property
    def free_bytes(self) -> int:
        return sum(self.num_free(kind) * self.block_bytes[kind] for kind in Kind)

    def check(self) -> None:
        for kind, total in self._counts.items():
            if self.num_free(kind) + self.ledgers[kind].num_held != total:
                raise PoolError(f"{total} {kind}s: {self.num_free(kind)} free, {self.ledgers[kind].num_held} held")

    # --- bytes --------------------------------------------------------------------------------------------------
    @property
    def _awake(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self._tensors is None:
            raise PoolError("the cache sleeps; wake the engine first")
        return self._tensors

    @property
    def states(self) -> Tensor:
        return self._awake[0]

    @property
    def windows(self) -> Tensor:
        return self._awake[1]

    @property
    def kv(self) -> Tensor:
        return self._awake[2]

    @property
    def draft(self) -> Tensor:
        return self._awake[3]

    def _parts(self, kind: Kind) -> tuple[Tensor, ...]:
        return self._awake[:2] if kind is Kind.SLOT else self._awake[2:]

    def _rows(self, kind: Kind, blocks: np.ndarray) -> np.ndarray:
        return blocks.copy()

    def _move(self) -> None:
        pass

    def _zero(self, kind: Kind, blocks: Sequence[int]) -> None:
        rows = put(blocks, self.device)
        for part in self._parts(kind):
            part.index_fill_(1, rows, 0.0)

    def _copy(self, kind: Kind, sources: np.ndarray, targets: np.ndarray) -> None:
        source, target = (put(torch.from_numpy(rows), self.device) for rows in (sources, targets))
        for part in self._parts(kind):
            part.index_copy_(1, target, part.index_select(1, source))

    # --- sleep --------------------------------------------------------------------------------------------------
    def _sleep(self) -> None:
        self._tensors = None

    def wake(self) -> None:
        if self._tensors is not None:
            return
        at, slots, pages = self.layout, self._counts[Kind.SLOT] + 1, self._counts[Kind.PAGE] + 1
        n, d = at.heads, at.head_dim
        shapes = (
            ((at.kda_layers, slots, n, d, d), torch.float32),
            ((at.kda_layers, slots, at.conv_width - 1, 3 * n * d), at.dtype),
            ((at.mla_layers, pages, at.page_size, at.width), at.dtype),
            ((1, pages, at.page_size, at.draft_width), at.dtype),
        )
        states, windows, kv, draft = (torch.zeros(s, dtype=dtype, device=self.device) for s, dtype in shapes)
        self._tensors = states, windows, kv, draft
