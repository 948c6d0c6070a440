"""The split pool: a fixed number of slots and of pages, each in memory of its own. The baseline of `unified`.

An id is a row and never moves. What one kind doesn't use, the other can't have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.rollout.cache.blocks import Kind, Ledger
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.cache.layout import Layout
from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.cache.pools import LatentPages, PoolError, StateSlots


class SplitPool(BlockPool):
    """`StateSlots` and `LatentPages` under the interface of both pools; they must not be used by others as well."""

    def __init__(self, slots: StateSlots, pages: LatentPages) -> None:
        super().__init__(
            {
                Kind.SLOT: Ledger(Kind.SLOT, slots.num_slots + 1),
                Kind.PAGE: Ledger(Kind.PAGE, pages.num_pages + 1),
            }
        )
        self._slots, self._pages = slots, pages
        self.page_size, self.device = pages.page_size, slots.device
        self.block_bytes = {
            Kind.SLOT: slots.num_bytes // (slots.num_slots + 1),
            Kind.PAGE: pages.num_bytes // (pages.num_pages + 1),
        }
        self._num_bytes = slots.num_bytes + pages.num_bytes

    @classmethod
    def of_budget(cls, layout: Layout, num_bytes: int, slot_share: float, device: torch.device) -> SplitPool:
        """At most `num_bytes`, about `slot_share` of them for slots."""
        num_slots = int(num_bytes * slot_share) // layout.slot_bytes - 1
        num_pages = (num_bytes - (num_slots + 1) * layout.slot_bytes) // layout.page_bytes - 1
        if num_slots < 1 or num_pages < 1:
            counts = f"{max(0, num_slots)} slots and {max(0, num_pages)} pages"
            raise EngineError(f"a cache of {num_bytes} bytes, {slot_share:.0%} for slots, holds {counts}")
        slots = StateSlots(
            num_layers=layout.kda_layers, num_slots=num_slots, heads=layout.heads, head_dim=layout.head_dim,
            conv_width=layout.conv_width, dtype=layout.dtype, device=device,
        )  # fmt: skip
        pages = LatentPages(
            num_layers=layout.mla_layers, num_pages=num_pages, page_size=layout.page_size, width=layout.width,
            num_owners=0, max_pages_per_owner=0, dtype=layout.dtype, device=device,
        )  # fmt: skip
        return cls(slots, pages)

    # --- books --------------------------------------------------------------------------------------------------
    def fits(self, *, slots: int = 0, pages: int = 0) -> bool:
        return slots <= self._slots.num_free and pages <= self._pages.num_free

    def lacking(self, *, slots: int = 0, pages: int = 0) -> tuple[int, int]:
        return max(0, slots - self._slots.num_free), max(0, pages - self._pages.num_free)

    def num_free(self, kind: Kind) -> int:
        return self._slots.num_free if kind is Kind.SLOT else self._pages.num_free

    def _take(self, kind: Kind, count: int) -> list[int]:
        if kind is Kind.SLOT:
            blocks = [self._slots.take_slot() for _ in range(count)]
        else:
            blocks = self._pages.take_pages(count)
        for block in blocks:
            self.ledgers[kind].take(block)
        return blocks

    def _freed(self, kind: Kind, block: int) -> None:
        if kind is Kind.SLOT:
            self._slots.give_slots([block])
        else:
            self._pages.give_pages([block])

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def free_bytes(self) -> int:
        return sum(self.num_free(kind) * self.block_bytes[kind] for kind in Kind)

    def check(self) -> None:
        for kind, total in ((Kind.SLOT, self._slots.num_slots), (Kind.PAGE, self._pages.num_pages)):
            if self.num_free(kind) + self.ledgers[kind].num_held != total:
                raise PoolError(f"{total} {kind}s: {self.num_free(kind)} free, {self.ledgers[kind].num_held} held")

    # --- bytes --------------------------------------------------------------------------------------------------
    @property
    def states(self) -> Tensor:
        return self._slots.states

    @property
    def windows(self) -> Tensor:
        return self._slots.windows

    @property
    def kv(self) -> Tensor:
        return self._pages.kv

    def _rows(self, kind: Kind, blocks: np.ndarray) -> np.ndarray:
        return blocks.copy()

    def _move(self) -> None:
        pass

    def _zero(self, kind: Kind, blocks: Sequence[int]) -> None:
        rows = put(blocks, self.device)
        for part in (self.states, self.windows) if kind is Kind.SLOT else (self.kv,):
            part.index_fill_(1, rows, 0.0)

    def _copy(self, kind: Kind, sources: np.ndarray, targets: np.ndarray) -> None:
        (self._slots if kind is Kind.SLOT else self._pages).copy(sources.tolist(), targets.tolist())

    # --- sleep --------------------------------------------------------------------------------------------------
    def _sleep(self) -> None:
        self._slots.sleep()
        self._pages.sleep()

    def wake(self) -> None:
        self._slots.wake()
        self._pages.wake()
