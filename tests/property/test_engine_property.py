"""Storms of submissions, aborts and swaps: the books always balance, and nobody's answer changes."""

from __future__ import annotations

import asyncio
from collections import Counter

import hypothesis.strategies as st
import torch
from helpers.engines import adapter_update, ask, assert_idle, fill_free_memory, make_engine, random_prompts, tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miles_k3.rollout.cache.pools import LatentPages, StateSlots
from miles_k3.rollout.embedded.request import Request, Stage
from miles_k3.rollout.embedded.scheduler import Scheduler
from miles_k3.types import Completion, FinishReason, SamplingParams

CPU = torch.device("cpu")


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler without a model: the 'forward' writes a mark for each (prompt or request, position).

    At every decode step all of a request's marks are read back through its page table and its slot, so that any move,
    fork or sharing that mixes two requests up is seen.
    """

    PAGE, PAGES, SLOTS = 4, 30, 5

    def __init__(self) -> None:
        super().__init__()
        self.pages = LatentPages(
            num_layers=1, num_pages=self.PAGES, page_size=self.PAGE, width=1, num_owners=self.SLOTS,
            max_pages_per_owner=12, dtype=torch.float64, device=CPU,
        )  # fmt: skip
        self.slots = StateSlots(
            num_layers=1, num_slots=self.SLOTS, heads=1, head_dim=1, conv_width=2, dtype=torch.float64, device=CPU
        )
        self.scheduler = Scheduler(self.slots, self.pages, max_running=self.SLOTS, prefill_chunk_tokens=7)
        self.requests: list[Request] = []
        self.count = 0

    @rule(
        kind=st.integers(0, 2), length=st.integers(1, 20), new=st.integers(1, 12), version=st.integers(0, 1),
        copies=st.integers(1, 3), routes=st.booleans(),
    )  # fmt: skip
    def submit(self, kind: int, length: int, new: int, version: int, copies: int, routes: bool) -> None:
        for _ in range(copies):
            self.count += 1
            request = Request(
                id=str(self.count), prompt=(kind,) * length, version=version,
                params=SamplingParams(max_new_tokens=new, return_routed_experts=routes),
            )  # fmt: skip
            self.requests.append(request)
            self.scheduler.submit(request)

    @precondition(lambda self: self.requests)
    @rule(pick=st.randoms())
    def abort(self, pick) -> None:
        self.scheduler.finish(pick.choice(self.requests), FinishReason.ABORT)
        self._drop_done()

    @precondition(lambda self: self.scheduler.has_work)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            plan = self.scheduler.plan()
            for request, count in plan.chunks:
                self._prefill(request, count)
            for request in plan.decodes:
                self._check(request)
                self._write(request, request.num_cached)
                request.num_cached += 1
                self._sample(request)
        self._drop_done()

    def _prefill(self, request: Request, count: int) -> None:
        assert count > 0
        for position in range(request.num_cached, request.num_cached + count):
            self._write(request, position)
        if any(r.params.return_routed_experts for r in (request, *request.followers)):
            request.routed.append(torch.zeros(count, 1, 1))
        request.num_cached += count
        if request.num_cached < len(request.prompt):
            return
        leader, *followers = self.scheduler.prompt_done(request)
        full, rest = divmod(len(leader.prompt), self.PAGE)
        for follower in followers:
            self.slots.copy([leader.slot], [follower.slot])
            if rest:
                self.pages.copy([self.pages.pages_of(leader.slot)[full]], [self.pages.pages_of(follower.slot)[full]])
        for member in (leader, *followers):
            if member.params.return_routed_experts:
                assert sum(map(len, member.routed)) == len(member.prompt)
            self._check(member)
            self._sample(member)

    def _mark(self, request: Request, position: int) -> float:
        """What a cached position must hold: the prompt's part is the same for all its samples."""
        part = hash((request.version, request.prompt)) if position < len(request.prompt) else int(request.id)
        return float((part % 997) * 100 + position)  # sums of them are exact in fp32

    def _write(self, request: Request, position: int) -> None:
        row = self.pages.rows_of(torch.tensor([request.slot]), torch.tensor([position]))
        flat = self.pages.kv[0].flatten(0, 1)
        assert flat[row] == 0, "a page was not clean, or is written twice"
        flat[row] = self._mark(request, position)
        self.slots.states[0, request.slot] += self._mark(request, position)

    def _check(self, request: Request) -> None:
        positions = torch.arange(request.num_cached)
        held = self.pages.kv[0].flatten(0, 1)[self.pages.rows_of(torch.tensor([request.slot]), positions)].flatten()
        expected = [self._mark(request, p) for p in positions.tolist()]
        assert held.tolist() == expected
        assert self.slots.states[0, request.slot].item() == sum(expected)

    def _sample(self, request: Request) -> None:
        reason = request.accept(0, 0.0)
        if reason:
            self.scheduler.finish(request, reason)

    def _drop_done(self) -> None:
        self.requests = [r for r in self.requests if r.stage is not Stage.DONE]

    @invariant()
    def books_balance(self) -> None:
        holding = [r for r in self.requests if r.stage is not Stage.WAITING]
        assert len({r.slot for r in holding}) == len(holding) == self.scheduler.num_running
        assert 0 not in {r.slot for r in holding}
        assert self.slots.num_free == self.SLOTS - len(holding)
        users = Counter(page for r in holding for page in self.pages.pages_of(r.slot))
        assert 0 not in users
        assert self.pages.num_free == self.PAGES - len(users)
        for request in holding:
            assert len(self.pages.pages_of(request.slot)) == self.pages.pages_for(request.total_tokens)
        assert not self.pages.kv[:, 0].any()
        assert not self.slots.states[:, 0].any()

    def teardown(self) -> None:
        """Whatever is left runs to its end, first come first served, and everything comes back."""
        for _ in range(10_000):
            if not self.scheduler.has_work:
                break
            self.step(1)
        assert not self.requests
        assert self.slots.num_free == self.SLOTS
        assert self.pages.num_free == self.PAGES


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestScheduler = SchedulerMachine.TestCase

PROMPTS = [p for p in random_prompts(6, low=1, high=40, seed=31) for _ in range(2)]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    aborts=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 12)), max_size=8),
    swap_at=st.integers(0, 12),
    chunk=st.sampled_from([5, 16, 64]),
    running=st.sampled_from([2, 5, 12]),
    page_size=st.sampled_from([3, 16]),
)
def test_abort_storms(aborts: list[tuple[int, int]], swap_at: int, chunk: int, running: int, page_size: int) -> None:
    """Aborts and an adapter swap, with NaN in all free memory: whoever survives answers as ever under its version."""
    engine = make_engine(max_running=running, prefill_chunk_tokens=chunk, page_size=page_size, max_sequence_tokens=64)
    params = [SamplingParams(max_new_tokens=3 + i % 7, seed=i) for i in range(len(PROMPTS))]

    async def run() -> list[Completion]:
        tasks = [
            asyncio.ensure_future(engine.generate(p, s, request_id=str(i)))
            for i, (p, s) in enumerate(zip(PROMPTS, params, strict=True))
        ]
        for turn in range(14):
            await asyncio.sleep(0)
            with torch.inference_mode():
                fill_free_memory(engine)
            for victim, at in aborts:
                if at == turn:
                    engine.abort(str(victim))
            if turn == swap_at:
                engine.load_adapter(adapter_update(0, scale=0.1))
                tasks.append(asyncio.ensure_future(engine.generate(PROMPTS[0], params[0])))
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert_idle(engine)
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
