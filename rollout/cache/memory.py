"""What a cache policy and a scheduler see of the memory, whichever pool is behind it: ids, taken and given back.

A pool changes its books at once and its bytes in `flush`, which the engine calls on the forward's stream before it
builds a batch. Ids stay valid for as long as a block is held; its row, the place in the views `states`, `windows` and
`kv`, is valid from one flush to the next. Id 0 of both kinds is the padding block: zeros, and nobody's.

One step of the engine:
    take_*, give_*, policy calls     the books; at any time, also while the last step still runs on the device
    copy_slots, copy_pages           restore checkpoints into working slots, take snapshots, copy tail pages
    flush()                          moves, then zeroes, in stream order
    with forward():                  slot_rows, page_rows -> index tensors -> kernels; nothing moves in here
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.rollout.cache.blocks import BlockState, Kind, Ledger, Ticket, Transfers
from miles_k3.rollout.cache.contract import CacheError

Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor


class BlockPool(ABC):
    """Implements `contract.Memory`, with the taking of blocks. Not for several threads."""

    page_size: int
    device: torch.device
    block_bytes: dict[Kind, int]

    def __init__(self, ledgers: dict[Kind, Ledger]) -> None:
        self.ledgers = ledgers
        self.transfers = Transfers(ledgers, self._freed)
        self._in_forward = False

    # --- books --------------------------------------------------------------------------------------------------
    @abstractmethod
    def fits(self, *, slots: int = 0, pages: int = 0) -> bool:
        """Whether so many of both can be taken now, together."""

    @abstractmethod
    def could_fit(self, *, slots: int = 0, pages: int = 0) -> bool:
        """Whether so many of both could be taken if nothing else were."""

    @abstractmethod
    def lacking(self, *, slots: int = 0, pages: int = 0) -> tuple[int, int]:
        """Slots and pages that must be given back before so many can be taken: evict towards it until they fit.

        In the unified pool either of the two is enough alone.
        """

    @abstractmethod
    def num_free(self, kind: Kind) -> int:
        """Blocks of the kind that could be taken now if none of the other were."""

    @abstractmethod
    def _take(self, kind: Kind, count: int) -> list[int]: ...

    @abstractmethod
    def _freed(self, kind: Kind, block: int) -> None:
        """The block became FREE: its place may be used again."""

    def take_slot(self) -> int:
        """A state slot: S = 0 and empty windows from the next flush on. Raises PoolError when there is none."""
        return self._take(Kind.SLOT, 1)[0]

    def take_pages(self, count: int) -> list[int]:
        """Pages of zeros from the next flush on. Raises PoolError, and takes none, if so many aren't free."""
        return self._take(Kind.PAGE, count)

    def give_slots(self, slots: Sequence[int]) -> None:
        self._give(Kind.SLOT, slots)

    def give_pages(self, pages: Sequence[int]) -> None:
        self._give(Kind.PAGE, pages)

    def _give(self, kind: Kind, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.ledgers[kind].give(block):
                self._freed(kind, block)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def num_held(self) -> int:
        """Blocks of both kinds that are not free."""
        return sum(ledger.num_held for ledger in self.ledgers.values())

    def stats(self) -> dict[str, int]:
        """Bytes: `held_bytes` (of owners), `quarantined_bytes`, `padding_bytes` and `free_bytes` make `num_bytes`."""
        stats = {"num_bytes": self.num_bytes, "held_bytes": 0, "quarantined_bytes": 0, "free_bytes": self.free_bytes}
        for kind, ledger in self.ledgers.items():
            quarantined = ledger.count(BlockState.QUARANTINED)
            stats[f"{kind}s"] = ledger.num_held - quarantined
            stats["held_bytes"] += stats[f"{kind}s"] * self.block_bytes[kind]
            stats["quarantined_bytes"] += quarantined * self.block_bytes[kind]
        stats["padding_bytes"] = self.num_bytes - self.free_bytes - stats["held_bytes"] - stats["quarantined_bytes"]
        return stats

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """What the pool was given, asleep or not."""

    @property
    @abstractmethod
    def free_bytes(self) -> int: ...

    @abstractmethod
    def check(self) -> None:
        """Raise unless the books balance. For tests: it walks everything."""

    # --- bytes --------------------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def states(self) -> Tensor:
        """fp32 [KDA layers, rows, heads, K, V]."""

    @property
    @abstractmethod
    def windows(self) -> Tensor:
        """[KDA layers, rows, conv width - 1, 3 * KDA width]."""

    @property
    @abstractmethod
    def kv(self) -> Tensor:
        """[MLA layers, rows, page size, latent cache width]; `kv[layer].flatten(0, 1)` is a view."""

    @property
    @abstractmethod
    def draft(self) -> Tensor:
        """[1, rows, page size, draft width]: what a draft model keeps of the tokens of the same pages."""

    @abstractmethod
    def _rows(self, kind: Kind, blocks: np.ndarray) -> np.ndarray: ...

    @abstractmethod
    def _move(self) -> None:
        """Run the copies that are queued."""

    @abstractmethod
    def _zero(self, kind: Kind, blocks: Sequence[int]) -> None: ...

    @abstractmethod
    def _copy(self, kind: Kind, sources: np.ndarray, targets: np.ndarray) -> None:
        """Whole blocks, by row; no target is a source."""

    @property
    def is_flushed(self) -> bool:
        """Whether no byte waits for a move or for zeroing."""
        return not any(ledger.dirty for ledger in self.ledgers.values())

    def flush(self) -> None:
        """Move blocks into the holes, then zero what was taken since the last flush. Not inside `forward`."""
        self._refuse_in_forward("flush")
        self._move()
        for kind, ledger in self.ledgers.items():
            dirty = list(ledger.dirty)
            if dirty:
                self._zero(kind, dirty)
                for block in dirty:
                    ledger.own(block)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around building a batch from rows and queueing the kernels that use them: rows can't change in here."""
        self._refuse_in_forward("forward")
        if not self.is_flushed:
            raise CacheError("blocks wait to be moved or zeroed: flush before the forward")
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False

    def slot_rows(self, slots: Ids) -> Tensor:
        """Rows of `states[layer]`: int64 on the host, in the shape of `slots`. CacheError unless all are OWNED."""
        return self._owned_rows(Kind.SLOT, slots)

    def page_rows(self, pages: Ids) -> Tensor:
        """Rows of `kv[layer]` and `draft[0]`, the same way: pad tables of pages with 0."""
        return self._owned_rows(Kind.PAGE, pages)

    def _owned_rows(self, kind: Kind, blocks: Ids) -> Tensor:
        ids = np.asarray(blocks, dtype=np.int64)
        self.ledgers[kind].require_owned(ids)
        if not self.is_flushed:
            raise CacheError(f"{kind} rows are about to change: flush first")
        return torch.from_numpy(self._rows(kind, ids))

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy states and windows of every layer; the targets, taken or owned, are OWNED then and never zeroed."""
        self._copy_blocks(Kind.SLOT, sources, targets)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._copy_blocks(Kind.PAGE, sources, targets)

    def _copy_blocks(self, kind: Kind, sources: Sequence[int], targets: Sequence[int]) -> None:
        ledger = self.ledgers[kind]
        source_ids, target_ids = np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
        ledger.require_owned(source_ids)
        if len(set(targets) - set(sources)) < len(targets):
            raise CacheError(f"{kind}s {list(sources)} copied to {list(targets)}: a target twice, or a source itself")
        for target in targets:
            if not target or not ledger.movable(target):
                raise CacheError(f"{kind} {target} is {ledger.state(target).name}: it can't be copied over")
        self._move()
        self._copy(kind, self._rows(kind, source_ids), self._rows(kind, target_ids))
        for target in targets:
            ledger.own(target)

    # --- transfers ----------------------------------------------------------------------------------------------
    def fill(self, *, slots: Sequence[int] = (), pages: Sequence[int] = (), deadline_s: float | None = None) -> Ticket:
        """Let an asynchronous transfer write blocks that were just taken: it starts with the ticket, after `after`.

        They stay where they are, unread and unzeroed, until `transfers.complete` or `fail`; `cancel` and `expire` take
        them from their owner, and giving them back is fine, but they come back to the pool when the transfer ends only.
        """
        self._move()  # the rows may be where other blocks' bytes still are
        ticket = self.transfers.begin([*((Kind.SLOT, s) for s in slots), *((Kind.PAGE, p) for p in pages)], deadline_s)
        ticket.slot_rows = self._rows(Kind.SLOT, np.asarray(slots, dtype=np.int64)).tolist()
        ticket.page_rows = self._rows(Kind.PAGE, np.asarray(pages, dtype=np.int64)).tolist()
        ticket.after = _stream_mark(self.device)
        return ticket

    # --- sleep --------------------------------------------------------------------------------------------------
    def sleep(self) -> None:
        """Drop the memory. Raises EngineError while a block is held, or a transfer may still write."""
        if self.num_held:
            held = {str(kind): ledger.num_held for kind, ledger in self.ledgers.items()}
            raise EngineError(f"blocks are still held, {held}; end their requests and transfers, clear the cache")
        self._sleep()

    def abandon(self) -> None:
        """Drop the memory whatever the books say: of a pool that nobody uses any more."""
        self._sleep()

    @abstractmethod
    def _sleep(self) -> None: ...

    @abstractmethod
    def wake(self) -> None:
        """Take the memory again, zeroed; does nothing when awake."""

    def _refuse_in_forward(self, what: str) -> None:
        if self._in_forward:
            raise CacheError(f"{what} inside a forward: its kernels use rows that were read already")


def _stream_mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    mark = torch.cuda.Event()
    mark.record(torch.cuda.current_stream(device))
    return mark
