"""The radix policy's named behaviours; what every policy promises is in tests/property/test_cache_property.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers.cache_driver import EVERYTHING, CacheDriver, Policy, Running

from miles_k3.rollout.cache.contract import CacheError, encode
from miles_k3.rollout.cache.radix import RadixCache

PAGE = 4


class Bench(CacheDriver):
    """A driver for tokens instead of keys, that serves whole requests."""

    def __init__(self, page_size: int = PAGE, max_checkpoints: int = 8) -> None:
        make = lambda memory, size: RadixCache(memory, page_size=size, max_checkpoints=max_checkpoints)  # noqa: E731
        super().__init__(Policy(make=make), page_size)

    def begin(self, tokens: Sequence[int], version: int = 0) -> Running:
        return self.start(version, encode(tokens))

    def reach(self, request: Running, position: int, *, plant: bool = True) -> None:
        """Compute to `position`, hand over, and leave a checkpoint there."""
        self.compute(request, position - request.num_done)
        self.extend(request)
        if plant:
            self.checkpoint(request, position)

    def serve(self, tokens: Sequence[int], *marks: int, version: int = 0) -> int:
        """A whole request with checkpoints at `marks`; the tokens it need not compute."""
        request = self.begin(tokens, version)
        for mark in marks:
            self.reach(request, mark)
        self.reach(request, len(tokens), plant=False)
        self.release(request)
        self.verify()
        return request.match.num_tokens

    def hit(self, tokens: Sequence[int], version: int = 0) -> int:
        return self.probe(version, encode(tokens)).num_tokens


@pytest.fixture
def bench() -> Bench:
    return Bench()


A = list(range(100, 140))


# --- states are sparse ----------------------------------------------------------------------------------------------
def test_a_match_ends_at_the_last_checkpoint_not_at_the_last_page(bench: Bench) -> None:
    bench.serve(A[:20], 6, 11)
    match = bench.probe(0, encode(A))
    assert (match.num_tokens, match.kv_tokens, match.fork) == (11, 20, 20)
    assert (len(match.pages), match.tail_page is not None) == (2, True)
    assert [bench.hit(A[:n]) for n in (6, 7, 11, 12)] == [0, 6, 6, 11]


def test_versions_never_hit_each_other(bench: Bench) -> None:
    bench.serve(A[:20], 20, version=1)
    assert (bench.hit(A, version=1), bench.hit(A, version=2), bench.hit(A)) == (20, 0, 0)
    assert bench.cache.stats()["missed_tokens"] == 20 + 20 + 40 + 40


def test_evicted_states_leave_tombstones_and_a_fork(bench: Bench) -> None:
    bench.serve(A[:20], 8, 20)
    assert bench.evict(slots=1) == (0, 1)
    assert bench.hit(A) == 20
    assert bench.evict(slots=1) == (0, 1)
    match = bench.probe(0, encode(A))
    assert (match.num_tokens, match.kv_tokens, match.fork) == (0, 20, 20)
    assert bench.cache.stats()["pages"] == 5


# --- forks ----------------------------------------------------------------------------------------------------------
def test_a_fork_inside_an_edge_is_seen_planted_and_hit(bench: Bench) -> None:
    bench.serve(A[:20], 20)
    b, c = A[:14] + [1] * 10, A[:14] + [2] * 10
    request = bench.begin(b)
    assert (request.match.num_tokens, request.match.fork) == (0, 12)
    bench.reach(request, 12)
    bench.release(request)
    match = bench.probe(0, encode(c))
    assert (match.num_tokens, match.fork) == (12, None)
    assert bench.hit(A) == 20


def test_sequences_that_part_within_their_last_page_see_the_fork(bench: Bench) -> None:
    """A long system prompt with questions shorter than a page: nothing but tails hangs on the shared node."""
    bench.serve(A[:10], 10)
    match = bench.probe(0, encode([*A[:8], 1, 2, 3]))
    assert (match.num_tokens, match.fork) == (0, 8)


def test_kv_reaches_at_least_as_far_as_the_state(bench: Bench) -> None:
    bench.serve(A[:10], 10)
    match = bench.probe(0, encode(A[:11]))
    assert (match.num_tokens, match.kv_tokens, match.fork) == (10, 10, None)


def test_no_fork_where_the_sequence_ends(bench: Bench) -> None:
    bench.serve(A[:12], 8)
    assert bench.probe(0, encode(A[:12])).fork is None
    assert bench.probe(0, encode(A[:13])).fork == 12


@pytest.mark.parametrize("length", [7, 8, 9, 10])
def test_a_group_forks_at_its_prompts_end(bench: Bench, length: int) -> None:
    """Eight samples of one prompt, on and off a page boundary: one prefill, and no sample's tokens in another's."""
    prompt = A[:length]
    group = [bench.begin([*prompt, 1000 + i, *[i] * 9]) for i in range(8)]
    leader, *_ = group
    bench.reach(leader, length)
    for follower in group[1:]:
        bench.release(follower)
    followers = [bench.begin([*prompt, 1000 + i, *[i] * 9]) for i in range(1, 8)]
    assert {f.match.num_tokens for f in followers} == {length}
    for request in (leader, *followers):
        bench.reach(request, length + 10, plant=False)
        bench.verify()
    assert bench.cache.stats()["pages"] == length // PAGE + 8 * ((length + 10) // PAGE - length // PAGE) + (
        length % PAGE > 0
    )
    bench.finish()


# --- giving and taking ----------------------------------------------------------------------------------------------
def test_donating_moves_nothing(bench: Bench) -> None:
    """The slot that a match hands out is the one that was donated, the pages are those handed over."""
    request = bench.begin(A[:10])
    bench.compute(request, 10)
    pages, slot = list(request.pages), request.slot
    bench.extend(request)
    bench.checkpoint(request, 10)
    match = bench.probe(0, encode(A))
    assert (match.slot, list(match.pages)) == (slot, pages[:2])


def test_duplicates_are_given_back(bench: Bench) -> None:
    first, second = bench.begin(A[:16]), bench.begin([*A[:10], *[1] * 6])
    bench.reach(first, 16)
    bench.compute(second, 16)
    own = list(second.pages)
    bench.extend(second)
    assert second.pages == [*first.pages[:2], *own[2:]]
    assert bench.memory.pages.num_given == 2
    assert not bench.checkpoint(bench.begin(A), 16)
    bench.verify()


def test_a_checkpoint_may_stand_inside_what_was_handed_over(bench: Bench) -> None:
    request = bench.begin(A[:20])
    bench.reach(request, 20)
    assert bench.checkpoint(request, 12)
    assert bench.checkpoint(request, 6)
    bench.verify()
    assert (bench.hit(A[:18]), bench.hit(A[:12])) == (12, 6)


# --- which go first -------------------------------------------------------------------------------------------------
def test_the_cap_keeps_forks_and_the_newest() -> None:
    bench = Bench(max_checkpoints=3)
    bench.serve(A[:8], 8)
    bench.serve([*A[:8], 1, 1, 1, 1], 8)
    bench.serve(A[:32], 8, 12, 16, 20, 24)
    assert bench.cache.stats()["slots"] == 3
    assert [bench.hit(A[: n + 1]) for n in (8, 12, 16, 20, 24)] == [8, 8, 8, 20, 24]


def test_the_cap_counts_one_path_only() -> None:
    """Prompts that share whole pages and part in the last one are on paths of their own."""
    bench = Bench(max_checkpoints=2)
    prompts = [[*A[:8], i, i] for i in range(6)]
    for prompt in prompts:
        bench.serve(prompt, 10)
    assert [bench.hit([*prompt, 0]) for prompt in prompts] == [10] * 6


def test_the_cap_holds_before_the_first_page_too() -> None:
    bench = Bench(page_size=16, max_checkpoints=2)
    bench.serve(A[:12], 2, 4, 6, 8)
    assert bench.cache.stats()["slots"] == 2


def test_least_recently_used_goes_first(bench: Bench) -> None:
    b, c = [1] * 12, [2] * 12
    for tokens in (A[:12], b, c):
        bench.serve(tokens, 12)
    bench.hit([*A[:12], 0])
    assert bench.evict(slots=1) == (0, 1)
    assert [bench.hit([*t, 0]) for t in (A[:12], b, c)] == [12, 0, 12]
    bench.hit([*b, 0])
    assert bench.evict(pages=1) == (3, 1), "A was used before b and c, and its state goes with its pages"
    assert [bench.probe(0, encode([*t, 0])).kv_tokens for t in (A[:12], b, c)] == [0, 12, 12]


def test_a_prefix_that_is_still_used_outlives_its_last_branch(bench: Bench) -> None:
    bench.serve([*A[:8], *[1] * 8], 8)
    bench.serve([2] * 8, 8)
    bench.hit(A[:9])
    assert bench.evict(pages=1) == (2, 0), "the branch"
    assert bench.evict(pages=1) == (2, 1)
    assert (bench.hit(A[:9]), bench.hit([2] * 9)) == (8, 0)


def test_nothing_that_a_lease_pins_is_evicted(bench: Bench) -> None:
    bench.serve(A[:20], 10, 20)
    request = bench.begin(A[:16])
    assert bench.evict(EVERYTHING, EVERYTHING) == (3, 1)
    stats = bench.cache.stats()
    assert [stats[name] for name in ("pages", "slots", "pinned_pages", "pinned_slots")] == [3, 1, 3, 1]
    bench.release(request)
    assert bench.evict(EVERYTHING, EVERYTHING) == (3, 1)


def test_tails_behind_pinned_pages_are_given_back(bench: Bench) -> None:
    request = bench.begin(A[:10])
    bench.reach(request, 10)
    assert bench.evict(pages=1) == (1, 1)


def test_forgetting_spares_leases_and_other_versions(bench: Bench) -> None:
    bench.serve(A[:10], 10, version=1)
    bench.serve(A[:10], 10, version=2)
    request = bench.begin(A[:16], version=1)
    idle = bench.begin([7] * 8, version=3)
    for version in (1, 3, 4):
        bench.forget(version)
    bench.reach(request, 16)
    bench.reach(idle, 8)
    bench.release(request)
    assert bench.hit(A, version=2) == 10
    bench.forget(1)
    assert bench.hit(A, version=1) == 0
    bench.finish()


# --- mistakes of the caller -----------------------------------------------------------------------------------------
def test_a_dead_lease_is_refused(bench: Bench) -> None:
    request = bench.begin(A[:8])
    bench.release(request)
    cache, lease = bench.cache, request.lease
    for call in (
        lambda: cache.release(lease),
        lambda: cache.extend(lease, b"", []),
        lambda: cache.checkpoint(lease, encode([0]), 0, 0),
    ):
        with pytest.raises(CacheError, match="released before"):
            call()


def test_another_caches_lease_is_refused(bench: Bench) -> None:
    with pytest.raises(CacheError, match="another cache"):
        bench.cache.release(Bench().begin(A).lease)


def test_a_tail_without_its_page_or_a_page_without_a_tail(bench: Bench) -> None:
    request = bench.begin(A[:12])
    bench.reach(request, 12)
    for length, page in ((10, None), (8, 99), (0, None)):
        with pytest.raises(CacheError, match="tail page"):
            bench.cache.checkpoint(request.lease, encode(A[:length]), 99, page)


def test_a_checkpoint_beyond_the_pages(bench: Bench) -> None:
    request = bench.begin(A[:12])
    bench.reach(request, 8)
    with pytest.raises(CacheError, match="handed over to 8 only"):
        bench.cache.checkpoint(request.lease, encode(A[:12]), 99)


def test_pages_that_do_not_go_on_from_the_lease(bench: Bench) -> None:
    bench.serve(A[:12], 8)
    request = bench.begin(A[:16])
    page = bench.memory.pages.take(0, (0, b""))
    bench.memory.pages.hand_over(page, 0)
    for key, pages in ((A[:12], [page, request.pages[1], page]), ([1] * 12, [*request.pages, page]), (A[:4], [0])):
        with pytest.raises(CacheError, match="2 pages that the lease pins"):
            bench.cache.extend(request.lease, encode(key), pages)
    with pytest.raises(CacheError, match="3 pages of 4 tokens for 8"):
        bench.cache.extend(request.lease, encode(A[:8]), [*request.pages, page])


def test_the_books_are_checked(bench: Bench) -> None:
    bench.serve(A[:10], 10)
    request = bench.begin([*A[:8], *[1] * 8])
    bench.reach(request, 16)
    cache = bench.cache
    assert isinstance(cache, RadixCache)
    node = request.lease.node  # type: ignore[attr-defined]
    for spoil, mend in (
        (lambda: setattr(node, "locks", 2), lambda: setattr(node, "locks", 1)),
        (lambda: node.pages.append(77), node.pages.pop),
        (lambda: setattr(node, "depth", 15), lambda: setattr(node, "depth", 16)),
        (lambda: cache._leaves.update({node: None}), lambda: cache._leaves.pop(node)),
        (lambda: setattr(cache._held, "pages", 0), lambda: setattr(cache._held, "pages", 5)),
        (lambda: cache._leases.clear(), lambda: cache._leases.add(request.lease)),  # type: ignore[arg-type]
    ):
        spoil()
        with pytest.raises(CacheError):
            cache.check()
        mend()
        cache.check()
