"""Mistakes planted in the paged policy, each of which the driver and its oracle must see."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from helpers.cache_driver import CacheDriver, Policy
from helpers.cache_oracle import FakeMemory
from helpers.mutants import mutants, mutate

from miles_k3.rollout.cache.contract import CacheError, encode
from miles_k3.rollout.cache.hashed_blocks import BlockStore, digest_of
from miles_k3.rollout.cache.paged import PagedCache

BLOCK = 4
type Make = Callable[[FakeMemory, int], PagedCache]


def policy(*edits: tuple[str, str]) -> Callable[[], Make]:
    """Maker of a policy with edits."""

    def plant() -> Make:
        cls = mutate(PagedCache, *edits)
        return lambda memory, size: cls(memory, page_size=size, hash_block_size=2)

    return plant


def store(*edits: tuple[str, str]) -> Callable[[], Make]:
    """Maker of a policy on a block store with edits."""

    def plant() -> Make:
        cls = mutate(BlockStore, *edits)

        def make(memory: FakeMemory, size: int) -> PagedCache:
            cache = PagedCache(memory, page_size=size, hash_block_size=2)
            cache._store = cls(stride=cache._stride, step=cache._step, digest=digest_of)
            return cache

        return make

    return plant


def storm(make: Make, *, operations: int = 4000) -> None:
    """Random requests over a few prefixes, as an engine makes them; raises when a promise is broken."""
    draw = random.Random(7)
    driver = CacheDriver(Policy(make=make), BLOCK)
    known = [b""]
    for _ in range(operations):
        act = draw.random()
        if act < 0.3 or not driver.running:
            prefix = draw.choice(known)[: 4 * draw.randrange(14)]
            known = [*known[-20:], prefix + encode([draw.randrange(3)]) * draw.randrange(1, 9)]
            driver.start(draw.randrange(2), known[-1])
        elif act < 0.7:
            request = draw.choice(driver.running)
            driver.compute(request, draw.randrange(9))
            driver.extend(request)
            at = request.num_done // 2 * 2
            if at and draw.random() < 0.7:
                driver.checkpoint(request, at)
        elif act < 0.85:
            driver.release(draw.choice(driver.running))
        elif act < 0.98:
            driver.evict(draw.randrange(4), draw.randrange(3))
        else:
            driver.forget(draw.randrange(2))
        if len(driver.running) > 8:
            driver.release(draw.choice(driver.running))
        driver.verify()
    driver.finish()


def test_the_policy_survives_the_storm() -> None:
    storm(lambda memory, size: PagedCache(memory, page_size=size, hash_block_size=2))


@mutants(
    {
        "a released lease keeps its pins": policy(("            self._store.unpin(block)\n", "            pass\n")),
        "what was read isn't pinned": policy(("            self._store.read(read)\n", "            pass\n")),
        "parents are evicted first": policy(("*reversed(blocks)]", "*blocks]")),
        "the last token counts as computed": policy(("max(len(key) - TOKEN_BYTES, 0)", "len(key)")),
        "a double is kept by nobody": policy(("doubles.append(pages[i])", "pass")),
        "extended blocks aren't pinned": policy(
            ("            self._store.pin(block)\n            lease.blocks", "            lease.blocks")
        ),
        "a tail gives way while others read it": policy((" and not old.shared", "")),
        "a match hands out one page too many": policy(
            ("blocks[: position // self.page_size]", "blocks[: position // self.page_size + 1]")
        ),
        "no fork is seen": policy(("depth if position < depth < num_tokens(key) else None", "None")),
        "versions share": store(
            ('version.to_bytes(8, "little", signed=True)', 'b"same"'), (" and block.version == version", "")
        ),
        "a lost state is still counted": store(("        self.num_slots -= 1\n", "")),
        "a dropped block stays in the table": store(("del self.table[block.digest]", "pass")),
        "the slot of a dropped block leaks": store(
            ("del self.idle[block]\n            self._lose_state(block, given)", "del self.idle[block]")
        ),
    }
)  # fmt: skip
def test_mistakes_are_seen(plant: Callable[[], Make]) -> None:
    make = plant()
    with pytest.raises((AssertionError, CacheError, KeyError)):
        storm(make)
