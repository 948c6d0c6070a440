"""Random lives of blocks in both pools: nothing leaks, nothing is given twice, and content follows its id."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from helpers.pool_driver import LAYOUT, PoolDriver, make_pool
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miles_k3.rollout.cache.blocks import BlockState, Kind
from miles_k3.rollout.cache.contract import CacheError, PoolError

NUM_BYTES = 7 * LAYOUT.slot_bytes + 15 * LAYOUT.page_bytes + 24
KINDS = st.sampled_from(list(Kind))


class UnifiedMachine(RuleBasedStateMachine):
    POOL = "unified"

    def __init__(self) -> None:
        super().__init__()
        self.driver = PoolDriver(make_pool(self.POOL, NUM_BYTES))
        self.pool = self.driver.pool

    def _owned(self, kind: Kind) -> list[int]:
        return [b for k, b in self.driver.content if k is kind]

    # --- owners -------------------------------------------------------------------------------------------------
    @rule(kind=KINDS, count=st.integers(1, 4))
    def take(self, kind: Kind, count: int) -> None:
        free = self.pool.num_free(kind)
        assert bool(self.driver.take(kind, count)) == (count <= free)

    @rule(kind=KINDS, more=st.integers(1, 3))
    def take_too_many(self, kind: Kind, more: int) -> None:
        count = self.pool.num_free(kind) + more
        if kind is Kind.PAGE:
            with pytest.raises(PoolError, match="are free"):
                self.pool.take_pages(count)
        slots, pages = self.pool.lacking(**{f"{kind}s": count})
        assert (slots if kind is Kind.SLOT else pages) == more

    @precondition(lambda self: self.driver.content or self.driver.fresh)
    @rule(pick=st.randoms())
    def give(self, pick: random.Random) -> None:
        self.driver.give(pick.choice([*self.driver.content, *self.driver.fresh]))

    @rule(kind=KINDS, pick=st.randoms())
    def give_what_is_free(self, kind: Kind, pick: random.Random) -> None:
        ledger = self.pool.ledgers[kind]
        block = pick.randint(1, ledger.num_blocks - 1)
        if ledger.state(block) in (BlockState.FREE, BlockState.QUARANTINED):
            with pytest.raises(CacheError, match=f"{kind} {block} is {ledger.state(block).name}"):
                (self.pool.give_slots if kind is Kind.SLOT else self.pool.give_pages)([block])

    @rule()
    def flush(self) -> None:
        self.driver.flush()

    @rule(kind=KINDS, pick=st.randoms())
    def copy(self, kind: Kind, pick: random.Random) -> None:
        owned = self._owned(kind)
        targets = [*owned, *(b for k, b in self.driver.fresh if k is kind)]
        if len(targets) > 1 and owned:
            source = pick.choice(owned)
            self.driver.copy(kind, source, pick.choice([t for t in targets if t != source]))

    # --- transfers ----------------------------------------------------------------------------------------------
    @precondition(lambda self: self.driver.fresh)
    @rule(pick=st.randoms(), deadline_s=st.none() | st.integers(0, 5))
    def fill(self, pick: random.Random, deadline_s: int | None) -> None:
        blocks = pick.sample(self.driver.fresh, pick.randint(1, len(self.driver.fresh)))
        self.driver.fill(blocks, deadline_s)

    @precondition(lambda self: self.driver.open)
    @rule(pick=st.randoms())
    def land(self, pick: random.Random) -> None:
        self.driver.land(pick.choice(self.driver.open))

    @precondition(lambda self: self.driver.open)
    @rule(pick=st.randoms(), success=st.booleans())
    def end(self, pick: random.Random, success: bool) -> None:
        self.driver.end(pick.choice(self.driver.open), success=success)

    @precondition(lambda self: self.driver.ended)
    @rule(pick=st.randoms())
    def end_twice(self, pick: random.Random) -> None:
        assert not self.pool.transfers.complete(pick.choice(self.driver.ended))

    @precondition(lambda self: self.driver.open)
    @rule(pick=st.randoms())
    def abandon(self, pick: random.Random) -> None:
        """The owner gives one block back, or cancels the whole."""
        ticket = pick.choice(self.driver.open)
        block = pick.choice(ticket.blocks)
        if pick.random() < 0.5:
            self.pool.transfers.cancel(ticket)
        elif self.pool.ledgers[block[0]].state(block[1]) is BlockState.FILLING:
            self.driver.give(block)

    @rule(now_s=st.integers(0, 5))
    def expire(self, now_s: int) -> None:
        for ticket in self.pool.transfers.expire(now_s):
            assert {self.pool.ledgers[k].state(b) for k, b in ticket.blocks} == {BlockState.QUARANTINED}

    # --- always -------------------------------------------------------------------------------------------------
    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        stats = self.pool.stats()
        held = [*self.driver.content, *self.driver.fresh]
        for ticket in self.driver.open:
            held += [(k, b) for k, b in ticket.blocks if self.pool.ledgers[k].state(b) is BlockState.FILLING]
        size = self.pool.block_bytes
        assert stats["held_bytes"] == sum(size[kind] for kind, _ in held)
        assert sum(stats[f"{k}_bytes"] for k in ("held", "quarantined", "free", "padding")) == stats["num_bytes"]
        if self.POOL == "unified":
            assert stats["padding_bytes"] == sum(size.values()) + NUM_BYTES % 16

    def teardown(self) -> None:
        self.driver.flush()
        self.driver.close()


class SplitMachine(UnifiedMachine):
    POOL = "split"


STORM = settings(max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestUnified = UnifiedMachine.TestCase
TestUnified.settings = STORM
TestSplit = SplitMachine.TestCase
TestSplit.settings = STORM


def soak(driver: PoolDriver, count: int, seed: int) -> None:
    """`count` random operations; about one in ten is a flush, which verifies every block."""
    draw, pool = random.Random(seed), driver.pool
    for _ in range(count):
        roll = draw.random()
        held = [*driver.content, *driver.fresh]
        if roll < 0.36:
            driver.take(draw.choice(list(Kind)), draw.randint(1, 3))
        elif roll < 0.75 and held:
            driver.give(draw.choice(held))
        elif roll < 0.85:
            driver.flush()
        elif roll < 0.90 and driver.fresh:
            driver.fill(draw.sample(driver.fresh, draw.randint(1, len(driver.fresh))), draw.random() * count)
        elif roll < 0.93 and driver.open:
            driver.land(draw.choice(driver.open))
        elif roll < 0.96 and driver.open:
            driver.end(draw.choice(driver.open), success=draw.random() < 0.7)
        elif roll < 0.97 and driver.open:
            pool.transfers.cancel(draw.choice(driver.open))
        elif driver.ended:
            assert not pool.transfers.fail(draw.choice(driver.ended[-50:]))
    driver.flush()
    driver.close()


@pytest.mark.parametrize("kind", ["unified", "split"])
def test_a_short_storm(kind: str) -> None:
    soak(PoolDriver(make_pool(kind, 2 * NUM_BYTES)), 3_000, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unified", "split"])
def test_100_000_operations(kind: str) -> None:
    soak(PoolDriver(make_pool(kind, 2 * NUM_BYTES)), 100_000, seed=2)
