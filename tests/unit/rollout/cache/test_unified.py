"""The unified pool: bytes to the last one, compaction behind ids that stay, and the order of a step."""

from __future__ import annotations

import pytest
import torch
from helpers.pool_driver import CPU, LAYOUT, PoolDriver

from miles_k3.errors import EngineError
from miles_k3.rollout.cache.blocks import Kind
from miles_k3.rollout.cache.contract import CacheError, PoolError
from miles_k3.rollout.cache.layout import ALIGN_BYTES, Layout, Views
from miles_k3.rollout.cache.split import SplitPool
from miles_k3.rollout.cache.unified import UnifiedPool

SLOT, PAGE = Kind.SLOT, Kind.PAGE
S, P = LAYOUT.slot_bytes, LAYOUT.page_bytes
NUM_BYTES = 6 * S + 12 * P  # one slot and one page of it are padding blocks


@pytest.fixture
def pool() -> UnifiedPool:
    return UnifiedPool(LAYOUT, NUM_BYTES, CPU)


@pytest.fixture
def driver(pool: UnifiedPool) -> PoolDriver:
    return PoolDriver(pool)


def take_and_flush(driver: PoolDriver, kind: Kind, count: int) -> list[int]:
    blocks = [block for _, block in driver.take(kind, count)]
    driver.flush()
    return blocks


# --- bytes ----------------------------------------------------------------------------------------------------------
def test_every_byte_is_accounted_for(pool: UnifiedPool) -> None:
    assert pool.stats() == {
        "num_bytes": NUM_BYTES, "slots": 0, "pages": 0, "held_bytes": 0, "quarantined_bytes": 0,
        "padding_bytes": S + P, "free_bytes": NUM_BYTES - S - P,
    }  # fmt: skip
    pool.take_slot()
    pool.take_pages(3)
    assert pool.free_bytes == NUM_BYTES - 2 * S - 4 * P
    assert pool.stats()["held_bytes"] == S + 3 * P


def test_the_split_is_live(pool: UnifiedPool) -> None:
    """All of it as pages, then all of it as slots, then both to the last byte."""
    most_pages, most_slots = (5 * S + 11 * P) // P, (5 * S + 11 * P) // S
    pages = pool.take_pages(most_pages)
    assert not pool.fits(slots=1)
    assert not pool.fits(pages=1)
    with pytest.raises(PoolError, match="1 slots taken, 0 are free"):
        pool.take_slot()
    pool.give_pages(pages)
    slots = [pool.take_slot() for _ in range(most_slots)]
    assert not pool.fits(slots=1)
    pool.give_slots(slots)
    assert pool.fits(slots=5, pages=11)
    assert not pool.fits(slots=5, pages=12)
    assert pool.lacking(slots=5, pages=12) == (1, 1)
    pool.take_pages(11)
    for _ in range(5):
        pool.take_slot()
    assert pool.free_bytes == 0


def test_a_take_that_fails_takes_nothing(pool: UnifiedPool) -> None:
    with pytest.raises(PoolError, match="10000 pages"):
        pool.take_pages(10_000)
    assert pool.num_held == 0


def test_the_smallest_cache_is_named() -> None:
    with pytest.raises(EngineError, match=f"the smallest has {2 * (S + P)} bytes"):
        UnifiedPool(LAYOUT, 2 * (S + P) - 1, CPU)
    with pytest.raises(EngineError, match="0 slots"):
        SplitPool.of_budget(LAYOUT, 2 * (S + P), 0.1, CPU)


def test_real_k3_sizes() -> None:
    """54 MB states and 27 KB of KV a token at TP8, as published; a block of 64 tokens has no padding."""
    k3 = Layout(
        kda_layers=69, heads=12, head_dim=128, conv_width=4, mla_layers=24, page_size=64, width=576,
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert k3.window_offset == 69 * 12 * 128 * 128 * 4 == 54_263_808
    assert k3.slot_bytes == k3.window_offset + 69 * 3 * 3 * 12 * 128 * 2
    assert k3.token_bytes == 24 * 576 * 2 == 27_648


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("page_size", "width", "heads"), [(1, 1, 1), (3, 5, 1), (4, 3, 2), (64, 7, 3)])
def test_views_never_overlap_within_a_kind(dtype: torch.dtype, page_size: int, width: int, heads: int) -> None:
    """Odd sizes: blocks stay aligned, each number has a place of its own, and the last page ends with the buffer."""
    layout = Layout(
        kda_layers=3, heads=heads, head_dim=3, conv_width=3, mla_layers=2, page_size=page_size, width=width, dtype=dtype
    )
    assert layout.slot_bytes % ALIGN_BYTES == layout.page_bytes % ALIGN_BYTES == 0
    buffer = torch.zeros(4 * layout.slot_bytes + 5 * layout.page_bytes, dtype=torch.uint8)
    views = Views.of(layout, buffer)
    for parts in ((views.states, views.windows), (views.kv,)):
        buffer.zero_()
        for part in parts:
            part.fill_(1.0)
        numbers = sum(part.numel() * part.dtype.itemsize for part in parts)
        written = sum(int((part == 1.0).sum()) * part.dtype.itemsize for part in parts)
        assert written == numbers
        assert len(buffer) - int((buffer == 0).sum()) > 0
    buffer.zero_()
    views.kv[:, -1] = 1.0
    assert not buffer[: -layout.page_bytes].any()
    buffer.zero_()
    views.states[:, 0] = 1.0
    views.windows[:, 0] = 1.0
    assert not buffer[layout.slot_bytes :].any()


def test_a_layer_flattened_is_a_view(pool: UnifiedPool) -> None:
    """What the MLA layers write through `flatten(0, 1)` must not land in a copy."""
    for layer in pool.kv:
        assert layer.flatten(0, 1).data_ptr() == layer.data_ptr()
        layer.flatten(0, 1).index_fill_(0, torch.tensor([1]), 5.0)
    assert (pool.kv[:, 0, 1] == 5.0).all()


# --- compaction -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", list(Kind))
def test_a_block_given_back_in_the_middle(driver: PoolDriver, pool: UnifiedPool, kind: Kind) -> None:
    """The end block moves into the gap and keeps its id and content; what is free is one region again."""
    blocks = take_and_flush(driver, kind, 5)
    driver.give((kind, blocks[1]))
    driver.flush()
    end = pool.places.ends[kind]
    assert end.num_holes == 0
    assert end.num_moved == 1
    assert end.num_ranks == 1 + 4
    assert pool.places.region_bytes == pool.free_bytes
    rows = pool.slot_rows if kind is SLOT else pool.page_rows
    assert sorted(rows(blocks[:1] + blocks[2:]).tolist()) == sorted(
        pool._as_rows(kind, torch.arange(1, 5).numpy()).tolist()
    )


def test_a_hole_is_used_before_anything_moves(driver: PoolDriver, pool: UnifiedPool) -> None:
    blocks = take_and_flush(driver, PAGE, 6)
    driver.give((PAGE, blocks[2]))
    driver.take(PAGE)
    driver.flush()
    assert pool.places.ends[PAGE].num_moved == 0


def test_slots_close_their_holes_for_pages(driver: PoolDriver, pool: UnifiedPool) -> None:
    """Pages may be taken where states still are: the states are copied away before the pages are zeroed."""
    slots = take_and_flush(driver, SLOT, pool.num_free(SLOT))
    for slot in slots[:3]:
        driver.give((SLOT, slot))
    assert driver.take(PAGE, pool.num_free(PAGE))
    driver.flush()
    assert pool.free_bytes < P
    assert pool.places.ends[SLOT].num_moved == 3


def test_a_move_ends_with_its_block(driver: PoolDriver, pool: UnifiedPool) -> None:
    """A block given back while its move is queued: nothing is copied to a rank that is somebody else's by then."""
    pages = take_and_flush(driver, PAGE, 5)
    driver.give((PAGE, pages[0]))
    pool.places.settle()
    assert list(pool.places.ends[PAGE].sources) == [pages[4]]
    driver.give((PAGE, pages[4]))
    assert not pool.places.ends[PAGE].sources
    pool.places.settle()
    pool.check()
    assert list(pool.places.ends[PAGE].sources) == [pages[3]]
    driver.flush()


def test_many_moves_run_in_pieces(monkeypatch: pytest.MonkeyPatch, driver: PoolDriver, pool: UnifiedPool) -> None:
    monkeypatch.setattr("miles_k3.rollout.cache.unified.COPY_BYTES", 2 * P)
    pages = take_and_flush(driver, PAGE, 20)
    for page in pages[:9]:
        driver.give((PAGE, page))
    driver.flush()
    assert pool.places.ends[PAGE].num_moved == 9


def test_copied_slots_are_not_zeroed(driver: PoolDriver, pool: UnifiedPool) -> None:
    source, gone = take_and_flush(driver, SLOT, 2)
    driver.give((SLOT, gone))
    ((_, target),) = driver.take(SLOT)
    driver.copy(SLOT, source, target)
    driver.flush()
    with pytest.raises(CacheError, match="a source itself"):
        pool.copy_slots([source], [source])
    with pytest.raises(CacheError, match="a target twice"):
        pool.copy_slots([source, source], [target, target])
    with pytest.raises(CacheError, match="slot 0 is OWNED: it can't be copied over"):
        pool.copy_slots([source], [0])


# --- order of a step ------------------------------------------------------------------------------------------------
def test_rows_wait_for_the_flush(pool: UnifiedPool) -> None:
    first = pool.take_slot()
    with pytest.raises(CacheError, match=f"slot {first} is DIRTY"):
        pool.slot_rows([first])
    with pytest.raises(CacheError, match="flush before the forward"), pool.forward():
        pass
    pool.flush()
    pages = pool.take_pages(3)
    with pytest.raises(CacheError, match="flush first"):
        pool.slot_rows([first])
    pool.flush()
    assert pool.page_rows([[pages[0], 0], [pages[1], pages[2]]]).shape == (2, 2)
    pool.give_pages(pages[:1])
    assert pool.fits(slots=2)
    with pytest.raises(CacheError, match=r"page \d+ is FREE"):
        pool.page_rows(pages)


def test_nothing_moves_inside_a_forward(driver: PoolDriver, pool: UnifiedPool) -> None:
    """The books may change while a batch is built and queued; the bytes and the rows it reads may not."""
    pages = take_and_flush(driver, PAGE, 5)
    with pool.forward():
        before = pool.page_rows(pages[1:])
        pool.give_pages(pages[:1])
        with pytest.raises(CacheError, match="flush inside a forward"):
            pool.flush()
        assert torch.equal(before, pool.page_rows(pages[1:]))
        with pytest.raises(CacheError, match="forward inside a forward"), pool.forward():
            pass
        pool.places.settle()
        with pytest.raises(CacheError, match="moving blocks inside a forward"):
            pool.fill(pages=pool.take_pages(1))
    pool.flush()


def test_padding_rows_touch_no_live_block(driver: PoolDriver, pool: UnifiedPool) -> None:
    """A full pool: what padding writes lands in block 0, which is zero for every reader again after nobody's use."""
    take_and_flush(driver, SLOT, 5)
    take_and_flush(driver, PAGE, 11)
    assert pool.free_bytes == 0
    pool.states[1].index_fill_(0, pool.slot_rows([0]), 9.0)
    pool.kv[1].flatten(0, 1).index_fill_(0, pool.page_rows([0]) * LAYOUT.page_size, 9.0)
    for view, row in ((pool.states, pool.slot_rows([0])), (pool.kv, pool.page_rows([0]))):
        assert view[1].index_select(0, row).any()
        view[1].index_fill_(0, row, 0.0)
    driver.verify()


# --- transfers ------------------------------------------------------------------------------------------------------
def test_a_block_that_is_filled_stays(driver: PoolDriver, pool: UnifiedPool) -> None:
    """It can't close a hole before its transfer ends; meanwhile its own kind may use the hole."""
    slots = take_and_flush(driver, SLOT, 3)
    last = driver.take(SLOT)
    ticket = driver.fill(last)
    row = ticket.slot_rows
    driver.give((SLOT, slots[0]))
    driver.give((SLOT, slots[1]))
    driver.flush()
    end = pool.places.ends[SLOT]
    assert (end.num_holes, end.num_ranks) == (2, 5)
    assert pool.free_bytes == pool.places.region_bytes + 2 * S
    driver.land(ticket)
    driver.end(ticket, success=True)
    driver.flush()
    assert (end.num_holes, end.num_ranks) == (0, 3)
    assert pool.slot_rows([last[0][1]]).tolist() != row


def test_a_transfer_into_memory_that_was_just_left(driver: PoolDriver, pool: UnifiedPool) -> None:
    """The block that is about to move away is copied before the ticket is out, not at the next flush."""
    slots = take_and_flush(driver, SLOT, pool.num_free(SLOT))
    driver.give((SLOT, slots[0]))
    pages = driver.take(PAGE, pool.num_free(PAGE))
    assert pool.places.ends[SLOT].sources
    ticket = driver.fill(pages)
    driver.land(ticket)
    driver.flush()
    driver.end(ticket, success=True)
    driver.flush()


def test_quarantine_holds_memory_until_the_transfer_ends(driver: PoolDriver, pool: UnifiedPool) -> None:
    pages = driver.take(PAGE, 4)
    ticket = driver.fill(pages, deadline_s=1.0)
    assert pool.transfers.expire(2.0) == [ticket]
    assert pool.stats()["quarantined_bytes"] == 4 * P
    with pytest.raises(EngineError, match="still held"):
        pool.sleep()
    free = pool.num_free(PAGE)
    driver.take(PAGE, free)
    driver.flush()
    driver.land(ticket)  # late, and into blocks that nobody else was given
    driver.verify()
    assert pool.transfers.complete(ticket)
    driver.open.remove(ticket)
    assert pool.num_free(PAGE) == 4


# --- sleep ----------------------------------------------------------------------------------------------------------
def test_sleep_and_wake(driver: PoolDriver, pool: UnifiedPool) -> None:
    slots = take_and_flush(driver, SLOT, 2)
    with pytest.raises(EngineError, match="'slot': 2"):
        pool.sleep()
    for slot in slots:
        driver.give((SLOT, slot))
    pool.sleep()
    for name in ("states", "windows", "kv", "buffer"):
        with pytest.raises(PoolError, match="sleeps"):
            getattr(pool, name)
    pool.wake()
    assert not pool.buffer.any()
