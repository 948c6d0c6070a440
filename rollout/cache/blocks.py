"""Who owns each block of cache memory, and when its bytes may be zeroed, read, moved or handed out.

    FREE -> DIRTY            taken; the bytes are the last tenant's
    DIRTY -> OWNED           zeroed, or overwritten whole, in stream order
    DIRTY -> FILLING         an asynchronous transfer writes it
    FILLING -> OWNED         the transfer completed
    FILLING -> DIRTY         the transfer ended without success; zeroed again before any use
    FILLING -> QUARANTINED   the owner gave it back or waits no longer, while bytes may still arrive
    QUARANTINED -> FREE      the transfer is known to have ended
    DIRTY, OWNED -> FREE     given back

Only OWNED blocks are read by a forward; only DIRTY and OWNED ones are moved; only DIRTY ones are zeroed. So nothing
but its transfer touches a block that is FILLING or QUARANTINED, however late that transfer ends, or if it never does.
Pure bookkeeping: `memory.BlockPool` moves the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np

from miles_k3.rollout.cache.contract import CacheError


class Kind(StrEnum):
    SLOT = "slot"  # KDA states and convolution windows of all layers
    PAGE = "page"  # latents of page_size tokens in all MLA layers


class BlockState(IntEnum):
    FREE = 0
    DIRTY = 1
    OWNED = 2
    FILLING = 3
    QUARANTINED = 4


_NEXT: Mapping[BlockState, frozenset[BlockState]] = {
    BlockState.FREE: frozenset({BlockState.DIRTY}),
    BlockState.DIRTY: frozenset({BlockState.OWNED, BlockState.FILLING, BlockState.FREE}),
    BlockState.OWNED: frozenset({BlockState.FREE}),
    BlockState.FILLING: frozenset({BlockState.OWNED, BlockState.DIRTY, BlockState.QUARANTINED}),
    BlockState.QUARANTINED: frozenset({BlockState.FREE}),
}
_LEGAL = [[after in _NEXT[before] for after in BlockState] for before in BlockState]


class Ledger:
    """The state of every block of one kind. Block 0 is the padding block: OWNED for ever, by nobody.

    `dirty`: the blocks to zero before the next forward, in the order they were taken.
    """

    def __init__(self, kind: Kind, num_blocks: int) -> None:
        self.kind, self.num_blocks = kind, num_blocks
        self.dirty: dict[int, None] = {}
        self._states = bytearray(num_blocks)
        self._states[0] = BlockState.OWNED
        self._view = np.frombuffer(self._states, np.uint8)
        self._counts = [0] * len(BlockState)

    def state(self, block: int) -> BlockState:
        self._refuse_unknown(block)
        return BlockState(self._states[block])

    def count(self, state: BlockState) -> int:
        """Blocks in a state other than FREE, without the padding block."""
        return self._counts[state]

    @property
    def num_held(self) -> int:
        """Blocks that can't be handed out: all but the FREE ones."""
        return sum(self._counts[BlockState.DIRTY :])

    def movable(self, block: int) -> bool:
        return self._states[block] in (BlockState.DIRTY, BlockState.OWNED)

    def has_content(self, block: int) -> bool:
        return self._states[block] == BlockState.OWNED

    def take(self, block: int) -> None:
        self.shift(block, BlockState.DIRTY)

    def own(self, block: int) -> None:
        """All bytes of a DIRTY block were written; does nothing to one that is OWNED."""
        if self.state(block) is not BlockState.OWNED:
            self.shift(block, BlockState.OWNED)

    def give(self, block: int) -> bool:
        """The owner lets go. False: a transfer is still filling the block, so it is QUARANTINED instead of FREE."""
        state = self.state(block)
        if state is BlockState.QUARANTINED:
            raise CacheError(f"{self.kind} {block} is QUARANTINED: given back before")
        if state is BlockState.FILLING:
            self.shift(block, BlockState.QUARANTINED)
            return False
        self.shift(block, BlockState.FREE)
        return True

    def shift(self, block: int, to: BlockState) -> None:
        """One step of the table above. Raises CacheError for any other."""
        self._refuse_unknown(block)
        now = self._states[block]
        if not block or not _LEGAL[now][to]:
            role = "the padding block" if not block else BlockState(now).name
            raise CacheError(f"{self.kind} {block} is {role}: it can't become {to.name}")
        self._states[block] = to
        self._counts[now] -= 1
        self._counts[to] += 1
        if to == BlockState.DIRTY:
            self.dirty[block] = None
        elif now == BlockState.DIRTY:
            del self.dirty[block]

    def require_owned(self, blocks: np.ndarray) -> None:
        """Raise CacheError if a forward would read a block that holds nothing, or not yet."""
        bad = blocks[self._view[blocks] != BlockState.OWNED]
        if bad.size:
            block = int(bad.flat[0])
            raise CacheError(
                f"{self.kind} {block} is {self.state(block).name}: only OWNED blocks are read; flush first"
            )

    def _refuse_unknown(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise CacheError(f"there is no {self.kind} {block}: ids go from 1 to {self.num_blocks - 1}")


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """One transfer into blocks, all or nothing. `slot_rows`, `page_rows`: where it writes; they hold until it ends.

    It starts after `after`, an event on the forward's stream (None on a CPU): what was queued there before may still
    read or write the same bytes. `deadline_s`: on the clock of `Transfers.expire`.
    """

    number: int
    blocks: tuple[tuple[Kind, int], ...]
    deadline_s: float | None = None
    slot_rows: Sequence[int] = ()
    page_rows: Sequence[int] = ()
    after: Any = None
    ended: bool = False
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class Transfers:
    """The tickets that are out. `freed(kind, block)` is called for each quarantined block that a transfer lets go."""

    ledgers: Mapping[Kind, Ledger]
    freed: Callable[[Kind, int], None]
    counters: Counter[str] = field(default_factory=Counter)
    _open: dict[int, Ticket] = field(default_factory=dict)
    _last: int = 0

    def begin(self, blocks: Iterable[tuple[Kind, int]], deadline_s: float | None = None) -> Ticket:
        """DIRTY blocks become FILLING. Raises CacheError, and changes nothing, if one of them is in another state."""
        ticket = Ticket(number=self._last + 1, blocks=tuple(blocks), deadline_s=deadline_s)
        if len(set(ticket.blocks)) < len(ticket.blocks):
            raise CacheError(f"a transfer fills a block twice: {ticket.blocks}")
        for kind, block in ticket.blocks:
            state = self.ledgers[kind].state(block)
            if state is not BlockState.DIRTY:
                raise CacheError(f"{kind} {block} is {state.name}: a transfer fills only DIRTY blocks")
        for kind, block in ticket.blocks:
            self.ledgers[kind].shift(block, BlockState.FILLING)
        self._last = ticket.number
        self._open[ticket.number] = ticket
        return ticket

    def complete(self, ticket: Ticket) -> bool:
        """All bytes arrived and none will come any more. False: the ticket had ended before, and nothing changes."""
        return self._end(ticket, BlockState.OWNED)

    def fail(self, ticket: Ticket) -> bool:
        """The transfer is known to have ended without success: nothing will be written any more."""
        return self._end(ticket, BlockState.DIRTY)

    def cancel(self, ticket: Ticket) -> list[tuple[Kind, int]]:
        """Wait no longer: what the ticket still fills leaves its owner and is QUARANTINED until the transfer ends."""
        self._require_known(ticket)
        lost = [(k, b) for k, b in ticket.blocks if not ticket.ended and self.ledgers[k].state(b) is BlockState.FILLING]
        for kind, block in lost:
            self.ledgers[kind].shift(block, BlockState.QUARANTINED)
        ticket.cancelled = ticket.cancelled or not ticket.ended
        return lost

    def expire(self, now_s: float) -> list[Ticket]:
        """Cancel every ticket whose deadline has passed; those."""
        late = [
            t for t in self._open.values() if not t.cancelled and t.deadline_s is not None and t.deadline_s <= now_s
        ]
        for ticket in late:
            self.cancel(ticket)
        self.counters["expired"] += len(late)
        return late

    @property
    def num_open(self) -> int:
        return len(self._open)

    def _end(self, ticket: Ticket, result: BlockState) -> bool:
        self._require_known(ticket)
        if ticket.ended:
            self.counters["repeated"] += 1
            return False
        ticket.ended = True
        del self._open[ticket.number]
        for kind, block in ticket.blocks:
            if self.ledgers[kind].state(block) is BlockState.QUARANTINED:
                self.ledgers[kind].shift(block, BlockState.FREE)
                self.freed(kind, block)
            else:
                self.ledgers[kind].shift(block, result)
        self.counters["completed" if result is BlockState.OWNED else "failed"] += 1
        return True

    def _require_known(self, ticket: Ticket) -> None:
        if not ticket.ended and self._open.get(ticket.number) is not ticket:
            raise CacheError(f"transfer {ticket.number} was never begun here: fill first, then start it")
