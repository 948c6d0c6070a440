"""Storms of requests on a prefix cache: drawn by hypothesis, which shrinks what fails, or many thousands in one go."""

from __future__ import annotations

import random
import sys
from typing import Any

import hypothesis.strategies as st
from helpers.cache_driver import CacheDriver, Policy, Running
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from miles_k3.rollout.cache.contract import TOKEN_BYTES, encode, num_tokens

VERSIONS = st.integers(0, 2)
PICKS = st.integers(0, 2**16)  # an index into whatever list there is, modulo its length


class CacheMachine(RuleBasedStateMachine):
    """Sequences are prefixes of earlier ones, or go on from there with a run of one token; all end around page ends."""

    def __init__(self, policy: Policy, page_size: int) -> None:
        super().__init__()
        self.driver = CacheDriver(policy, page_size)
        self.page = page_size
        self.known = [b""]

    def _near(self, pages: int, off: int) -> int:
        return max(0, pages * self.page + off)

    def _running(self, pick: int) -> Running:
        return self.driver.running[pick % len(self.driver.running)]

    def _sequence(self, pick: int, cut: tuple[int, int], tail: tuple[int, int], token: int) -> bytes:
        prefix = self.known[pick % len(self.known)][: self._near(*cut) * TOKEN_BYTES]
        key = prefix + encode([token]) * max(self._near(*tail), not prefix)
        self.known.append(key)
        return key

    ENDS = st.tuples(st.integers(0, 3), st.integers(-1, 1))

    @rule(version=VERSIONS, pick=PICKS, cut=ENDS, tail=ENDS, token=st.integers(0, 2), copies=st.integers(1, 2))
    def start(self, version: int, pick: int, cut: Any, tail: Any, token: int, copies: int) -> None:
        key = self._sequence(pick, cut, tail, token)
        for _ in range(copies):
            self.driver.start(version, key)

    @rule(version=VERSIONS, pick=PICKS, cut=ENDS, tail=ENDS, token=st.integers(0, 2))
    def probe(self, version: int, pick: int, cut: Any, tail: Any, token: int) -> None:
        self.driver.probe(version, self._sequence(pick, cut, tail, token))

    @precondition(lambda self: self.driver.running)
    @rule(pick=PICKS, ends=st.lists(ENDS, max_size=3), plant=st.booleans(), stop=st.booleans())
    def run(self, pick: int, ends: Any, plant: bool, stop: bool) -> None:
        """As the engine does: to the fork, a checkpoint there, then on to some of its ends and to the last token."""
        request = self._running(pick)
        fork = request.match.fork or 0
        length = num_tokens(request.key)
        for end in sorted({fork, length, *(min(self._near(*end), length) for end in ends)}):
            if end > request.num_done:
                self.driver.compute(request, end - request.num_done)
                self.driver.extend(request)
                if (plant or end == fork) and end % self.driver.cache.checkpoint_unit == 0:
                    self.driver.checkpoint(request, end)
        if stop:
            self.driver.release_twice(request)

    @precondition(lambda self: self.driver.running)
    @rule(pick=PICKS, tokens=ENDS, extend=st.booleans())
    def compute(self, pick: int, tokens: Any, extend: bool) -> None:
        request = self._running(pick)
        self.driver.compute(request, self._near(*tokens))
        if extend:
            self.driver.extend(request)

    @precondition(lambda self: self.driver.running)
    @rule(pick=PICKS, position=PICKS)
    def checkpoint(self, pick: int, position: int) -> None:
        """Anywhere on the way, with a snapshot, or at the end."""
        request = self._running(pick)
        unit = self.driver.cache.checkpoint_unit
        last = min(request.num_done, (request.num_cached + 1) * self.page - 1) // unit
        if last:
            self.driver.checkpoint(request, (last - position % last) * unit)

    @precondition(lambda self: self.driver.running)
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        self.driver.release(self._running(pick))

    @rule(pages=st.integers(0, 6), slots=st.integers(0, 3))
    def evict(self, pages: int, slots: int) -> None:
        self.driver.evict(pages, slots)

    @rule(version=VERSIONS)
    def forget(self, version: int) -> None:
        self.driver.forget(version)

    @invariant()
    def books_balance(self) -> None:
        self.driver.verify()

    def teardown(self) -> None:
        # Also called after a failure, which a crash on the broken cache must not hide.
        if sys.exception() is None:
            self.driver.finish()


def storm(policy: Policy, page_size: int, *, examples: int = 60, quick: bool = False) -> None:
    """Many short lives of a cache. `quick`: the same ones each time, and the first failure as it is."""

    class Machine(CacheMachine):
        def __init__(self) -> None:
            super().__init__(policy, page_size)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow],
            derandomize=quick, report_multiple_bugs=not quick, phases=[Phase.generate] if quick else tuple(Phase),
        ),
    )  # fmt: skip


def soak(policy: Policy, page_size: int, *, operations: int, seed: int = 0) -> None:
    """One long life, kept at a few hundred pages."""
    draw = random.Random(seed)
    machine = CacheMachine(policy, page_size)
    driver = machine.driver

    def near() -> tuple[int, int]:
        return draw.randrange(4), draw.randrange(-1, 2)

    for step in range(operations):
        machine.known = machine.known[-40:]
        act, pick, some = draw.random(), draw.randrange(2**16), bool(draw.randrange(2))
        where = (draw.randrange(3), pick, near(), near(), draw.randrange(3))
        if act < 0.15:
            machine.probe(*where)
        elif (act < 0.4 and len(driver.running) < 12) or not driver.running:
            machine.start(*where, copies=1)
        elif act < 0.6:
            machine.run(pick, [near()], plant=some, stop=bool(draw.randrange(2)))
        elif act < 0.7:
            machine.compute(pick, near(), extend=some)
        elif act < 0.8:
            machine.checkpoint(pick, draw.randrange(2**16))
        elif act < 0.9:
            machine.release(pick)
        elif act < 0.998:
            machine.evict(draw.randrange(4), draw.randrange(3))
        else:
            machine.forget(draw.randrange(3))
        if len(driver.oracle.pages) > 300:
            machine.evict(len(driver.oracle.pages) - 200, 0)
        if step % 50 == 0:
            machine.books_balance()
    machine.teardown()
