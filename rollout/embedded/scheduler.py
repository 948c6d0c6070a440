"""Continuous batching: who runs next, with which memory.

First come, first served: a request is admitted when a state slot and the pages it needs are free. With the pages of its
whole length reserved nothing that runs is ever preempted. With `reserve_tokens` it gets those of its prompt and so many
tokens more, and grows; when nothing is left, the youngest request is retracted: it leaves what it has computed to the
prefix cache, keeps its tokens and their log-probabilities, and waits in front. Steps of prompt chunks and steps of
decoding take turns. Everything is a function of the order of submission.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from miles_k3.rollout.cache.pools import LatentPages, StateSlots
from miles_k3.rollout.embedded.prefix import Prefixes
from miles_k3.rollout.embedded.request import Request, Stage
from miles_k3.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to compute next: chunks of prompts [(request, tokens)], or one token for each decoding request."""

    chunks: tuple[tuple[Request, int], ...] = ()
    decodes: tuple[Request, ...] = ()


class Scheduler:
    """Owns the pools' books; the engine moves the bytes.

    Requests with the same prompt and adapter version that are admitted while the first of them is in prefill follow
    it: its prompt is computed once and forked.
    """

    def __init__(
        self,
        slots: StateSlots,
        pages: LatentPages,
        *,
        max_running: int,
        prefill_chunk_tokens: int,
        share_prompts: bool = True,
        prefixes: Prefixes | None = None,
        reserve_tokens: int | None = None,
    ) -> None:
        self.slots, self.pages, self.prefixes = slots, pages, prefixes
        self.max_running, self.prefill_chunk_tokens, self.share_prompts = (
            max_running,
            prefill_chunk_tokens,
            share_prompts,
        )
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self._orders = itertools.count()
        self._leaders: dict[tuple[int, tuple[int, ...]], Request] = {}
        self.reserve_tokens, self.num_retracted = reserve_tokens, 0
        self._num_following = 0
        self._prefill_last = self._crowded = False

    @property
    def num_running(self) -> int:
        """Requests that hold memory."""
        return len(self.prefilling) + self._num_following + len(self.decoding)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding)

    def submit(self, request: Request) -> None:
        request.order = next(self._orders)
        self.waiting.append(request)

    # --- planning -----------------------------------------------------------------------------------------------
    def plan(self) -> Step:
        """Admit whoever fits, clean and order their memory, and choose the next step: prompts and decoding in turn."""
        self._grow()
        # Whoever was retracted comes back when somebody has ended, not to be retracted again at once.
        self._crowded = self._crowded and self.num_running > 0
        while self.waiting and not self._crowded and self._admit(self.waiting[0]):
            self.waiting.popleft()
        self.slots.scrub()
        self.pages.scrub()
        self._compact()
        if self.prefilling and not (self._prefill_last and self.decoding):
            self._prefill_last = True
            return Step(chunks=tuple(self._chunks()))
        self._prefill_last = False
        return Step(decodes=tuple(self.decoding))

    def _admit(self, request: Request) -> bool:
        """Give a request its slot and pages if they are free, or can be had from the prefix cache."""
        if self.num_running >= self.max_running:
            return False
        request.feed = (*request.prompt, *request.token_ids)
        leader = self._leader_for(request)
        if leader:
            # Only full pages are shared: nobody writes into them any more once the prompt is computed.
            shared = self.pages.pages_of(leader.slot)[: len(request.feed) // self.pages.page_size]
            return self._take(request, shared) and self._follow(request, leader)
        match = self.prefixes.find(request) if self.prefixes is not None else None
        if self.prefixes is None or match is None:
            return self._take(request, []) and self._lead(request)
        self.prefixes.lock(request, match)
        if not self._take(request, match.pages):
            self.prefixes.unlock(request)
            return False
        self.prefixes.attach(request, match)
        self.prefixes.plan_stops(request, match)
        return self._lead(request)

    def _grow(self) -> None:
        """Pages for the token that each decoding request feeds next, oldest first; the youngest may have to go."""
        for request in sorted(self.decoding, key=lambda r: r.order):
            while request.stage is Stage.DECODE and not self._has_room(request):
                self._retract(max(self.decoding, key=lambda r: r.order))

    def _has_room(self, request: Request) -> bool:
        held = len(self.pages.pages_of(request.slot)) * self.pages.page_size
        if request.num_cached < held:
            return True
        if self.prefixes is not None:
            self.prefixes.make_room(1, 0)
        if not self.pages.num_free:
            return False
        self.pages.grow(request.slot, 1)
        return True

    def _retract(self, request: Request) -> None:
        self._free(request, taken=self.prefixes is not None and self.prefixes.end(request, keep=True))
        self.decoding.remove(request)
        request.stage, request.num_cached, request.routed = Stage.WAITING, 0, []
        request.stops, request.cached_pages = [], []
        self.waiting.appendleft(request)
        self.num_retracted += 1
        self._crowded = True

    def _take(self, request: Request, shared: Sequence[int]) -> bool:
        tokens = request.total_tokens
        if self.reserve_tokens is not None:
            tokens = min(tokens, len(request.feed) + self.reserve_tokens)
        needed = self.pages.pages_for(tokens) - len(shared)
        if self.prefixes is not None and not self.prefixes.make_room(needed, 1):
            return False
        if not self.slots.num_free or needed > self.pages.num_free:
            return False
        request.slot = self.slots.take()
        self.pages.take(request.slot, needed, shared=shared)
        return True

    def _follow(self, request: Request, leader: Request) -> bool:
        request.stage = Stage.FOLLOWING
        leader.followers.append(request)
        self._num_following += 1
        return True

    def _lead(self, request: Request) -> bool:
        request.stage = Stage.PREFILL
        self.prefilling.append(request)
        self._leaders[request.version, request.feed] = request
        return True

    def _leader_for(self, request: Request) -> Request | None:
        """A request whose prompt this one can take over, with its chosen experts if those are wanted."""
        leader = self._leaders.get((request.version, request.feed)) if self.share_prompts else None
        if leader and request.params.return_routed_experts and sum(map(len, leader.routed)) < leader.num_cached:
            return None
        return leader

    def _chunks(self) -> list[tuple[Request, int]]:
        budget, chunks = self.prefill_chunk_tokens, []
        for request in self.prefilling:
            end = request.stops[0] if request.stops else len(request.feed)
            count = min(budget, end - request.num_cached)
            chunks.append((request, count))
            budget -= count
            if not budget:
                break
        return chunks

    # --- progress -----------------------------------------------------------------------------------------------
    def prompt_done(self, request: Request) -> list[Request]:
        """Move a computed prompt and its followers on to decoding; gives the request and its followers.

        The caller then copies the leader's state, and the page its prompt ends in, to the followers.
        """
        followers, request.followers = request.followers, []
        self.prefilling.remove(request)
        self._forget_leader(request)
        self._num_following -= len(followers)
        for member in (request, *followers):
            member.stage = Stage.DECODE
            member.num_cached = len(request.feed)
        for follower in followers:
            follower.routed = list(request.routed)
        self.decoding += [request, *followers]
        return [request, *followers]

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request at any stage and free its memory at once."""
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
            self._leaders[request.version, request.feed].followers.remove(request)
            self._num_following -= 1
        else:
            self.decoding.remove(request)
        if request.stage is not Stage.WAITING:
            self._crowded = False
            sound = reason in (FinishReason.STOP, FinishReason.LENGTH)
            self._free(request, taken=self.prefixes is not None and self.prefixes.end(request, keep=sound))
        request.stage, request.finish_reason, request.error = Stage.DONE, reason, error

    def _compact(self) -> None:
        """Make the live slots 1..n again, and order decoding by slot: the states of a full batch are then one view."""
        moves = self.slots.compact()
        if moves:
            followers = [f for r in self.prefilling for f in r.followers]
            for request in (*self.prefilling, *followers, *self.decoding):
                target = moves.get(request.slot)
                if target is not None:
                    self.pages.rename(request.slot, target)
                    request.slot = target
        self.decoding.sort(key=lambda r: r.slot)

    def _restart(self, followers: list[Request]) -> None:
        """Followers whose leader went away wait again, in front."""
        for follower in reversed(followers):
            self._free(follower)
            follower.stage = Stage.WAITING
            self.waiting.appendleft(follower)
        self._num_following -= len(followers)

    def _forget_leader(self, request: Request) -> None:
        key = (request.version, request.feed)
        if self._leaders.get(key) is request:
            del self._leaders[key]

    def _free(self, request: Request, *, taken: bool = False) -> None:
        """`taken`: its slot has gone to the prefix cache."""
        self.pages.release(request.slot)
        if not taken:
            self.slots.release(request.slot)
        request.slot = 0
