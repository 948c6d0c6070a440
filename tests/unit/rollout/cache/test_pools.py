"""Books and bytes of the pools."""

from __future__ import annotations

import pytest
import torch

from miles_k3.errors import EngineError
from miles_k3.rollout.cache.pools import LatentPages, PoolError, StateSlots

CPU = torch.device("cpu")


@pytest.fixture
def pages() -> LatentPages:
    return LatentPages(
        num_layers=2, num_pages=6, page_size=4, width=3, num_owners=4, max_pages_per_owner=5, dtype=torch.float32,
        device=CPU,
    )  # fmt: skip


@pytest.fixture
def slots() -> StateSlots:
    return StateSlots(num_layers=2, num_slots=4, heads=2, head_dim=3, conv_width=4, dtype=torch.float32, device=CPU)


# --- pages ----------------------------------------------------------------------------------------------------------
def test_pages_are_taken_in_order_and_come_back(pages: LatentPages) -> None:
    pages.take(1, 2)
    pages.take(2, 3)
    assert pages.num_free == 1
    assert 0 not in {*pages.pages_of(1), *pages.pages_of(2)}
    assert pages.table_SP[1].tolist() == [*pages.pages_of(1), 0, 0, 0]
    pages.release(1)
    pages.release(2)
    assert pages.num_free == 6
    assert not pages.table_SP.any()


def test_pages_freed_twice_or_never_taken(pages: LatentPages) -> None:
    pages.take(1, 1)
    pages.release(1)
    with pytest.raises(PoolError, match="twice"):
        pages.release(1)
    with pytest.raises(PoolError, match="7 pages"):
        pages.take(1, 7)
    pages.take(1, 1)
    with pytest.raises(PoolError, match="already"):
        pages.take(1, 1)


def test_shared_pages_live_as_long_as_any_owner(pages: LatentPages) -> None:
    pages.take(1, 3)
    shared = pages.pages_of(1)[:2]
    pages.take(2, 1, shared=shared)
    assert pages.pages_of(2)[:2] == shared
    pages.release(1)
    assert pages.num_free == 6 - 3
    pages.release(2)
    assert pages.num_free == 6


def test_only_fresh_pages_are_scrubbed(pages: LatentPages) -> None:
    pages.kv.fill_(torch.nan)
    pages.take(1, 2)
    pages.scrub()
    assert not pages.kv[:, pages.pages_of(1)].any()
    assert pages.kv[:, 0].isnan().all()
    pages.kv[:, pages.pages_of(1)] = 7.0
    pages.take(2, 1, shared=pages.pages_of(1)[:1])
    pages.scrub()
    assert (pages.kv[:, pages.pages_of(1)] == 7.0).all()


def test_rows_of_positions(pages: LatentPages) -> None:
    pages.take(1, 2)
    pages.take(3, 2)
    first, second = pages.pages_of(3)
    rows = pages.rows_of(torch.tensor([3, 3, 3]), torch.tensor([0, 3, 5]))
    assert rows.tolist() == [4 * first, 4 * first + 3, 4 * second + 1]


def test_rename_keeps_pages(pages: LatentPages) -> None:
    pages.take(3, 2)
    held = pages.pages_of(3)
    pages.rename(3, 1)
    assert pages.pages_of(1) == held
    assert pages.table_SP[1, :2].tolist() == held
    assert not pages.table_SP[3].any()
    pages.release(1)


def test_copy_copies_every_layer(pages: LatentPages) -> None:
    pages.kv.normal_()
    pages.copy([1, 1], [2, 5])
    assert torch.equal(pages.kv[:, 2], pages.kv[:, 1])
    assert torch.equal(pages.kv[:, 5], pages.kv[:, 1])


# --- slots ----------------------------------------------------------------------------------------------------------
def test_slots_come_lowest_first(slots: StateSlots) -> None:
    assert [slots.take() for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(PoolError, match="all 4"):
        slots.take()
    slots.release(3)
    slots.release(1)
    assert slots.take() == 1
    with pytest.raises(PoolError, match="twice"):
        slots.release(3)


def test_scrub_zeroes_what_was_taken(slots: StateSlots) -> None:
    slots.states.fill_(torch.nan)
    slots.windows.fill_(torch.nan)
    slot = slots.take()
    slots.scrub()
    for pool in (slots.states, slots.windows):
        assert not pool[:, slot].any()
        assert pool[:, slot + 1].isnan().all()


def test_compact_moves_the_highest_into_the_gaps(slots: StateSlots) -> None:
    for _ in range(4):
        slots.take()
    slots.scrub()
    slots.states[:] = torch.arange(5.0).view(1, 5, 1, 1, 1)
    slots.windows[:] = torch.arange(5.0).view(1, 5, 1, 1)
    slots.release(1)
    slots.release(3)
    assert slots.compact() == {4: 1}
    assert (slots.states[:, 1] == 4).all()
    assert (slots.windows[:, 1] == 4).all()
    assert (slots.states[:, 2] == 2).all()
    assert slots.compact() == {}
    assert slots.take() == 3


def test_compact_refuses_dirty_slots(slots: StateSlots) -> None:
    slots.take()
    with pytest.raises(PoolError, match="scrub"):
        slots.compact()


def test_a_copied_slot_is_not_scrubbed_any_more(slots: StateSlots) -> None:
    source, target = slots.take(), slots.take()
    slots.scrub()
    slots.states[:, source] = 3.0
    slots.release(target)
    assert slots.take() == target
    slots.copy([source], [target])
    slots.scrub()
    assert (slots.states[:, target] == 3.0).all()


# --- both -----------------------------------------------------------------------------------------------------------
def test_sleep_drops_memory_and_wake_brings_zeros(pages: LatentPages, slots: StateSlots) -> None:
    pages.kv.fill_(torch.nan)
    slots.states.fill_(torch.nan)
    for pool in (pages, slots):
        assert pool.num_bytes > 0
        pool.sleep()
        assert pool.num_bytes == 0
    with pytest.raises(PoolError, match="sleep"):
        _ = pages.kv
    with pytest.raises(PoolError, match="sleep"):
        _ = slots.states
    for pool in (pages, slots):
        pool.wake()
        assert pool.num_bytes > 0
    assert not pages.kv.any()
    assert not slots.states.any()


def test_sleep_is_refused_while_memory_is_held(pages: LatentPages, slots: StateSlots) -> None:
    pages.take(1, 1)
    slots.take()
    for pool in (pages, slots):
        with pytest.raises(EngineError, match="1 requests"):
            pool.sleep()
