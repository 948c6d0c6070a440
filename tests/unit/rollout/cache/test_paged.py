"""The paged policy's own rules; what every policy promises is in tests/property/test_cache_property.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.cache_oracle import FakeMemory

from miles_k3.rollout.cache.chunking import chunk_ends, state_marks
from miles_k3.rollout.cache.contract import CacheError, Match, encode
from miles_k3.rollout.cache.hashed_blocks import digest_of
from miles_k3.rollout.cache.paged import PagedCache, PagedLease

BLOCK, UNIT = 8, 2


class Bench:
    """A cache and one request at a time on it, that keeps to the contract."""

    def __init__(self, *, block: int = BLOCK, unit: int | None = UNIT, partial: bool = True,
                 digest: Callable[[bytes], bytes] = digest_of) -> None:  # fmt: skip
        self.memory = FakeMemory()
        self.cache = PagedCache(self.memory, page_size=block, hash_block_size=unit, partial=partial, digest=digest)
        self.block = block

    def start(self, tokens: list[int], version: int = 0) -> tuple[Match, PagedLease]:
        match = self.cache.match(version, encode(tokens))
        return match, self.cache.lock(match)

    def take(self, shelf: str, version: int, tokens: list[int]) -> int:
        held = getattr(self.memory, shelf)
        taken = held.take(0, (version, encode(tokens)))
        held.hand_over(taken, 0)
        return taken

    def reach(self, lease: PagedLease, tokens: list[int], pages: list[int]) -> list[int]:
        """Hand over the full pages of `tokens`, new ones after `pages`."""
        count = len(tokens) // self.block
        ends = range((len(pages) + 1) * self.block, count * self.block + 1, self.block)
        own = [self.take("pages", lease.version, tokens[:end]) for end in ends]
        return self.cache.extend(lease, encode(tokens), [*pages, *own])

    def plant(self, lease: PagedLease, tokens: list[int]) -> bool:
        """A checkpoint at the end of `tokens`; what is declined goes back."""
        slot = self.take("slots", lease.version, tokens)
        page = self.take("pages", lease.version, tokens) if len(tokens) % self.block else None
        taken = self.cache.checkpoint(lease, encode(tokens), slot, page)
        if not taken:
            self.memory.give_slots([slot])
            self.memory.give_pages([] if page is None else [page])
        return taken

    def serve(self, tokens: list[int], *, chunk: int = 10**6, interval: int | None = None, fork: bool = True,
              end: bool = False) -> int:  # fmt: skip
        """A whole request, with states where `state_marks` wants them; the tokens that it need not compute."""
        match, lease = self.start(tokens)
        pages = list(match.pages)
        marks = state_marks(
            match.num_tokens, len(tokens), block=self.block, unit=self.cache.checkpoint_unit,
            fork=match.fork if fork else None, interval=interval,
        )  # fmt: skip
        marks += [len(tokens)] if end else []
        for at in chunk_ends(match.num_tokens, len(tokens), chunk, self.block, marks):
            pages = self.reach(lease, tokens[:at], pages)
            if at in marks:
                self.plant(lease, tokens[:at])
        self.cache.release(lease)
        self.cache.check()
        return match.num_tokens

    def hit(self, tokens: list[int]) -> int:
        return self.cache.match(0, encode(tokens)).num_tokens


def run(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


# --- blocks and hashes ----------------------------------------------------------------------------------------------
def test_a_prompt_of_whole_blocks_is_found_again() -> None:
    """vllm-project/vllm 50235: a state at the very end only would leave the same prompt nothing to resume from."""
    for length in (2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1):
        bench = Bench(partial=False)
        bench.serve(run(0, length))
        assert bench.hit(run(0, length)) == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("length", range(1, 3 * BLOCK + 2))
def test_hits_reach_the_last_hash_before_the_last_token(length: int) -> None:
    bench = Bench()
    bench.serve(run(0, length))
    assert bench.hit(run(0, length)) == (length - 1) // UNIT * UNIT
    assert bench.hit([*run(0, length - 1), 999]) == (length - 1) // UNIT * UNIT


def test_hash_blocks_must_divide_the_block() -> None:
    with pytest.raises(ValueError, match="hash_block_size 3 does not divide the block of 8"):
        PagedCache(FakeMemory(), page_size=8, hash_block_size=3)


@pytest.mark.parametrize(
    "digest", [lambda data: b"same", lambda data: bytes([data[-4] % 2])], ids=["constant", "one bit"]
)
def test_colliding_hashes_cost_hits_only(digest: Callable[[bytes], bytes]) -> None:
    """Blocks and tails of other sequences under our hash are never taken for ours, and nothing leaks."""
    bench = Bench(digest=digest)
    for version in (0, 1):
        for first in range(5):
            tokens = run(first * 100, 3 * BLOCK + 3)
            match, lease = bench.start(tokens, version)
            for page, end in zip(match.pages, range(BLOCK, 99, BLOCK), strict=False):
                assert bench.memory.pages.read(page) == (version, encode(tokens[:end]))
            if match.slot is not None:
                assert bench.memory.slots.read(match.slot) == (version, encode(tokens[: match.num_tokens]))
            pages = bench.reach(lease, tokens, list(match.pages))
            for end in (BLOCK, 2 * BLOCK, 3 * BLOCK, 3 * BLOCK + UNIT):
                bench.plant(lease, tokens[:end])
            assert [bench.memory.pages.read(page)[0] for page in pages] == [version] * 3
            bench.cache.release(lease)
            bench.cache.check()
    bench.cache.evict(pages=10**6, slots=10**6)
    assert bench.memory.pages.num_out == bench.memory.slots.num_out == 0


def test_versions_share_nothing() -> None:
    bench = Bench()
    bench.serve(run(0, 20))
    assert bench.cache.match(1, encode(run(0, 20))).kv_tokens == 0
    assert bench.cache.match(-1, encode(run(0, 20))).kv_tokens == 0


# --- partial tails --------------------------------------------------------------------------------------------------
def test_a_tail_is_copied_by_whoever_goes_on_from_it() -> None:
    """The next request gets page and state to copy; its own full block doesn't disturb the tail."""
    bench = Bench()
    prompt = run(0, BLOCK + 4)
    _, lease = bench.start(prompt)
    bench.reach(lease, prompt, [])
    assert bench.plant(lease, prompt)
    bench.cache.release(lease)
    for answer in (run(50, BLOCK), run(70, BLOCK)):
        match, other = bench.start(prompt + answer)
        assert (match.num_tokens, len(match.pages), match.fork) == (len(prompt), 1, None)
        assert match.tail_page is not None
        assert match.slot is not None
        assert bench.memory.pages.read(match.tail_page) == bench.memory.slots.read(match.slot) == (0, encode(prompt))
        bench.reach(other, prompt + answer, list(match.pages))
        bench.cache.release(other)
        bench.cache.check()
    assert bench.cache.stats()["pages"] == 1 + 1 + 2


def test_a_tail_off_the_hash_grid_is_declined() -> None:
    bench = Bench()
    _, lease = bench.start(run(0, 20))
    bench.reach(lease, run(0, 20), [])
    assert [bench.plant(lease, run(0, end)) for end in (17, 18, 19)] == [False, True, False]
    bench.cache.release(lease)
    assert bench.hit(run(0, 20)) == 18


def test_without_partial_tails_only_boundaries_are_kept() -> None:
    bench = Bench(partial=False)
    assert bench.cache.checkpoint_unit == BLOCK
    _, lease = bench.start(run(0, 20))
    bench.reach(lease, run(0, 20), [])
    assert [bench.plant(lease, run(0, end)) for end in (8, 16, 18)] == [True, True, False]
    assert bench.cache.stats()["slots"] == 2


def test_one_tail_a_request() -> None:
    """The end of the answer takes the place of the prompt's end."""
    bench = Bench()
    prompt, all_ = run(0, 12), run(0, 22)
    _, lease = bench.start(prompt)
    pages = bench.reach(lease, prompt, [])
    assert bench.plant(lease, prompt)
    bench.reach(lease, all_, pages)
    assert bench.plant(lease, all_)
    assert bench.cache.stats()["slots"] == 1
    assert bench.hit([*all_, 5]) == 22
    assert bench.hit([*prompt, 99]) == 0


def test_a_tail_that_another_request_went_on_from_stays() -> None:
    """A group's prompt: one member's answer doesn't take it from those that come later."""
    bench = Bench()
    prompt, all_ = run(0, 12), run(0, 22)
    _, lease = bench.start(prompt)
    pages = bench.reach(lease, prompt, [])
    assert bench.plant(lease, prompt)
    _, sibling = bench.start([*prompt, 99])
    bench.cache.release(sibling)
    bench.reach(lease, all_, pages)
    assert bench.plant(lease, all_)
    assert bench.hit([*prompt, 98]) == 12
    assert bench.hit([*all_, 5]) == 22


def test_a_tail_is_promoted_when_its_block_is_full() -> None:
    """The state at the block's end takes the key's place; slot and page of the tail go back."""
    bench = Bench()
    _, lease = bench.start(run(0, 30))
    pages = bench.reach(lease, run(0, 12), [])
    assert bench.plant(lease, run(0, 12))
    pages = bench.reach(lease, run(0, 16), pages)
    assert bench.cache.stats()["pages"] == 3
    assert bench.hit(run(0, 14)) == 12  # the block is full, but the tail's is still the only state
    assert bench.plant(lease, run(0, 16))
    assert bench.cache.stats()["pages"] == 2
    assert bench.cache.stats()["slots"] == 1
    assert bench.hit(run(0, 20)) == 16
    assert bench.hit(run(0, 14)) == 0
    bench.cache.release(lease)
    bench.cache.check()


def test_a_later_block_does_not_take_a_tail() -> None:
    bench = Bench()
    _, lease = bench.start(run(0, 30))
    pages = bench.reach(lease, run(0, 12), [])
    bench.plant(lease, run(0, 12))
    bench.reach(lease, run(0, 24), pages)
    bench.plant(lease, run(0, 24))
    assert bench.hit(run(0, 14)) == 12
    assert bench.hit(run(0, 30)) == 24


# --- the known weakness ---------------------------------------------------------------------------------------------
def shared_then_private(shared: int, private: int, request: int) -> list[int]:
    return [*run(0, shared), *run(10_000 * (request + 1), private)]


@pytest.mark.parametrize(
    ("shared", "private", "forks", "hits"),
    [(1600, 600, False, 63), (1500, 700, False, 0), (1500, 700, True, 62), (1600, 600, True, 63)],
)
def test_a_shared_prefix_inside_longer_prompts(shared: int, private: int, forks: bool, hits: int) -> None:
    """Whether a prompt's one state stands in what is shared is chance (vllm-project/vllm 45238: 1,600 hits, 1,500
    doesn't); the fork that a match reports makes the second request plant the state that all later ones use.

    64 prompts of 2,200 tokens in blocks of 528; states at the prompt's last boundary, 2,112, and one interval before.
    """
    bench = Bench(block=528, unit=None, partial=False)
    found = []
    for request in range(64):
        tokens = shared_then_private(shared, private, request)
        found.append(bench.serve(tokens, interval=1584, fork=forks))
    assert sum(got > 0 for got in found) == hits
    boundary = shared // 528 * 528
    assert set(found) <= {0, boundary}


def test_the_fork_is_the_boundary_below_where_sequences_part() -> None:
    bench = Bench()
    bench.serve(shared_then_private(21, 30, 0))
    match = bench.cache.match(0, encode(shared_then_private(21, 30, 1)))
    assert (match.num_tokens, match.kv_tokens, match.fork) == (0, 16, 16)
    assert bench.serve(shared_then_private(21, 30, 1)) == 0
    match = bench.cache.match(0, encode(shared_then_private(21, 30, 2)))
    assert (match.num_tokens, match.kv_tokens, match.fork) == (16, 16, None)


def test_an_evicted_state_is_a_fork_again() -> None:
    bench = Bench(partial=False)
    bench.serve(run(0, 20))
    assert bench.cache.evict(slots=1) == (0, 1)
    match = bench.cache.match(0, encode(run(0, 20)))
    assert (match.num_tokens, match.kv_tokens, match.fork) == (0, 16, 16)
    bench.serve(run(0, 20))
    assert bench.hit(run(0, 20)) == 16


# --- turns and groups -----------------------------------------------------------------------------------------------
def test_turns_resume_where_the_last_one_ended() -> None:
    """Each turn is the last one, an answer and a question: partial tails lose nothing but the hash grid."""
    partial, full = Bench(), Bench(partial=False)
    tokens: list[int] = []
    hits = []
    for turn in range(6):
        tokens = [*tokens, *run(100 * turn, 11)]
        hits.append((partial.serve(tokens, end=True), full.serve(tokens)))
    assert hits == [(0, 0), (10, 8), (22, 16), (32, 32), (44, 40), (54, 48)]  # after 0, 11, 22, 33, 44, 55 tokens


@pytest.mark.parametrize("length", [31, 32, 33, 36])
def test_a_group_computes_its_prompt_once(length: int) -> None:
    bench = Bench()
    hits = [bench.serve(run(0, length)) for _ in range(8)]
    assert hits == [0, *[(length - 1) // UNIT * UNIT] * 7]


# --- eviction and leases --------------------------------------------------------------------------------------------
def test_eviction_is_least_recently_used_and_leaf_first() -> None:
    bench = Bench(partial=False)
    old, new = run(0, 3 * BLOCK), run(100, 3 * BLOCK)
    bench.serve(old)
    bench.serve(new)
    bench.hit(old)
    assert bench.cache.evict(pages=2)[0] == 2
    assert bench.cache.match(0, encode(new)).kv_tokens == BLOCK
    assert bench.cache.match(0, encode(old)).kv_tokens == 3 * BLOCK
    bench.cache.check()


def test_pinned_blocks_stay() -> None:
    bench = Bench()
    bench.serve(run(0, 21))
    match, lease = bench.start(run(0, 21))
    assert bench.cache.evict(pages=99, slots=99) == (0, 1)  # the state at 16; the tail at 20 is pinned
    assert match.slot is not None
    assert bench.memory.slots.read(match.slot) == (0, encode(run(0, 20)))
    assert bench.cache.stats()["pinned_pages"] == 3
    assert bench.cache.stats()["pinned_slots"] == 1
    bench.cache.release(lease)
    assert bench.cache.evict(pages=99, slots=99) == (3, 1)
    assert bench.memory.pages.num_out == bench.memory.slots.num_out == 0


def test_misuse_is_refused() -> None:
    bench = Bench()
    bench.serve(run(0, 21))
    match, lease = bench.start(run(0, 21))
    with pytest.raises(CacheError, match="in place of the leased"):
        bench.cache.extend(lease, encode(run(0, 21)), [77, 78])
    with pytest.raises(CacheError, match="the key differs"):
        bench.cache.extend(lease, encode(run(1, 21)), list(match.pages))
    with pytest.raises(CacheError, match="3 pages of 8 tokens for 21"):
        bench.cache.extend(lease, encode(run(0, 21)), [*match.pages, 77])
    with pytest.raises(CacheError, match="a checkpoint at 24, but 2 pages"):
        bench.cache.checkpoint(lease, encode(run(0, 24)), 1)
    with pytest.raises(CacheError, match="4 tokens after the last full page, tail page None"):
        bench.cache.checkpoint(lease, encode(run(0, 20)), 1)
    with pytest.raises(CacheError, match="0 tokens after the last full page"):
        bench.cache.checkpoint(lease, b"", 1)
    bench.cache.release(lease)
    with pytest.raises(CacheError, match="released before"):
        bench.cache.release(lease)
    bench.cache.evict(slots=99)
    with pytest.raises(CacheError, match="lock a match before anything else"):
        bench.cache.lock(match)


def test_check_sees_broken_books() -> None:
    bench = Bench()
    bench.serve(run(0, 21))
    _, lease = bench.start(run(0, 21))
    block = lease.blocks[0]
    for name, wrong in (("locks", 2), ("children", 0), ("readers", -1), ("page", lease.blocks[1].page)):
        right = getattr(block, name)
        setattr(block, name, wrong)
        with pytest.raises(CacheError):
            bench.cache.check()
        setattr(block, name, right)
    bench.cache.check()
