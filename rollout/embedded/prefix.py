"""Between the scheduler and the prefix cache: what a request takes over from earlier ones, and what it leaves.

The book of pages counts their holders, and the cache is one of them: a page that the cache holds may belong to requests
too, none of which writes it. States belong to one party: a snapshot is copied into a slot of its own, the state of a
request that ends is handed over as it is. So a running request holds up to four slots: the one it works in, two that
its answer's snapshots go to in turn, and for a moment one for a snapshot that the cache gets.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from miles_k3.rollout.cache.chunking import state_marks
from miles_k3.rollout.cache.contract import TOKEN_BYTES, Match, PrefixCache, encode
from miles_k3.rollout.cache.page_alignment import hash_block_size
from miles_k3.rollout.cache.paged import PagedCache
from miles_k3.rollout.cache.radix import RadixCache
from miles_k3.rollout.embedded.memory import RequestMemory
from miles_k3.rollout.embedded.request import Request, Track, cache_keys
from miles_k3.rollout.embedded.room import make_room

FINEST_TAIL = 4  # tokens; the paged policy keeps the states of partial blocks at multiples of this
TRACKS = 2  # snapshots of a growing answer: one is whole while the other may still be in flight
MAX_ENDINGS = 4096
NO_TOKEN = -1  # asked for after a prompt, so that a match may be as long as the prompt itself


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ending:
    """What a prompt's last token gave: with the checkpoint of its end, another sample starts without computing any.

    `x_H` goes into the output head. `routed` are the experts of all its tokens, where they were kept.
    """

    x_H: Tensor
    routed: tuple[Tensor, ...] | None


class Prefixes:
    """The cache in the engine's words. `min_tokens`: prefixes shorter than this are not worth a state.

    Checkpoints are planted where a prompt parts from what is cached, at its end, every `track_interval` tokens of it,
    and where an answer ends or is cut off. Requests that want routed experts take over only what comes with them.
    """

    def __init__(self, cache: PrefixCache, memory: RequestMemory, *, min_tokens: int, track_interval: int) -> None:
        self.cache, self.memory, self.min_tokens = cache, memory, min_tokens
        page = memory.page_size
        self.track_interval = -(-track_interval // page) * page
        self.counters: Counter[str] = Counter({"cached_prompt_tokens": 0, "checkpoints": 0, "tracked": 0})
        self._keys: set[int] = set()
        self._endings: OrderedDict[tuple[int, tuple[int, ...]], Ending] = OrderedDict()

    @classmethod
    def over(cls, policy: str, memory: RequestMemory, *, min_tokens: int, track_interval: int) -> Prefixes | None:
        """By the name of the policy; None for `off`."""
        if policy == "radix":
            cache = RadixCache(memory.pages, page_size=memory.page_size)
        elif policy == "paged":
            unit = hash_block_size(memory.page_size, FINEST_TAIL)
            cache = PagedCache(memory.pages, page_size=memory.page_size, hash_block_size=unit)
        else:
            return None
        return cls(cache, memory, min_tokens=min_tokens, track_interval=track_interval)

    # --- admission ----------------------------------------------------------------------------------------------
    def find(self, request: Request) -> tuple[Match | None, Ending | None]:
        """What is cached of `request.feed`, and how it went on if that is all of it.

        A request that no draft should follow takes pages with a draft's context too, where those reach further, and is
        followed then; one that a draft follows takes no others.
        """
        found = self._find(request)
        if request.followed is False:
            request.followed = True
            with_context = self._find(request)
            if _reach(with_context) > _reach(found):
                return with_context
            request.followed = False
        return found

    def _find(self, request: Request) -> tuple[Match | None, Ending | None]:
        feed, key, wants_routes = request.feed, request.cache_key, request.params.return_routed_experts
        ending = self._endings.get((key, feed))
        if ending is not None and (ending.routed is not None or not wants_routes):
            match = self.cache.match(key, encode((*feed, NO_TOKEN)))
            if match.num_tokens == len(feed):
                self._endings.move_to_end((key, feed))
                return match, ending
        known = request.num_routed + 1 if wants_routes else len(feed)
        return (None if known == 1 < len(feed) else self.cache.match(key, encode(feed[:known]))), None

    def make_room(self, pages: int, slots: int) -> bool:
        """Evict until so many of both can be taken, together; False when what is left is in use."""
        return make_room(self.memory.pool, self.cache, pages=pages, slots=slots)

    def attach(self, request: Request, match: Match) -> None:
        """Give an admitted request, which has its slot and pages, the state it starts from."""
        if match.slot is None:
            return
        request.num_cached = match.num_tokens
        self.memory.pool.copy_slots([match.slot], [request.slot])
        if match.tail_page is not None:
            self.memory.pool.copy_pages([match.tail_page], [request.pages[len(match.pages)]])
        self.counters["cached_prompt_tokens"] += match.num_tokens

    def plan_stops(self, request: Request, match: Match) -> None:
        """Where the request's prefill pauses for a snapshot."""
        marks = state_marks(
            match.num_tokens, len(request.feed), block=self.memory.page_size, unit=self.cache.checkpoint_unit,
            fork=match.fork, interval=self.track_interval or None,
        )  # fmt: skip
        request.stops = [mark for mark in marks if mark >= self.min_tokens]

    # --- while it runs ------------------------------------------------------------------------------------------
    def reached(self, request: Request) -> None:
        """A chunk was computed: take the snapshot that is due where it ended."""
        if request.stops and request.num_cached == request.stops[0]:
            request.stops.pop(0)
            self._snapshot(request)

    def prompt_ended(self, request: Request, x_H: Tensor) -> None:
        """All of `request.feed` is computed: keep its state, and what its last token gave, for the next sample."""
        feed = request.feed
        if len(feed) < self.min_tokens or not self._snapshot(request):
            return
        routed = tuple(request.routed) if request.num_routed == len(feed) else None
        self._endings[request.cache_key, feed] = Ending(x_H=x_H.clone(), routed=routed)
        if len(self._endings) > MAX_ENDINGS:
            self._endings.popitem(last=False)

    def track(self, requests: Sequence[Request]) -> None:
        """Their answers grew by a token: take the snapshots that are due, over the older ones where no slot is free."""
        due = [r for r in requests if self.track_interval and r.num_cached % self.track_interval == 0]
        for request in due:
            if request.num_cached < self.min_tokens:
                continue
            if len(request.tracks) < TRACKS and self.make_room(0, 1):
                slot = self.memory.pool.take_slot()
            elif request.tracks:
                slot = request.tracks.pop(0).slot
            else:
                continue
            self.memory.pool.copy_slots([request.slot], [slot])
            request.tracks.append(Track(position=request.num_cached, slot=slot))
            self.counters["tracked"] += 1

    def to_next_track(self, request: Request) -> int:
        """Tokens that the request may grow by at once: its state can be copied where it stands only."""
        if not self.track_interval:
            return request.total_tokens
        return self.track_interval - request.num_cached % self.track_interval

    def end(self, request: Request, *, keep: bool) -> bool:
        """Leave what an ended request has computed to the cache, if it is sound; whether its slot is gone from it.

        Its last state serves a next turn that goes on from there, the newest snapshot one that changes its last words.
        """
        slot_is_gone = keep and self.min_tokens <= request.num_cached <= len(request.tokens)
        if slot_is_gone:
            page = request.num_cached // self.memory.page_size
            tail = request.pages[page : page + 1] if request.num_cached % self.memory.page_size else []
            self.memory.pages.hold(tail)
            slot_is_gone = self._plant(request, request.num_cached, request.slot, tail)
        for i, track in enumerate(reversed(request.tracks)):
            if i or not keep or not self._plant(request, track.position, track.slot, []):
                self.memory.pool.give_slots([track.slot])
        request.tracks = []
        self.unlock(request)
        return slot_is_gone

    def lock(self, request: Request, match: Match) -> None:
        """Pin what was found. Must follow `find` with nothing in between."""
        request.lease, request.cached_pages = self.cache.lock(match), list(match.pages)
        self._keys.add(request.cache_key)

    def unlock(self, request: Request) -> None:
        """The end of `lock`, where there was one."""
        if request.lease is not None:
            self.cache.release(request.lease)
            request.lease = None
        request.cached_pages = []

    def forget_all_but(self, live: set[int]) -> None:
        """Give back what no request can ask for any more."""
        kept = {key for version in live for key in cache_keys(version)}
        for key in self._keys - kept:
            self.cache.forget(key)
        for place in [place for place in self._endings if place[0] not in kept]:
            del self._endings[place]
        self._keys &= kept

    def distrust(self, version: int) -> None:
        """Forget all of a version but what running requests pin: a request failed, and may have left what made it."""
        keys = cache_keys(version)
        for key in keys:
            self.cache.forget(key)
        for place in [place for place in self._endings if place[0] in keys]:
            del self._endings[place]

    def stats(self) -> Mapping[str, int]:
        """Counts since the start, and what the cache holds now."""
        now = self.cache.stats()
        return {**self.counters, "cache_pages": now["pages"], "cache_slots": now["slots"]}

    # --- planting -----------------------------------------------------------------------------------------------
    def _snapshot(self, request: Request) -> bool:
        """A checkpoint of the request's state as it is now, which it goes on to change; False where there is none."""
        position, size, pool = request.num_cached, self.memory.page_size, self.memory.pool
        rest = position % size
        if position % self.cache.checkpoint_unit or not self.make_room(1 if rest else 0, 1):
            return False
        slot, tail = pool.take_slot(), self.memory.pages.take(1 if rest else 0)
        pool.copy_slots([request.slot], [slot])
        pool.copy_pages(request.pages[position // size : position // size + len(tail)], tail)
        if self._plant(request, position, slot, tail):
            return True
        pool.give_slots([slot])
        return self._stands(request, position)

    def _stands(self, request: Request, position: int) -> bool:
        key = encode((*request.tokens[:position], NO_TOKEN))
        return self.cache.match(request.cache_key, key).num_tokens == position

    def _plant(self, request: Request, position: int, slot: int, tail: list[int]) -> bool:
        """Offer the state after `position` tokens, and the page they end in: whether the cache took the slot.

        `tail` is held for the cache; it is given back where the cache has a state there, or takes none.
        """
        key = encode(request.tokens[:position])
        if request.lease is None:  # it took its prompt over from a twin
            self.lock(request, self.cache.match(request.cache_key, key))
        self._extend(request, key)
        assert request.lease is not None
        taken = self.cache.checkpoint(request.lease, key, slot, tail[0] if tail else None)
        if not taken:
            self.memory.pages.give_pages(tail)
        self.counters["checkpoints"] += taken
        return taken

    def _extend(self, request: Request, key: bytes) -> None:
        """Hand over the full pages of `key`; the request goes on using its own copies of what was cached already."""
        known, full = len(request.cached_pages), len(key) // TOKEN_BYTES // self.memory.page_size
        if full <= known:
            return
        own = request.pages[known:full]
        self.memory.pages.hold(own)
        assert request.lease is not None
        request.cached_pages = self.cache.extend(request.lease, key, [*request.cached_pages, *own])


def _reach(found: tuple[Match | None, Ending | None]) -> int:
    return 0 if found[0] is None else found[0].num_tokens
