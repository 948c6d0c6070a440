"""The unified pool: one buffer, state slots from its start, KV pages from its end, one free region between.

No flag divides the memory: whoever needs it takes it from the region. Blocks given back in the middle leave holes; the
next block of the kind takes one, and `flush` moves the end blocks into the rest. Rows are reached through the ids'
places, so that a moved block keeps its id.

The model sees the whole buffer twice, as rows of slots and as rows of pages (`layout.Views`): `states[layer]` has one
row each slot_bytes, so gathering and scattering by row are those of a dense tensor with a larger stride, and states of
neighbouring rows can still be a slice. Only rows that the pool has placed may be touched: any other is free memory or
belongs to the other kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.rollout.cache.blocks import Kind
from miles_k3.rollout.cache.contract import PoolError
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.cache.layout import ALIGN_BYTES, Layout, Views
from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.cache.places import Places

COPY_BYTES = 64 << 20  # held beside the pool while blocks are copied; at least one block


class UnifiedPool(BlockPool):
    """`num_bytes` on `device`, of which one slot and one page are padding blocks."""

    @classmethod
    def holding(cls, layout: Layout, num_slots: int, num_pages: int, device: torch.device) -> UnifiedPool:
        """Of the bytes that so many slots and pages take together."""
        num_bytes = (num_slots + 1) * layout.slot_bytes + (num_pages + 1) * layout.page_bytes
        return cls(layout, -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES, device)

    def __init__(self, layout: Layout, num_bytes: int, device: torch.device) -> None:
        usable = num_bytes // ALIGN_BYTES * ALIGN_BYTES
        least = 2 * (layout.slot_bytes + layout.page_bytes)
        if usable < least:
            raise EngineError(f"a cache of {num_bytes} bytes holds no request; the smallest has {least} bytes")
        self.layout, self.device, self._num_bytes = layout, device, num_bytes
        self.page_size = layout.page_size
        self.block_bytes = {Kind.SLOT: layout.slot_bytes, Kind.PAGE: layout.page_bytes}
        self._usable, self._last_page_row = usable, usable // layout.page_bytes - 1
        self._buffer: Tensor | None = None
        self._views: Views | None = None
        self.wake()  # first: what doesn't fit is refused by the allocator, before a book of as many blocks is made
        self.places = Places(usable, layout.slot_bytes, layout.page_bytes)
        super().__init__(self.places.ledgers)

    # --- books --------------------------------------------------------------------------------------------------
    def fits(self, *, slots: int = 0, pages: int = 0) -> bool:
        return self.places.fits(slots=slots, pages=pages)

    def could_fit(self, *, slots: int = 0, pages: int = 0) -> bool:
        padded = (slots + 1) * self.layout.slot_bytes + (pages + 1) * self.layout.page_bytes
        return padded <= self.places.num_bytes

    def lacking(self, *, slots: int = 0, pages: int = 0) -> tuple[int, int]:
        if self.fits(slots=slots, pages=pages):
            return 0, 0
        missing = self.places.missing_bytes(slots, pages) - self.places.region_bytes
        return -(-missing // self.layout.slot_bytes), -(-missing // self.layout.page_bytes)

    def num_free(self, kind: Kind) -> int:
        return self.places.num_free(kind)

    def _take(self, kind: Kind, count: int) -> list[int]:
        return self.places.take(kind, count)

    def _freed(self, kind: Kind, block: int) -> None:
        self.places.ends[kind].vacate(block)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def free_bytes(self) -> int:
        return self.places.free_bytes

    def check(self) -> None:
        self.places.check()

    # --- bytes --------------------------------------------------------------------------------------------------
    @property
    def buffer(self) -> Tensor:
        if self._buffer is None:
            raise PoolError("the cache sleeps; wake the engine first")
        return self._buffer

    @property
    def views(self) -> Views:
        if self._views is None:
            raise PoolError("the cache sleeps; wake the engine first")
        return self._views

    @property
    def states(self) -> Tensor:
        return self.views.states

    @property
    def windows(self) -> Tensor:
        return self.views.windows

    @property
    def kv(self) -> Tensor:
        return self.views.kv

    @property
    def draft(self) -> Tensor:
        return self.views.draft

    @property
    def is_flushed(self) -> bool:
        ends = self.places.ends.values()
        return super().is_flushed and not any(end.sources for end in ends)

    def _rows(self, kind: Kind, blocks: np.ndarray) -> np.ndarray:
        return self._as_rows(kind, self.places.ends[kind].rank_of[blocks])

    def _as_rows(self, kind: Kind, ranks: np.ndarray) -> np.ndarray:
        return ranks if kind is Kind.SLOT else self._last_page_row - ranks

    def _words(self, kind: Kind) -> Tensor:
        return self.views.slot_words if kind is Kind.SLOT else self.views.page_words

    def flush(self) -> None:
        self._refuse_in_forward("flush")
        self.places.settle()
        super().flush()

    def _move(self) -> None:
        for kind, end in self.places.ends.items():
            if end.sources:
                self._refuse_in_forward("moving blocks")
                moved = np.fromiter(end.sources, np.int64)
                sources = np.fromiter(end.sources.values(), np.int64)
                self._copy(kind, self._as_rows(kind, sources), self._rows(kind, moved))
                end.sources.clear()

    def _copy(self, kind: Kind, sources: np.ndarray, targets: np.ndarray) -> None:
        words = self._words(kind)
        source, target = (put(torch.from_numpy(rows), self.device) for rows in (sources, targets))
        step = max(1, COPY_BYTES // self.block_bytes[kind])
        for some, there in zip(source.split(step), target.split(step), strict=True):
            words.index_copy_(0, there, words.index_select(0, some))

    def _zero(self, kind: Kind, blocks: Sequence[int]) -> None:
        rows = self._rows(kind, np.asarray(blocks, dtype=np.int64))
        self._words(kind).index_fill_(0, put(torch.from_numpy(rows), self.device), 0)

    # --- sleep --------------------------------------------------------------------------------------------------
    def _sleep(self) -> None:
        self._buffer = self._views = None

    def wake(self) -> None:
        if self._buffer is None:
            self._buffer = torch.zeros(self._usable, dtype=torch.uint8, device=self.device)
            self._views = Views.of(self.layout, self._buffer)
