"""Continuous batching: who computes what next, with which memory.

A step holds one token of every decoding request and, with what is left of its token budget, chunks of prompts. Requests
are admitted by rank, higher priority first, then the earlier one, when a state slot and the pages that they need are
free, or can be had from the prefix cache. With the pages of its whole length reserved nothing that runs is ever
preempted. With `reserve_tokens` a request gets those of its prompt and so many tokens more, and grows; when nothing is
left, the lowest in rank is retracted: it leaves what it has computed to the prefix cache, keeps its tokens and their
log-probabilities, and waits again. Protected requests, samples of a group, have their whole memory from the start and
are never retracted. Everything is a function of the order of submission.

`plan` may run while steps are in flight: it counts on their tokens, though not on what they are.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles_k3.rollout.cache.chunking import chunk_ends
from miles_k3.rollout.cache.contract import Match
from miles_k3.rollout.embedded.memory import RequestMemory
from miles_k3.rollout.embedded.prefix import Ending, Prefixes
from miles_k3.rollout.embedded.request import Request, Stage
from miles_k3.rollout.speculative.planner.history import History
from miles_k3.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to compute next.

    `decodes` feed their last token. `chunks`: the next so many tokens of a prompt. `ready`: requests whose prompt is
    cached whole, and what its last token gave: they compute nothing, and sample.
    """

    decodes: tuple[Request, ...] = ()
    chunks: tuple[tuple[Request, int], ...] = ()
    ready: tuple[tuple[Request, Ending], ...] = ()

    @property
    def has_work(self) -> bool:
        return bool(self.decodes or self.chunks or self.ready)


class Scheduler:
    """Owns the requests' books; the runner moves the bytes.

    Requests with the same prompt and adapter version that are admitted while the first of them is in prefill follow
    it: its prompt is computed once and forked.
    """

    def __init__(
        self,
        memory: RequestMemory,
        *,
        prefill_chunk_tokens: int,
        share_prompts: bool = True,
        prefixes: Prefixes | None = None,
        reserve_tokens: int | None = None,
        decode_tokens: int = 1,
        follows: Callable[[int, History], bool] | None = None,
    ) -> None:
        """`decode_tokens`: what a decoding request may feed in a step, which counts for the step's budget. `follows`:
        whether a draft should follow a request that comes when so many run; None: there is no draft."""
        self.memory, self.prefixes, self._follows = memory, prefixes, follows
        self.prefill_chunk_tokens, self.share_prompts = prefill_chunk_tokens, share_prompts
        self.decode_tokens = decode_tokens
        self.waiting: list[Request] = []  # by rank
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self._ready: list[tuple[Request, Ending]] = []
        self._orders = itertools.count()
        self._leaders: dict[tuple[int, tuple[int, ...]], Request] = {}
        self.reserve_tokens, self.num_retracted = reserve_tokens, 0
        self._num_following = 0
        self._crowded = False

    @property
    def num_running(self) -> int:
        """Requests that hold memory."""
        return len(self.prefilling) + self._num_following + len(self.decoding)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding)

    def submit(self, request: Request) -> None:
        request.order = next(self._orders)
        self._wait(request)

    def _wait(self, request: Request) -> None:
        request.stage = Stage.WAITING
        bisect.insort(self.waiting, request, key=lambda r: r.rank)

    # --- planning -----------------------------------------------------------------------------------------------
    def plan(self) -> Step:
        """Admit whoever fits and choose the next step. Who was retracted waits at least until its tokens are known."""
        self._grow()
        # Whoever was retracted comes back when somebody has ended, not to be retracted again at once.
        self._crowded = self._crowded and self.num_running > 0
        while self.waiting and not self._crowded and not self.waiting[0].in_flight:
            if self._admit(self.waiting[0]):
                self.waiting.pop(0)
            elif (victim := self._outranked(self.waiting[0])) is None:
                break
            else:
                self._retract(victim)
        ready, self._ready = tuple(self._ready), []
        begun = {request for request, _ in ready}
        decodes = tuple(r for r in self.decoding if not r.is_full and r not in begun)
        budget = max(self.prefill_chunk_tokens - len(decodes) * self.decode_tokens, self.memory.page_size)
        return Step(decodes=decodes, chunks=tuple(self._chunks(budget)), ready=ready)

    def _admit(self, request: Request) -> bool:
        """Give a request its slot and pages if they are free, or can be had from the prefix cache."""
        if not self.memory.has_seat:
            return False
        request.feed = request.tokens
        leader = self._leader_for(request)
        if request.followed is None and self._follows is not None:
            load = min(self.num_running + len(self.waiting), self.memory.num_seats)
            request.followed = self._follows(load, request.history)
        if leader:
            request.followed = leader.followed
            # Only full pages are shared: nobody writes into them any more once the prompt is computed.
            shared = leader.pages[: len(request.feed) // self.memory.page_size]
            return self._take(request, shared) and self._follow(request, leader)
        match, ending = self.prefixes.find(request) if self.prefixes is not None else (None, None)
        if self.prefixes is not None and match is not None:
            self.prefixes.lock(request, match)
            if self._take(request, match.pages):
                self.prefixes.attach(request, match)
                if ending is not None:
                    return self._begin(request, ending)
                self.prefixes.plan_stops(request, match)
                return self._lead(request)
            self.prefixes.unlock(request)
            if self.num_running:
                return False
        # With nobody to wait for, what it would read is itself in the way: a tail page beside a request that fills all.
        if not self._take(request, []):
            return False
        if self.prefixes is not None:
            self.prefixes.plan_stops(request, Match(version=request.version))
        return self._lead(request)

    def _take(self, request: Request, shared: Sequence[int]) -> bool:
        tokens = request.total_tokens
        if self.reserve_tokens is not None and not request.params.protected:
            tokens = min(tokens, len(request.feed) + self.reserve_tokens)
        fresh = self.memory.pool.pages_for(tokens) - len(shared)
        if not self._make_room(pages=fresh, slots=1):
            return False
        self.memory.take(request, fresh, shared)
        return True

    def _make_room(self, *, pages: int, slots: int) -> bool:
        if self.prefixes is not None:
            return self.prefixes.make_room(pages, slots)
        return self.memory.pool.fits(pages=pages, slots=slots)

    def _follow(self, request: Request, leader: Request) -> bool:
        request.stage = Stage.FOLLOWING
        leader.followers.append(request)
        request.leader = leader
        self._num_following += 1
        return True

    def _lead(self, request: Request) -> bool:
        request.stage = Stage.PREFILL
        request.cut_routes(request.num_cached)
        self.prefilling.append(request)
        self._leaders[request.version, request.feed] = request
        return True

    def _begin(self, request: Request, ending: Ending) -> bool:
        """Decode at once: another sample of a prompt that is cached to its end."""
        request.stage = Stage.DECODE
        request.routed = list(ending.routed or ())
        self.decoding.append(request)
        self._ready.append((request, ending))
        return True

    def _leader_for(self, request: Request) -> Request | None:
        """A request whose prompt this one can take over, with its chosen experts if those are wanted."""
        leader = self._leaders.get((request.version, request.feed)) if self.share_prompts else None
        if leader and request.params.return_routed_experts and leader.num_routed < leader.num_cached:
            return None
        return leader

    def _chunks(self, budget: int) -> list[tuple[Request, int]]:
        """Prompts in order of admission, to their next stop or as far as `budget` tokens go."""
        chunks = []
        for request in self.prefilling:
            end = chunk_ends(
                request.num_cached, len(request.feed), budget, self.memory.page_size, marks=request.stops[:1]
            )[0]
            chunks.append((request, end - request.num_cached))
            budget -= end - request.num_cached
            if not budget:
                break
        return chunks

    # --- pressure -----------------------------------------------------------------------------------------------
    def _grow(self) -> None:
        """Pages for the token that each decoding request feeds next, first in rank first; the last may have to go."""
        for request in sorted(self.decoding, key=lambda r: r.rank):
            while request.stage is Stage.DECODE and not request.is_full and not self._has_room(request):
                victim = max((r for r in self.decoding if not r.params.protected), key=lambda r: r.rank)
                self._retract(victim)
                self._crowded = True

    def _has_room(self, request: Request) -> bool:
        if request.num_cached < self.memory.capacity(request):
            return True
        if not self._make_room(pages=1, slots=0):
            return False
        self.memory.grow(request, 1)
        return True

    def room(self, request: Request, wanted: int) -> int:
        """How many of the `wanted` tokens its pages take, which grow as far as nobody has to go for it."""
        end = request.num_cached + wanted
        while self.memory.capacity(request) < end and self._make_room(pages=1, slots=0):
            self.memory.grow(request, 1)
        return min(wanted, self.memory.capacity(request) - request.num_cached)

    def _outranked(self, waiting: Request) -> Request | None:
        """Who has to make room for a request of higher priority: the last in rank of those below it."""
        below = [r for r in self.decoding if r.params.priority < waiting.params.priority and not r.params.protected]
        return max(below, key=lambda r: r.rank, default=None)

    def _retract(self, request: Request) -> None:
        """Back to the queue, with what it has sampled; its cached tokens are left to the prefix cache."""
        self._free(request, keep=True)
        self.decoding.remove(request)
        request.num_cached, request.stops = 0, []
        request.followed = None
        self._wait(request)
        self.num_retracted += 1

    # --- progress -----------------------------------------------------------------------------------------------
    def prompt_done(self, request: Request) -> list[Request]:
        """Move a computed prompt and its followers on to decoding, and fork its state; the request and its followers.

        The forward that computes the prompt's end is queued.
        """
        followers, request.followers = request.followers, []
        self.prefilling.remove(request)
        self._forget_leader(request)
        self._num_following -= len(followers)
        for member in (request, *followers):
            member.stage = Stage.DECODE
            member.num_cached = len(request.feed)
        for follower in followers:
            follower.leader, follower.routed = None, list(request.routed)
        self.memory.fork(request, followers)
        self.decoding += [request, *followers]
        return [request, *followers]

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request at any stage and free its memory at once: what still uses it is queued before what comes."""
        if request.stage is Stage.DONE:
            return
        if request.stage is Stage.WAITING:
            self.waiting.remove(request)
        elif request.stage is Stage.PREFILL:
            self.prefilling.remove(request)
            self._forget_leader(request)
            self._restart(request.followers)
            request.followers = []
        elif request.stage is Stage.FOLLOWING:
            assert request.leader is not None
            request.leader.followers.remove(request)
            request.leader = None
            self._num_following -= 1
        else:
            self.decoding.remove(request)
        if request.stage is not Stage.WAITING:
            self._crowded = False
            self._free(request, keep=reason is not FinishReason.ERROR)
            if reason is FinishReason.ERROR and self.prefixes is not None:
                self.prefixes.distrust(request.version)
        request.stage, request.finish_reason, request.error = Stage.DONE, reason, error

    def _restart(self, followers: list[Request]) -> None:
        """Followers whose leader went away wait again."""
        for follower in followers:
            follower.leader = None
            self._free(follower, keep=False)
            self._wait(follower)
        self._num_following -= len(followers)

    def _forget_leader(self, request: Request) -> None:
        key = (request.version, request.feed)
        if self._leaders.get(key) is request:
            del self._leaders[key]

    def _free(self, request: Request, *, keep: bool) -> None:
        keep = keep and request.stage is Stage.DECODE
        slot_is_gone = self.prefixes is not None and self.prefixes.end(request, keep=keep)
        self.memory.give(request, slot_is_gone=slot_is_gone)
