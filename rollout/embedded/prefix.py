"""Between the scheduler and the prefix cache: what a request takes over from earlier ones, and what it leaves.

The pools count users of pages, and the cache is one of them: a page that the cache holds may belong to requests too,
none of which writes it. States belong to one party: a snapshot is copied into a slot of its own, the state of a request
that ends is handed over as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from miles_k3.rollout.cache.contract import TOKEN_BYTES, Match, PrefixCache, encode
from miles_k3.rollout.cache.page_alignment import hash_block_size
from miles_k3.rollout.cache.paged import PagedCache
from miles_k3.rollout.cache.pools import LatentPages, StateSlots
from miles_k3.rollout.cache.radix import RadixCache
from miles_k3.rollout.embedded.request import Request

FINEST_TAIL = 4  # tokens; the paged policy keeps the states of partial blocks at multiples of this


class CacheMemory:
    """`contract.Memory` over the engine's pools."""

    def __init__(self, pages: LatentPages, slots: StateSlots) -> None:
        self._pages, self._slots = pages, slots

    def give_pages(self, pages: Sequence[int]) -> None:
        self._pages.give_pages(pages)

    def give_slots(self, slots: Sequence[int]) -> None:
        self._slots.take_back(slots)


class Prefixes:
    """The cache in the engine's words. `min_tokens`: prefixes shorter than this are not worth a state.

    A prompt is checkpointed at the last page boundary before its last token, and where it parts from what is cached; an
    answer at its end, for the next turn. Requests that want routed experts compute their prompt: nobody kept them.
    """

    def __init__(self, cache: PrefixCache, pages: LatentPages, slots: StateSlots, *, min_tokens: int) -> None:
        self.cache, self.pages, self.slots, self.min_tokens = cache, pages, slots, min_tokens
        self.counters: Counter[str] = Counter({"cached_prompt_tokens": 0, "checkpoints": 0})
        self._versions: set[int] = set()

    @classmethod
    def over(cls, policy: str, pages: LatentPages, slots: StateSlots, *, min_tokens: int) -> Prefixes | None:
        """By the name of the policy; None for `off`."""
        memory, cache = CacheMemory(pages, slots), None
        if policy == "radix":
            cache = RadixCache(memory, page_size=pages.page_size)
        elif policy == "paged":
            unit = hash_block_size(pages.page_size, FINEST_TAIL)
            cache = PagedCache(memory, page_size=pages.page_size, hash_block_size=unit)
        return None if cache is None else cls(cache, pages, slots, min_tokens=min_tokens)

    # --- admission ----------------------------------------------------------------------------------------------
    def find(self, request: Request) -> Match | None:
        """What is cached of the prompt; None for a request that must compute it."""
        if request.params.return_routed_experts:
            return None
        return self.cache.match(request.version, encode(request.feed))

    def make_room(self, pages: int, slots: int) -> bool:
        """Evict until so many are free; False when what is left is in use."""
        lacking_pages, lacking_slots = pages - self.pages.num_free, slots - self.slots.num_free
        if lacking_slots > 0:
            self.cache.evict(slots=lacking_slots)
        while (lacking_pages := pages - self.pages.num_free) > 0:
            if self.cache.evict(pages=lacking_pages) == (0, 0):
                break
        return pages <= self.pages.num_free and slots <= self.slots.num_free

    def attach(self, request: Request, match: Match) -> None:
        """Give an admitted request, which has its slot and pages, the state it starts from."""
        if match.slot is None:
            return
        request.num_cached = match.num_tokens
        self.slots.copy([match.slot], [request.slot])
        if match.tail_page is not None:
            self.pages.copy([match.tail_page], [self.pages.pages_of(request.slot)[len(match.pages)]])
        self.counters["cached_prompt_tokens"] += match.num_tokens

    def plan_stops(self, request: Request, match: Match) -> None:
        """Where the request's prefill pauses for a snapshot."""
        page, last = self.pages.page_size, len(request.feed) - 1
        wanted = {last // page * page} | ({match.fork} if match.fork is not None else set())
        request.stops = sorted(s for s in wanted if max(match.num_tokens, self.min_tokens - 1) < s <= last)

    # --- while it runs ------------------------------------------------------------------------------------------
    def reached(self, request: Request) -> None:
        """A chunk was computed: take the snapshot that is due where it ended."""
        if not request.stops or request.num_cached != request.stops[0]:
            return
        request.stops.pop(0)
        if request.lease is None or not self.make_room(0, 1):
            return
        key = encode(request.feed[: request.num_cached])
        self._extend(request, key)
        slot = self.slots.lend_free()
        self.slots.copy([request.slot], [slot])
        self._checkpoint(request, key, slot, None)

    def end(self, request: Request, *, keep: bool) -> bool:
        """Leave what an ended request has computed to the cache, if it is sound; whether its slot is gone from it."""
        keep = keep and request.num_cached >= self.min_tokens
        if keep:
            key = encode((*request.prompt, *request.token_ids)[: request.num_cached])
            if request.lease is None:  # it took its prompt over from a twin
                self.lock(request, self.cache.match(request.version, key))
            self._extend(request, key)
            full, rest = divmod(request.num_cached, self.pages.page_size)
            self.slots.lend(request.slot)
            tail = self.pages.pages_of(request.slot)[full] if rest else None
            self._checkpoint(request, key, request.slot, tail)
        self.unlock(request)
        return keep

    def lock(self, request: Request, match: Match) -> None:
        """Pin what was found. Must follow `find` with nothing in between."""
        request.lease, request.cached_pages = self.cache.lock(match), list(match.pages)
        self._versions.add(request.version)

    def unlock(self, request: Request) -> None:
        """The end of `lock`, where there was one."""
        if request.lease is not None:
            self.cache.release(request.lease)
            request.lease = None

    def forget_all_but(self, live: set[int]) -> None:
        """Give back what no request can ask for any more."""
        for version in self._versions - live:
            self.cache.forget(version)
        self._versions &= live

    def stats(self) -> Mapping[str, int]:
        """Counts since the start, and what the cache holds now."""
        now = self.cache.stats()
        return {**self.counters, "cache_pages": now["pages"], "cache_slots": now["slots"]}

    def _extend(self, request: Request, key: bytes) -> None:
        """Hand over the full pages of `key`; the request goes on using its own copies of what was cached already."""
        known, full = len(request.cached_pages), len(key) // TOKEN_BYTES // self.pages.page_size
        own = self.pages.pages_of(request.slot)[known:full]
        self.pages.hold(own)
        request.cached_pages = self.cache.extend(request.lease, key, [*request.cached_pages, *own])  # pyright: ignore[reportArgumentType]

    def _checkpoint(self, request: Request, key: bytes, slot: int, tail: int | None) -> None:
        """Offer a lent slot, and the page its key ends in; both come back where the cache has one there."""
        tails = [] if tail is None else [tail]
        self.pages.hold(tails)
        assert request.lease is not None
        if self.cache.checkpoint(request.lease, key, slot, tail):
            self.counters["checkpoints"] += 1
        else:
            self.pages.give_pages(tails)
            self.slots.take_back([slot])
