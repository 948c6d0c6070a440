"""Where the blocks of two kinds stand in one stretch of bytes: slots from its start, pages from its end.

A block has an id, which its owner keeps, and a rank, its distance from its own end in blocks of its kind. Giving one
back in the middle leaves a hole; `settle` closes holes by moving the end blocks into them, so that what is free is one
region for both kinds. Blocks that were never written move in the books only; for the others `sources` says where their
bytes still are.

Why the copies of `sources` may run in any order, all of them before any zeroing: blocks are only ever moved away from
the end of their kind. Between two runs a rank that was left stays beyond every block that has content, so no copy goes
to where another one comes from; and what either kind has grown over since the last run has no content yet.

Pure bookkeeping: the experiments of `mix` run on it without any memory behind it.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator

import numpy as np

from miles_k3.rollout.cache.blocks import Kind, Ledger
from miles_k3.rollout.cache.contract import PoolError

_HOLE = -1


class End:
    """The blocks of one kind. Rank 0 is the padding block, id 0."""

    def __init__(self, block_bytes: int, ledger: Ledger, num_blocks: int) -> None:
        self.block_bytes, self.ledger, self.num_blocks = block_bytes, ledger, num_blocks
        self.num_holes = self.num_moved = 0
        self.sources: dict[int, int] = {}
        self._holders = [0]  # id at each rank, or _HOLE
        self._ranks = array("q", bytes(8 * num_blocks))
        self.rank_of = np.frombuffer(self._ranks, np.int64)
        self._ids = list(range(num_blocks - 1, 0, -1))
        self._holes: list[int] = []  # a heap; also holds ranks that are no holes any more

    @property
    def num_ranks(self) -> int:
        """Ranks from the end to the free region, holes included."""
        return len(self._holders)

    @property
    def num_bytes(self) -> int:
        return len(self._holders) * self.block_bytes

    def holes(self) -> Iterator[int]:
        """Their ranks."""
        return (rank for rank, block in enumerate(self._holders) if block == _HOLE)

    def take(self) -> int:
        """A block at the lowest hole, or where the free region begins: the caller knows that it fits."""
        block = self._ids.pop()
        if self.num_holes:
            rank = self._lowest_hole()
            self._holders[rank] = block
        else:
            rank = len(self._holders)
            self._holders.append(block)
        self._ranks[block] = rank
        return block

    def vacate(self, block: int) -> None:
        """The block is nobody's any more."""
        self._ids.append(block)
        self.sources.pop(block, None)
        rank = self._ranks[block]
        self._holders[rank] = _HOLE
        self.num_holes += 1
        if rank < len(self._holders) - 1:
            heapq.heappush(self._holes, rank)
        self._trim()

    def settle(self) -> None:
        """Close the holes, up to an end block that a transfer holds in place."""
        while self.num_holes and self.ledger.movable(self._holders[-1]):
            block = self._holders.pop()
            if self.ledger.has_content(block):
                self.sources.setdefault(block, self._ranks[block])
                self.num_moved += 1
            rank = self._lowest_hole()
            self._holders[rank] = block
            self._ranks[block] = rank
            self._trim()

    def _lowest_hole(self) -> int:
        while True:
            rank = heapq.heappop(self._holes)
            if rank < len(self._holders) and self._holders[rank] == _HOLE:
                self.num_holes -= 1
                return rank

    def _trim(self) -> None:
        while self._holders[-1] == _HOLE:
            self._holders.pop()
            self.num_holes -= 1
        if not self.num_holes:
            self._holes.clear()

    def check(self) -> None:
        """Raise PoolError unless ids, ranks and holes agree. Walks everything."""
        held = [b for b in self._holders if b != _HOLE]
        if sorted([*held, *self._ids]) != list(range(self.num_blocks)):
            raise PoolError(f"{self.ledger.kind} ids leaked: {len(held)} placed, {len(self._ids)} free")
        if len(held) - 1 != self.ledger.num_held or len(self._holders) - len(held) != self.num_holes:
            raise PoolError(
                f"{len(held) - 1} {self.ledger.kind}s placed, {self.ledger.num_held} held, holes miscounted"
            )
        left = set(self.sources.values())
        for block in self.sources:
            if not self.ledger.has_content(block) or self._ranks[block] in left:
                raise PoolError(f"{self.ledger.kind} {block} must not be copied to rank {self._ranks[block]}")
        if any(b != _HOLE and self._ranks[b] != rank for rank, b in enumerate(self._holders)):
            raise PoolError(f"a {self.ledger.kind} stands at another rank than its id says")


class Places:
    """Both ends. Byte-exact: slots, pages, holes and the free region add up to `num_bytes` at any time."""

    def __init__(self, num_bytes: int, slot_bytes: int, page_bytes: int) -> None:
        self.num_bytes = num_bytes
        blocks = {Kind.SLOT: slot_bytes, Kind.PAGE: page_bytes}
        # As many as fit beside the other kind's padding block.
        most = {kind: (num_bytes - slot_bytes - page_bytes + size) // size for kind, size in blocks.items()}
        self.ledgers = {kind: Ledger(kind, max(1, most[kind])) for kind in Kind}
        self.ends = {kind: End(blocks[kind], self.ledgers[kind], max(1, most[kind])) for kind in Kind}
        self._slots, self._pages = self.ends[Kind.SLOT], self.ends[Kind.PAGE]

    @property
    def region_bytes(self) -> int:
        """The free region between the ends, holes not included."""
        return self.num_bytes - self._slots.num_bytes - self._pages.num_bytes

    @property
    def free_bytes(self) -> int:
        """The free region and all holes."""
        return self.region_bytes + sum(end.num_holes * end.block_bytes for end in self.ends.values())

    def fits(self, *, slots: int = 0, pages: int = 0) -> bool:
        """Whether so many blocks of both kinds can be taken now. May close holes to find out."""
        if self.missing_bytes(slots, pages) <= self.region_bytes:
            return True
        self.settle()
        return self.missing_bytes(slots, pages) <= self.region_bytes

    def missing_bytes(self, slots: int, pages: int) -> int:
        """Bytes that the free region must give, after the holes of each kind."""
        slots, pages = max(0, slots - self._slots.num_holes), max(0, pages - self._pages.num_holes)
        return slots * self._slots.block_bytes + pages * self._pages.block_bytes

    def num_free(self, kind: Kind) -> int:
        """Blocks of the kind that could be taken if none of the other were."""
        if self._slots.num_holes or self._pages.num_holes:
            self.settle()
        end = self.ends[kind]
        return end.num_holes + self.region_bytes // end.block_bytes

    def take(self, kind: Kind, count: int) -> list[int]:
        """Raises PoolError, and takes nothing, unless all fit."""
        if not self.fits(**{f"{kind}s": count}):
            raise PoolError(f"{count} {kind}s taken, {self.num_free(kind)} are free")
        end, ledger = self.ends[kind], self.ledgers[kind]
        blocks = [end.take() for _ in range(count)]
        for block in blocks:
            ledger.take(block)
        return blocks

    def give(self, kind: Kind, block: int) -> None:
        if self.ledgers[kind].give(block):
            self.ends[kind].vacate(block)

    def settle(self) -> None:
        self._slots.settle()
        self._pages.settle()

    def flush(self) -> None:
        """The books of a flush, where there are no bytes to move or to zero."""
        self.settle()
        for end in self.ends.values():
            end.sources.clear()
            for block in list(end.ledger.dirty):
                end.ledger.own(block)

    def check(self) -> None:
        for end in self.ends.values():
            end.check()
        if self.region_bytes < 0:
            raise PoolError(f"slots and pages overlap by {-self.region_bytes} bytes")
