"""Requests on a prefix cache without a model: calls are compared with the oracle, reads with what was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from helpers.cache_oracle import CACHE, POOL, CacheOracle, Content, FakeMemory

from miles_k3.rollout.cache.contract import TOKEN_BYTES, CacheError, Lease, Match, PrefixCache, num_tokens

EVERYTHING = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How to make a cache for (memory, page size). `fork_grain`: forks are seen to so many tokens; 0: to a page."""

    make: Callable[[FakeMemory, int], PrefixCache]
    fork_grain: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A request: `num_done` tokens of `key` computed, the first `num_cached` of its pages are the cache's."""

    id: int
    version: int
    key: bytes
    lease: Lease
    match: Match
    slot: int
    pages: list[int]
    num_done: int
    num_cached: int
    pinned_pages: list[int] = field(default_factory=list)

    def content(self, tokens: int) -> Content:
        return self.version, self.key[: tokens * TOKEN_BYTES]


class CacheDriver:
    """Drives one cache as a scheduler would; any broken promise is an AssertionError."""

    def __init__(self, policy: Policy, page_size: int) -> None:
        self.memory = FakeMemory()
        self.page_size, self.grain = page_size, policy.fork_grain or page_size
        self.cache = policy.make(self.memory, page_size)
        self.oracle = CacheOracle(self.memory, page_size)
        self.running: list[Running] = []
        self.num_started = self.num_hit = self.num_missed = 0

    # --- a request's life ---------------------------------------------------------------------------------------
    def probe(self, version: int, key: bytes) -> Match:
        match = self.cache.match(version, key)
        self.oracle.settle()
        self.oracle.check_match(match, version, key, self.grain)
        self.num_hit += match.num_tokens
        self.num_missed += num_tokens(key) - match.num_tokens
        return match

    def start(self, version: int, key: bytes) -> Running:
        """Match, pin, and copy what will be written to."""
        match = self.probe(version, key)
        lease = self.cache.lock(match)
        position = match.num_tokens
        content = version, key[: position * TOKEN_BYTES]
        owner, self.num_started = self.num_started, self.num_started + 1
        request = Running(
            id=owner, version=version, key=key, lease=lease, match=match, pages=list(match.pages), num_done=position,
            num_cached=len(match.pages), slot=self.memory.slots.take(owner, content),
        )  # fmt: skip
        self._pin(request, [*match.pages, *([] if match.tail_page is None else [match.tail_page])])
        if match.slot is not None:
            self.memory.slots.pins[match.slot] += 1
        if match.tail_page is not None:
            request.pages.append(self.memory.pages.take(owner, content))
        self.running.append(request)
        return request

    def compute(self, request: Running, tokens: int) -> None:
        """So many tokens more, at most all: writes to the request's own pages and state alone."""
        begin = request.num_done
        request.num_done = done = min(begin + tokens, num_tokens(request.key))
        if begin == done:
            return
        for index in range(begin // self.page_size, (done - 1) // self.page_size + 1):
            content = request.content(min(done, (index + 1) * self.page_size))
            if index < len(request.pages):
                self.memory.pages.write(request.pages[index], request.id, content)
            else:
                request.pages.append(self.memory.pages.take(request.id, content))
        self.memory.slots.write(request.slot, request.id, request.content(done))

    def extend(self, request: Running) -> None:
        """Hand over all full pages."""
        full = request.num_done // self.page_size
        mine, key = request.pages[:full], request.content(full * self.page_size)[1]
        for page in mine[request.num_cached :]:
            self.memory.pages.hand_over(page, request.id)
        names = list(self.oracle.page_names(request.version, key))
        expected = [self.oracle.pages.get(name, page) for name, page in zip(names, mine, strict=True)]
        got = self.cache.extend(request.lease, key, mine)
        assert list(got) == expected
        for page, kept in zip(mine, got, strict=True):
            assert page == kept or self.memory.pages.owner[page] == POOL, f"page {page} is a duplicate, and was kept"
        self.oracle.pages.update(zip(names, got, strict=True))
        self.oracle.settle()
        self._pin(request, got[request.num_cached :])
        request.pages[:full] = got
        request.num_cached = full

    def checkpoint(self, request: Running, position: int) -> bool:
        """Donate the state after `position` tokens: the working slot itself where it stands there, else a snapshot."""
        assert 0 < position <= request.num_done
        assert position // self.page_size <= request.num_cached
        name, owner = request.content(position), request.id
        slot = self.memory.slots.take(owner, name)
        if position == request.num_done:
            slot, request.slot = request.slot, slot
        tail = self.memory.pages.take(owner, name) if position % self.page_size else None
        self.memory.slots.hand_over(slot, owner)
        if tail is not None:
            self.memory.pages.hand_over(tail, owner)
        taken = self.cache.checkpoint(request.lease, name[1], slot, tail)
        assert taken == (name not in self.oracle.points)
        if taken:
            self.oracle.points[name] = slot, tail
        else:
            self.memory.slots.decline(slot, owner)
            self.memory.slots.drop(slot, owner)
            if tail is not None:
                self.memory.pages.decline(tail, owner)
                self.memory.pages.drop(tail, owner)
        self.oracle.settle()
        return taken

    def release(self, request: Running) -> None:
        self.running.remove(request)
        for page in request.pages[request.num_cached :]:
            self.memory.pages.drop(page, request.id)
        self.memory.slots.drop(request.slot, request.id)
        self.memory.pages.pins.subtract(request.pinned_pages)
        if request.match.slot is not None:
            self.memory.slots.pins[request.match.slot] -= 1
        self.cache.release(request.lease)
        self.oracle.settle()

    def release_twice(self, request: Running) -> None:
        self.release(request)
        with pytest.raises(CacheError):
            self.cache.release(request.lease)

    # --- pressure -----------------------------------------------------------------------------------------------
    def evict(self, pages: int = 0, slots: int = 0) -> tuple[int, int]:
        shelves = self.memory.pages, self.memory.slots
        before = [shelf.num_given for shelf in shelves]
        given = self.cache.evict(pages=pages, slots=slots)
        assert list(given) == [shelf.num_given - b for shelf, b in zip(shelves, before, strict=True)]
        for shelf, got, asked in zip(shelves, given, (pages, slots), strict=True):
            left = 0 if got >= asked else sum(not shelf.pins[index] for index in shelf.cached)
            assert not left, f"{asked} {shelf.name}s asked, {got} given, {left} unpinned are left"
        self.oracle.settle()
        return given

    def forget(self, version: int) -> None:
        self.cache.forget(version)
        self.oracle.settle()
        held = [page for (v, _), page in self.oracle.pages.items() if v == version]
        tails = [tail for (v, _), (_, tail) in self.oracle.points.items() if v == version and tail is not None]
        slots = [slot for (v, _), (slot, _) in self.oracle.points.items() if v == version]
        assert all(self.memory.pages.pins[page] for page in [*held, *tails])
        assert all(self.memory.slots.pins[slot] for slot in slots)

    # --- what must hold at any time -----------------------------------------------------------------------------
    def verify(self) -> None:
        """Every request still reads what it wrote or leased; books and ownership agree."""
        for request in self.running:
            assert self.memory.slots.read(request.slot) == request.content(request.num_done)
            ends = range(self.page_size, len(request.pages) * self.page_size + 1, self.page_size)
            for index, (page, end) in enumerate(zip(request.pages, ends, strict=True)):
                assert self.memory.pages.read(page) == request.content(min(end, request.num_done))
                assert self.memory.pages.owner[page] == (CACHE if index < request.num_cached else request.id)
            if request.match.slot is not None:
                assert self.memory.slots.read(request.match.slot) == request.content(request.match.num_tokens)
        self.oracle.check_owners()
        self.cache.check()
        stats = self.cache.stats()
        assert stats["pages"] == len(self.memory.pages.cached)
        assert stats["slots"] == len(self.memory.slots.cached)
        assert stats["pinned_pages"] == self.memory.pages.num_pinned
        assert stats["pinned_slots"] == self.memory.slots.num_pinned
        assert (stats["hit_tokens"], stats["missed_tokens"]) == (self.num_hit, self.num_missed)

    def finish(self) -> None:
        """All requests end and all is evicted: memory is whole again."""
        for request in list(self.running):
            self.release(request)
        self.evict(EVERYTHING, EVERYTHING)
        self.verify()
        assert self.memory.pages.num_out == self.memory.slots.num_out == 0

    def _pin(self, request: Running, pages: list[int]) -> None:
        request.pinned_pages += pages
        self.memory.pages.pins.update(pages)
