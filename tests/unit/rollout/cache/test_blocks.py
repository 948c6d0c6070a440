"""The states of a block, and transfers that end late, early, twice or never."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from miles_k3.rollout.cache.blocks import BlockState, Kind, Ledger, Transfers
from miles_k3.rollout.cache.contract import CacheError

FREE, DIRTY, OWNED, FILLING, QUARANTINED = BlockState
WAYS = {  # to each state, from FREE
    FREE: (),
    DIRTY: (DIRTY,),
    OWNED: (DIRTY, OWNED),
    FILLING: (DIRTY, FILLING),
    QUARANTINED: (DIRTY, FILLING, QUARANTINED),
}
LEGAL = {
    (FREE, DIRTY), (DIRTY, OWNED), (DIRTY, FILLING), (DIRTY, FREE), (OWNED, FREE), (FILLING, OWNED), (FILLING, DIRTY),
    (FILLING, QUARANTINED), (QUARANTINED, FREE),
}  # fmt: skip


class Books:
    """A ledger of pages, its transfers, and what they freed."""

    def __init__(self) -> None:
        self.ledgers = {kind: Ledger(kind, 9) for kind in Kind}
        self.pages = self.ledgers[Kind.PAGE]
        self.freed: list[tuple[Kind, int]] = []
        self.transfers = Transfers(self.ledgers, lambda kind, block: self.freed.append((kind, block)))

    def begin(self, *pages: int, deadline_s: float | None = None):
        for page in pages:
            self.pages.take(page)
        return self.transfers.begin([(Kind.PAGE, p) for p in pages], deadline_s)

    def states(self, *pages: int) -> list[BlockState]:
        return [self.pages.state(p) for p in pages]


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(BlockState, repeat=2)))
def test_every_pair_of_states(before: BlockState, after: BlockState) -> None:
    ledger = Ledger(Kind.SLOT, 4)
    for state in WAYS[before]:
        ledger.shift(3, state)
    if (before, after) in LEGAL:
        ledger.shift(3, after)
        assert ledger.state(3) is after
    else:
        with pytest.raises(CacheError, match=rf"slot 3 is {before.name}.* {after.name}"):
            ledger.shift(3, after)
        assert ledger.state(3) is before
    assert (3 in ledger.dirty) == (ledger.state(3) is DIRTY)
    assert ledger.num_held == (ledger.state(3) is not FREE)


def test_the_padding_block_and_unknown_ones_are_refused(books: Books) -> None:
    for move in (books.pages.take, books.pages.give):
        with pytest.raises(CacheError, match="page 0 is the padding block"):
            move(0)
        with pytest.raises(CacheError, match=r"no page 9.*1 to 8"):
            move(9)
        with pytest.raises(CacheError, match="no page -1"):
            move(-1)


def test_blocks_given_back_twice(books: Books) -> None:
    books.pages.take(1)
    assert books.pages.give(1)
    with pytest.raises(CacheError, match="page 1 is FREE"):
        books.pages.give(1)
    books.begin(2)
    assert not books.pages.give(2)
    with pytest.raises(CacheError, match="page 2 is QUARANTINED: given back before"):
        books.pages.give(2)


def test_only_owned_blocks_are_read(books: Books) -> None:
    books.pages.take(1)
    books.pages.own(1)
    books.begin(2)
    books.pages.require_owned(np.array([[1, 0], [0, 0]]))
    for page, state in ((2, "FILLING"), (3, "FREE")):
        with pytest.raises(CacheError, match=f"page {page} is {state}"):
            books.pages.require_owned(np.array([1, page, 0]))


# --- transfers ------------------------------------------------------------------------------------------------------
def test_a_transfer_that_completes(books: Books) -> None:
    ticket = books.begin(1, 2)
    assert books.states(1, 2) == [FILLING, FILLING]
    assert not books.pages.dirty
    assert not books.pages.movable(1)
    assert books.transfers.complete(ticket)
    assert books.states(1, 2) == [OWNED, OWNED]
    assert books.transfers.num_open == 0


def test_early_before_the_next_scrub(books: Books) -> None:
    """What arrived isn't zeroed afterwards: the blocks left the dirty list when the transfer began."""
    books.pages.take(3)
    ticket = books.begin(1)
    books.transfers.complete(ticket)
    assert list(books.pages.dirty) == [3]


def test_early_before_it_was_begun(books: Books) -> None:
    foreign = Books().begin(1)
    with pytest.raises(CacheError, match="transfer 1 was never begun here"):
        books.transfers.complete(foreign)
    books.begin(1)
    with pytest.raises(CacheError, match="never begun here"):
        books.transfers.complete(foreign)
    assert books.states(1) == [FILLING]


@pytest.mark.parametrize("second", ["complete", "fail"])
def test_twice_changes_nothing_for_the_next_tenant(books: Books, second: str) -> None:
    ticket = books.begin(1)
    assert books.transfers.complete(ticket)
    books.pages.give(1)
    other = books.begin(1)
    assert not getattr(books.transfers, second)(ticket)
    assert books.states(1) == [FILLING]
    assert books.transfers.cancel(ticket) == []
    assert books.states(1) == [FILLING]
    assert books.transfers.complete(other)
    assert books.transfers.counters["repeated"] == 1


@pytest.mark.parametrize("end", ["complete", "fail"])
def test_late_after_the_owner_went_away(books: Books, end: str) -> None:
    ticket = books.begin(1, 2)
    books.pages.give(1)
    assert books.states(1, 2) == [QUARANTINED, FILLING]
    with pytest.raises(CacheError, match="page 1 is QUARANTINED"):
        books.pages.take(1)
    getattr(books.transfers, end)(ticket)
    assert books.freed == [(Kind.PAGE, 1)]
    assert books.states(1, 2) == [FREE, OWNED if end == "complete" else DIRTY]


def test_never(books: Books) -> None:
    """Past its deadline the owner loses the blocks; they stay out of use, for as long as nobody says it ended."""
    ticket = books.begin(1, 2, deadline_s=10.0)
    patient = books.begin(3)
    assert books.transfers.expire(9.9) == []
    assert books.transfers.expire(10.0) == [ticket]
    assert ticket.cancelled
    assert books.transfers.expire(1e9) == []
    assert books.states(1, 2, 3) == [QUARANTINED, QUARANTINED, FILLING]
    assert not books.pages.movable(1)
    assert not books.pages.dirty
    assert books.freed == []
    assert books.transfers.fail(ticket)
    assert books.freed == [(Kind.PAGE, 1), (Kind.PAGE, 2)]
    assert books.transfers.num_open == 1
    books.transfers.complete(patient)


def test_a_failed_transfer_leaves_blocks_to_zero(books: Books) -> None:
    ticket = books.begin(1)
    books.transfers.fail(ticket)
    assert books.states(1) == [DIRTY]
    assert list(books.pages.dirty) == [1]


def test_a_transfer_begins_whole_or_not_at_all(books: Books) -> None:
    books.pages.take(1)
    books.pages.take(2)
    books.pages.own(2)
    with pytest.raises(CacheError, match="page 2 is OWNED: a transfer fills only DIRTY"):
        books.transfers.begin([(Kind.PAGE, 1), (Kind.PAGE, 2)])
    with pytest.raises(CacheError, match="twice"):
        books.transfers.begin([(Kind.PAGE, 1), (Kind.PAGE, 1)])
    assert books.states(1, 2) == [DIRTY, OWNED]
    books.ledgers[Kind.SLOT].take(1)
    books.transfers.begin([(Kind.PAGE, 1), (Kind.SLOT, 1)])
    with pytest.raises(CacheError, match="page 1 is FILLING"):
        books.transfers.begin([(Kind.PAGE, 1)])
