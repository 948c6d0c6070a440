"""Storms of submissions, aborts and swaps: the books always balance, and nobody's answer changes."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers.engines import (
    adapter_update,
    ask,
    assert_idle,
    make_engine,
    poison_before_steps,
    random_prompts,
    tokens_of,
)
from helpers.mutants import mutate
from helpers.pool_driver import make_pool, poison
from helpers.speculating import speculating_engine
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from miles_k3.rollout.cache.blocks import Kind
from miles_k3.rollout.cache.layout import Layout
from miles_k3.rollout.cache.shared_pages import SharedPages
from miles_k3.rollout.embedded import request as requests
from miles_k3.rollout.embedded.memory import RequestMemory
from miles_k3.rollout.embedded.prefix import Prefixes
from miles_k3.rollout.embedded.request import Request, Stage
from miles_k3.rollout.embedded.scheduler import Scheduler
from miles_k3.rollout.embedded.speculation import Speculator
from miles_k3.types import Completion, FinishReason, SamplingParams

# What `Speculator.limits` reads of one: blocks of 3, and 12 positions for 5 requests.
SPECULATES: Any = SimpleNamespace(at=SimpleNamespace(longest=4), num_positions=12)
LAYOUT = Layout(
    kda_layers=1, heads=1, head_dim=2, conv_width=2, mla_layers=1, page_size=4, width=1, dtype=torch.float32,
    draft_width=1,
)  # fmt: skip
NUM_SLOTS, NUM_PAGES, MAX_RUNNING, LONGEST = 7, 30, 5, 48


NO_CONTEXT = -1.0  # in place of a mark in the draft's part of pages of whoever no draft follows


def mark(version: int, tokens: tuple[int, ...]) -> float:
    """What the last of these tokens leaves in a page; sums of marks are exact in fp32."""
    return float(hash((version, tokens)) % 997 * 100 + len(tokens))


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler, the pools and the prefix cache without a model: the 'forward' writes a mark for each prefix.

    The state is the sum of a sequence's marks, its pages hold them; both are read back through page table and slot
    after everything that is computed, so that any move, fork, restore or sharing that mixes two sequences up is seen.
    Steps stay in flight as those of a device do: their tokens are known to the forward and not to the scheduler.
    """

    @initialize(
        kind=st.sampled_from(["unified", "split"]), policy=st.sampled_from(["off", "radix", "paged"]),
        reserve=st.sampled_from([None, 0, 3]), interval=st.sampled_from([0, 8]), chunk=st.sampled_from([5, 7, 30]),
    )  # fmt: skip
    def build(self, kind: str, policy: str, reserve: int | None, interval: int, chunk: int) -> None:
        num_bytes = (NUM_SLOTS + 1) * LAYOUT.slot_bytes + (NUM_PAGES + 1) * LAYOUT.page_bytes
        self.pool = make_pool(kind, num_bytes, LAYOUT)
        self.memory = RequestMemory(self.pool, max_running=MAX_RUNNING, max_pages=LONGEST // 4)
        self.prefixes = Prefixes.over(policy, self.memory, min_tokens=3, track_interval=interval)
        self.scheduler = Scheduler(
            self.memory, prefill_chunk_tokens=chunk, prefixes=self.prefixes, reserve_tokens=reserve,
            follows=lambda load, _: self.count % 5 > 0,
        )  # fmt: skip
        self.requests: list[Request] = []
        self.flying: list[tuple[Request, int]] = []
        self.count = 0

    @rule(
        kind=st.integers(0, 2), length=st.sampled_from([1, 4, 7, 8, 17, 20]), new=st.integers(1, 12),
        version=st.integers(0, 1), copies=st.integers(1, 3), routes=st.booleans(), priority=st.integers(0, 1),
        protected=st.booleans(),
    )  # fmt: skip
    def submit(
        self, kind: int, length: int, new: int, version: int, copies: int, routes: bool, priority: int, protected: bool
    ) -> None:
        for _ in range(copies):
            self.count += 1
            request = Request(
                id=str(self.count), prompt=(kind,) * length, version=version,
                params=SamplingParams(
                    max_new_tokens=new, return_routed_experts=routes, seed=self.count % 3, priority=priority,
                    protected=protected,
                ),
            )  # fmt: skip
            self.requests.append(request)
            self.scheduler.submit(request)

    @precondition(lambda self: self.requests)
    @rule(pick=st.randoms())
    def another_turn(self, pick) -> None:
        """A prompt that goes on where a request stands."""
        old = pick.choice(self.requests)
        if len(old.tokens) <= 30:
            self.count += 1
            request = Request(
                id=str(self.count),
                prompt=(*old.tokens, 9),
                version=old.version,
                params=SamplingParams(max_new_tokens=5),
            )
            self.requests.append(request)
            self.scheduler.submit(request)

    @precondition(lambda self: self.requests)
    @rule(pick=st.randoms())
    def abort(self, pick) -> None:
        self.scheduler.finish(pick.choice(self.requests), FinishReason.ABORT)
        self._drop_done()

    @precondition(lambda self: self.scheduler.has_work)
    @rule(steps=st.integers(1, 6), overlap=st.booleans(), drafts=st.booleans())
    def step(self, steps: int, overlap: bool, drafts: bool) -> None:
        for _ in range(steps):
            if drafts:
                self._collect()  # nobody knows before how far a verify comes
            plan = self.scheduler.plan()
            assert plan.has_work or self.flying or not self.scheduler.has_work
            limits = Speculator.limits(SPECULATES, self.scheduler, plan.decodes).tolist() if drafts else None
            self.pool.flush()
            poison(self.pool)
            flying, ended = [], []
            feeds = dict(self.flying)
            with self.pool.forward():
                self.memory.page_rows([*plan.decodes, *(r for r, _ in plan.chunks)], LONGEST)  # as attention reads them
                for request, limit in zip(plan.decodes, limits or [], strict=limits is not None):
                    ended.append((request, self._verify(request, limit)))
                for request in plan.decodes if limits is None else ():
                    tokens = (*request.tokens, *([feeds[request]] if request.in_flight else []))
                    flying.append((request, self._compute(request, tokens, 1)))
                for request, count in plan.chunks:
                    assert count > 0
                    self._compute(request, request.feed, count)
                    if any(r.params.return_routed_experts for r in (request, *request.followers)):
                        request.routed.append(torch.zeros(count, 1, 1))
            if self.prefixes is not None:
                self.prefixes.track(plan.decodes)
            for request, _ in plan.chunks:
                flying += [(member, self._sample(member, member.feed)) for member in self._prompt(request)]
            flying += [(request, self._sample(request, request.feed)) for request, _ in plan.ready]
            self.pool.flush()
            for request, _ in flying:
                tokens = (*request.tokens, *([feeds[request]] if request.in_flight else []))
                self._check(request, tokens[: request.num_cached])
                request.in_flight += 1
            self._collect()
            self.flying = flying
            for request, reason in ended:
                self._check(request, request.tokens[: request.num_cached])
                if reason:
                    self.scheduler.finish(request, reason)
            if not overlap:
                self._collect()
        self._drop_done()

    def _verify(self, request: Request, limit: int) -> FinishReason | None:
        """The request's token and `limit` drafted ones, some wrong, into its pages; its state and its answer go on as
        far as they were right, and nothing stays of the rest."""
        owner, start, fed, drawn = torch.zeros(1, dtype=torch.int64), request.num_cached, list(request.tokens), []
        rows = [self.memory.token_rows([request], owner, torch.tensor([start + j])) for j in range(limit + 1)]
        for j, row in enumerate(rows):
            self._write(request, row, mark(request.version, tuple(fed)))
            drawn.append(self._sample(request, tuple(fed)))
            fed.append(drawn[-1] if (start + j + request.params.seed) % 3 else drawn[-1] + 1)
        right = next((j for j in range(limit) if fed[start + 1 + j] != drawn[j]), limit)
        count, reason = request.accept_block(drawn[: right + 1], [0.0] * (right + 1))
        for row, part in itertools.product(rows[count:], (self.pool.kv, self.pool.draft)):
            part[0].flatten(0, 1)[row] = 0
        state_row = self.pool.slot_rows([request.slot])
        for j in range(count):
            self.pool.states[0, state_row] += mark(request.version, request.tokens[: start + 1 + j])
        request.num_cached += count
        assert len(request.token_ids) <= request.params.max_new_tokens
        assert (len(request.token_ids) == request.params.max_new_tokens) == (reason is not None)
        if request.params.return_routed_experts:
            request.routed.append(torch.zeros(count, 1, 1))
        return reason

    def _prompt(self, request: Request) -> list[Request]:
        """Who samples after a chunk."""
        if request.num_cached < len(request.feed):
            if self.prefixes is not None:
                self.prefixes.reached(request)
            return []
        if self.prefixes is not None:
            self.prefixes.prompt_ended(request, torch.zeros(1))
        members = self.scheduler.prompt_done(request)
        for member in members:
            assert not member.params.return_routed_experts or member.num_routed == len(member.feed)
        return members

    def _compute(self, request: Request, tokens: tuple[int, ...], count: int) -> int:
        """The next `count` of `tokens` into the request's memory; what the last one draws."""
        for position in range(request.num_cached, request.num_cached + count):
            written = mark(request.version, tokens[: position + 1])
            row = self.memory.token_rows([request], torch.zeros(1, dtype=torch.int64), torch.tensor([position]))
            self._write(request, row, written)
            self.pool.states[0, self.pool.slot_rows([request.slot])] += written
        request.num_cached += count
        if request.stage is Stage.DECODE and request.params.return_routed_experts:
            request.routed.append(torch.zeros(count, 1, 1))
        return self._sample(request, tokens[: request.num_cached])

    def _write(self, request: Request, row: torch.Tensor, written: float) -> None:
        for part, value in ((self.pool.kv, written), (self.pool.draft, written if request.followed else NO_CONTEXT)):
            flat = part[0].flatten(0, 1)
            assert flat[row] == 0, "a page was not clean, or is written twice"
            flat[row] = value

    def _sample(self, request: Request, tokens: tuple[int, ...]) -> int:
        return hash((request.version, tokens, request.params.seed)) % 3

    def _check(self, request: Request, tokens: tuple[int, ...]) -> None:
        assert len(tokens) == request.num_cached
        owners = torch.zeros(len(tokens), dtype=torch.int64)
        rows = self.memory.token_rows([request], owners, torch.arange(len(tokens)))
        held, context = (part[0].flatten(0, 1)[rows].flatten().tolist() for part in (self.pool.kv, self.pool.draft))
        expected = [mark(request.version, tokens[: p + 1]) for p in range(len(tokens))]
        assert held == expected
        assert context == (expected if request.followed else [NO_CONTEXT] * len(expected))
        assert (self.pool.states[0, self.pool.slot_rows([request.slot])] == sum(expected)).all()

    def _collect(self) -> None:
        flying, self.flying = self.flying, []
        for request, token in flying:
            request.in_flight -= 1
            if request.stage is Stage.DONE:
                continue
            reason = request.accept(token, 0.0)
            if reason:
                assert not request.params.return_routed_experts or request.num_routed >= len(request.tokens) - 1
                self.scheduler.finish(request, reason)

    def _drop_done(self) -> None:
        self.requests = [r for r in self.requests if r.stage is not Stage.DONE]

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        running = (*self.scheduler.prefilling, *self.scheduler.decoding)
        holding = [r for leader in running for r in (leader, *leader.followers)]
        assert len(holding) == self.scheduler.num_running <= MAX_RUNNING
        assert {r.id for r in holding} == {r.id for r in self.requests if r.stage is not Stage.WAITING}
        slots = [slot for r in holding for slot in (r.slot, *(t.slot for t in r.tracks))]
        assert len({r.seat for r in holding}) == len(holding)
        users = Counter(page for r in holding for page in r.pages)
        cached = {"pages": 0, "slots": 0}
        if self.prefixes is not None:
            self.prefixes.cache.check()
            cached = self.prefixes.cache.stats()
        assert 0 not in (*slots, *users)
        assert len(set(slots)) == len(slots) == self.pool.ledgers[Kind.SLOT].num_held - cached["slots"]
        assert len(users) <= self.pool.ledgers[Kind.PAGE].num_held <= len(users) + cached["pages"]
        for r in holding:
            if r.params.protected or self.scheduler.reserve_tokens is None:
                assert len(r.pages) == self.pool.pages_for(r.total_tokens)
        self.pool.check()
        for part in (self.pool.kv, self.pool.states, self.pool.windows):
            row = self.pool._rows(Kind.PAGE if part is self.pool.kv else Kind.SLOT, np.zeros(1, np.int64))
            assert not part[:, row].any()

    def teardown(self) -> None:
        """Whatever is left runs to its end, and everything comes back."""
        if not hasattr(self, "pool"):
            return
        for _ in range(10_000):
            if not self.scheduler.has_work:
                break
            self.step(1, False, False)
        self._collect()
        assert not self.requests
        if self.prefixes is not None:
            self.prefixes.forget_all_but(set())
        assert not self.pool.num_held


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestScheduler = SchedulerMachine.TestCase

MISTAKES = {
    "a follower gets no state": (RequestMemory, "fork", ("self.pool.copy_slots(", "print(")),
    "a follower gets no last page": (RequestMemory, "fork", ("self.pool.copy_pages(", "print(")),
    "a seat keeps its pages": (RequestMemory, "give", ("self._table[request.seat] = 0", "pass")),
    "a page is given to two": (SharedPages, "hold", ("self._holders[page] += 1", "pass")),
    "a snapshot is of another state": (
        Prefixes, "_snapshot", ("pool.copy_slots([request.slot], [slot])", "pool.copy_slots([0], [slot])"),
    ),
    "a prefix is taken over without its state": (
        Prefixes, "attach", ("[match.slot], [request.slot]", "[0], [request.slot]"),
    ),
    "a prefix is taken over without its tail": (Prefixes, "attach", ("self.memory.pool.copy_pages(", "print(")),
    "versions share prompts": (Scheduler, "_leader_for", ("(request.version, request.feed)", "(0, request.feed)")),
    "a retracted one keeps its count": (Scheduler, "_retract", ("request.num_cached, request.stops = 0, []", "pass")),
    "a full request decodes on": (Scheduler, "plan", ("if not r.is_full and", "if")),
    "drafts have no place": (
        Scheduler, "room", ("end = request.num_cached + wanted", "return wanted"),
    ),
    "drafts go past the answer's end": (
        Speculator, "limits", ("request.params.max_new_tokens - len(request.token_ids)", "99"),
    ),
    "pages of both kinds are one": (requests, "cache_keys", ("version, -3 - version", "version, version")),
    "a block goes on behind its end": (Request, "accept_block", ("return count, reason", "pass")),
}  # fmt: skip


# What takes the machine long to come upon; test_engine_speculation.py and test_engine_prefix.py see these soon.
RARE = (
    "drafts go past the answer's end", "a prefix is taken over without its tail", "pages of both kinds are one",
)  # fmt: skip


@pytest.mark.parametrize("mistake", [pytest.param(m, marks=pytest.mark.slow if m in RARE else ()) for m in MISTAKES])
def test_the_machine_sees_planted_mistakes(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, edit = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, mutate(getattr(owner, name), edit))
    quick = settings(
        max_examples=600, stateful_step_count=30, deadline=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(SchedulerMachine, settings=quick)


PROMPTS = [p for p in random_prompts(6, low=1, high=40, seed=31) for _ in range(2)]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    aborts=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 12)), max_size=8),
    swap_at=st.integers(0, 12),
    chunk=st.sampled_from([5, 16, 64]),
    running=st.sampled_from([2, 5, 12]),
    page_size=st.sampled_from([3, 16]),
    overlap=st.booleans(),
    speculates=st.booleans(),
)
def test_abort_storms(
    aborts: list[tuple[int, int]], swap_at: int, chunk: int, running: int, page_size: int, overlap: bool,
    speculates: bool,
) -> None:  # fmt: skip
    """Aborts and an adapter swap, with NaN in all free memory: whoever survives answers as ever under its version."""
    make = speculating_engine if speculates else make_engine
    engine = make(
        max_running=running, prefill_chunk_tokens=chunk, page_size=page_size, max_sequence_tokens=64, overlap=overlap
    )
    if not speculates:
        poison_before_steps(engine)
    params = [SamplingParams(max_new_tokens=3 + i % 7, seed=i) for i in range(len(PROMPTS))]

    async def run() -> list[Completion]:
        tasks = [
            asyncio.ensure_future(engine.generate(p, s, request_id=str(i)))
            for i, (p, s) in enumerate(zip(PROMPTS, params, strict=True))
        ]
        for turn in range(14):
            await asyncio.sleep(0)
            for victim, at in aborts:
                if at == turn:
                    engine.abort(str(victim))
            if turn == swap_at:
                engine.load_adapter(adapter_update(0, scale=0.1))
                tasks.append(asyncio.ensure_future(engine.generate(PROMPTS[0], params[0])))
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert_idle(engine)
    assert engine.speculator is None or engine.speculator.audit.wrong == 0  # type: ignore[union-attr]
    for version in (-1, 0):
        members = [i for i, a in enumerate(answers) if a.adapter_version == version]
        prompts = [(PROMPTS + PROMPTS[:1])[i] for i in members]
        alone = ask(engine, prompts, [(params + params[:1])[i] for i in members], adapter_version=version)
        for i, whole in zip(members, alone, strict=True):
            answer = answers[i]
            assert answer.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
            assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
            assert answer.finish_reason is FinishReason.ABORT or tokens_of([answer]) == tokens_of([whole])


SAMPLED = SamplingParams(max_new_tokens=6, temperature=1.3, top_p=0.9, top_k=40)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(order=st.permutations(range(12)), seeds=st.lists(st.integers(0, 2**63 - 1), min_size=12, max_size=12))
def test_draws_depend_on_the_request_alone(order: list[int], seeds: list[int]) -> None:
    """Any subset in any order, next to greedy and unfiltered neighbours: each request's draws are its own."""
    base = SAMPLED
    params = [
        SamplingParams(
            max_new_tokens=6, temperature=(0.0, 1.0, 1.3)[i % 3], top_p=(1.0, 0.9)[i % 2], top_k=base.top_k * (i % 2),
            seed=seed,
        )
        for i, seed in enumerate(seeds)
    ]  # fmt: skip
    together = ask(make_engine(), PROMPTS, params)
    engine = make_engine(max_running=4, prefill_chunk_tokens=23)
    part = order[:7]
    again = ask(engine, [PROMPTS[i] for i in part], [params[i] for i in part])
    assert tokens_of(again) == [together[i].token_ids for i in part]
