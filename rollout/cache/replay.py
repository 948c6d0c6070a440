"""Replays a trace against a cache policy and a memory budget: bookkeeping only, with the bytes of a real model.

What it leaves out: time. A request of a wave is admitted when its memory is there, holds it until `max_running`
others were admitted after it, then ends; prompts are computed at once. What it keeps: every call of the contract that
an engine makes, in its order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from miles_k3.rollout.cache.contract import TOKEN_BYTES, Lease, Match, PrefixCache, num_tokens
from miles_k3.rollout.cache.traces import Call

TRANSIENT_SLOTS = 3  # of a running request: the working state, and the pair that snapshots go to in turn


class Budget:
    """Pages and slots of `num_bytes` in all: freely divided, or split beforehand with `state_share` for states."""

    def __init__(self, *, num_bytes: int, page_bytes: int, slot_bytes: int, state_share: float | None = None) -> None:
        self.page_bytes, self.slot_bytes, self.num_bytes = page_bytes, slot_bytes, num_bytes
        self.most_slots = self.most_pages = num_bytes  # no limit of their own
        if state_share is not None:
            self.most_slots = int(num_bytes * state_share) // slot_bytes
            self.most_pages = (num_bytes - self.most_slots * slot_bytes) // page_bytes
        self.used_pages = self.used_slots = self.peak_bytes = 0
        self._pages, self._slots = _Ids(), _Ids()

    @property
    def used_bytes(self) -> int:
        return self.used_pages * self.page_bytes + self.used_slots * self.slot_bytes

    def lacking(self, pages: int, slots: int) -> tuple[int, int]:
        """Pages and slots that must be given back before so many can be taken; either alone may do where one pool
        holds both."""
        over = self.used_bytes + pages * self.page_bytes + slots * self.slot_bytes - self.num_bytes
        return (
            max(self.used_pages + pages - self.most_pages, -(-over // self.page_bytes), 0),
            max(self.used_slots + slots - self.most_slots, -(-over // self.slot_bytes), 0),
        )

    def take(self, pages: int, slots: int) -> tuple[list[int], list[int]]:
        self.used_pages += pages
        self.used_slots += slots
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return self._pages.take(pages), self._slots.take(slots)

    def give_pages(self, pages: Sequence[int]) -> None:
        self.used_pages -= len(pages)
        self._pages.free += pages

    def give_slots(self, slots: Sequence[int]) -> None:
        self.used_slots -= len(slots)
        self._slots.free += slots


@dataclass(slots=True)
class _Ids:
    free: list[int] = field(default_factory=list)
    made: int = 0

    def take(self, count: int) -> list[int]:
        again = [self.free.pop() for _ in range(min(count, len(self.free)))]
        fresh = range(self.made + 1, self.made + 1 + count - len(again))
        self.made += len(fresh)
        return [*again, *fresh]


@dataclass(slots=True)
class Report:
    """What a replay counted. `book_s`: host seconds in the policy's calls; tokens are prompt tokens but for `seen`."""

    requests: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    seen_tokens: int = 0
    failed_admissions: int = 0
    refused: int = 0
    peak_bytes: int = 0
    evicted_pages: int = 0
    evicted_slots: int = 0
    most_running: int = 0
    most_tokens: int = 0
    book_s: float = 0.0

    @property
    def book_us_per_token(self) -> float:
        return self.book_s * 1e6 / max(1, self.seen_tokens)


@dataclass(slots=True, eq=False)
class _Running:
    call: Call
    lease: Lease
    pages: list[int]
    slots: list[int]
    own: int  # pages from here on are its own, the ones before are the cache's


class Replay:
    """One policy under one budget."""

    def __init__(self, cache: PrefixCache, budget: Budget, *, max_running: int = 256) -> None:
        self.cache, self.budget, self.max_running = cache, budget, max_running
        self.report, self._running, self._held = Report(), deque[_Running](), 0

    def run(self, trace: Iterable[Call]) -> Report:
        version = 0
        for call in trace:
            if call.version != version:
                self._drain()
                self._timed(lambda old=version: self.cache.forget(old))
                version = call.version
            self._serve(call)
        self._drain()
        self.report.peak_bytes = self.budget.peak_bytes
        return self.report

    def _serve(self, call: Call) -> None:
        report = self.report
        report.requests += 1
        report.seen_tokens += num_tokens(call.prompt) + num_tokens(call.answer)
        if len(self._running) >= self.max_running:
            self._end(self._running.popleft())
        while not self._admit(call):
            report.failed_admissions += 1
            if not self._running:
                report.refused += 1  # it can't fit even alone
                return
            self._end(self._running.popleft())

    def _admit(self, call: Call) -> bool:
        """Memory for the whole request, its prompt computed, and a checkpoint before its last token."""
        cache, page = self.cache, self.cache.page_size
        found: Match = self._timed(lambda: cache.match(call.version, call.prompt))
        lease: Lease = self._timed(lambda: cache.lock(found))
        total = num_tokens(call.prompt) + num_tokens(call.answer) - 1
        needed = -(-total // page) - len(found.pages)
        if not self._make_room(needed, TRANSIENT_SLOTS):
            self._timed(lambda: cache.release(lease))
            return False
        pages, slots = self.budget.take(needed, TRANSIENT_SLOTS)
        running = _Running(call, lease, [*found.pages, *pages], slots, len(found.pages))
        report = self.report
        report.hit_tokens += found.num_tokens
        report.computed_tokens += num_tokens(call.prompt) - found.num_tokens
        if found.fork is not None:
            self._plant(running, call.prompt[: found.fork * TOKEN_BYTES])
        self._plant(running, call.prompt[:-TOKEN_BYTES])
        self._running.append(running)
        self._held += total
        report.most_running = max(report.most_running, len(self._running))
        report.most_tokens = max(report.most_tokens, self._held)
        return True

    def _plant(self, running: _Running, key: bytes) -> None:
        """A checkpoint at the end of `key`, or where the policy takes one before it: a copy of the state as it was
        there, and of the page that the key ends in."""
        key = self._stands(key)
        if not key:
            return
        full, rest = divmod(num_tokens(key), self.cache.page_size)
        if not self._make_room(bool(rest), 1):
            return
        self._extend(running, key, full)
        tails, (slot,) = self.budget.take(1 if rest else 0, 1)
        tail = tails[0] if tails else None
        if not self._timed(lambda: self.cache.checkpoint(running.lease, key, slot, tail)):
            self.budget.give_slots([slot])
            self.budget.give_pages(tails)

    def _extend(self, running: _Running, key: bytes, full: int) -> None:
        if full > running.own:
            kept = self._timed(lambda: self.cache.extend(running.lease, key, running.pages[:full]))
            running.pages[:full], running.own = kept, full

    def _end(self, running: _Running) -> None:
        """The request's last state and pages become the cache's; what it need not keep goes back."""
        whole = (running.call.prompt + running.call.answer)[:-TOKEN_BYTES]
        key = self._stands(whole)
        full, rest = divmod(num_tokens(key), self.cache.page_size)
        self._extend(running, key, full)
        tail = running.pages[full] if rest else None
        self.budget.give_pages(running.pages[full + bool(rest) :])
        working, *others = running.slots
        if not key or not self._timed(lambda: self.cache.checkpoint(running.lease, key, working, tail)):
            others.append(working)
            if tail is not None:
                self.budget.give_pages([tail])
        self.budget.give_slots(others)
        self._timed(lambda: self.cache.release(running.lease))
        self._held -= num_tokens(whole)

    def _drain(self) -> None:
        while self._running:
            self._end(self._running.popleft())

    def _stands(self, key: bytes) -> bytes:
        """As much of `key` as the policy takes a checkpoint of; the engine's last snapshot is of there."""
        unit = self.cache.checkpoint_unit * TOKEN_BYTES
        return key[: len(key) // unit * unit]

    def _make_room(self, pages: int, slots: int) -> bool:
        """Evict until so much can be taken. Where one pool holds both, checkpoints go before KV that is in use by
        nobody: a state is worth thousands of tokens of KV."""
        budget, report = self.budget, self.report
        for _ in range(64):
            lack_pages, lack_slots = budget.lacking(pages, slots)
            if not lack_pages and not lack_slots:
                return True
            must_slots = budget.used_slots + slots > budget.most_slots
            must_pages = budget.used_pages + pages > budget.most_pages
            ask = (lack_pages, 0) if must_pages else (0, lack_slots) if must_slots else (lack_pages, 1)
            given = self._timed(lambda ask=ask: self.cache.evict(pages=ask[0], slots=ask[1]))
            report.evicted_pages += given[0]
            report.evicted_slots += given[1]
            if given == (0, 0):
                return False
        return False

    def _timed[T](self, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = call()
        self.report.book_s += time.perf_counter() - started
        return result
