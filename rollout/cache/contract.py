"""What a prefix cache promises: KV in pages, KDA states as sparse checkpoints, both under (adapter version, tokens).

KV can be cut anywhere, a state can't: it exists where somebody kept a copy. So a match is as long as the last
checkpoint, not as the KV. Pages and state slots belong to exactly one party at any time: the pool, a request, or the
cache. A request reads what a lease pins and writes only what is its own.

Shape legend: token keys are little-endian int32 bytes, four a token (`encode`), so that comparing is one memcmp.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

TOKEN_BYTES = 4


def encode(tokens: Iterable[int]) -> bytes:
    """The key of a token sequence."""
    return array("i", tokens).tobytes()


def num_tokens(key: bytes) -> int:
    return len(key) // TOKEN_BYTES


class CacheError(AssertionError):
    """A lease released twice, a page handed over twice, a lock below zero: a bug, never a user's mistake."""


class PoolError(AssertionError):
    """A page or slot was taken beyond the pool, leaked, or used while the memory sleeps: a bug as well."""


class Memory(Protocol):
    """Where a cache gives back what it held. Ids are the pools' own; the cache looks at no byte behind them."""

    def give_pages(self, pages: Sequence[int]) -> None: ...

    def give_slots(self, slots: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What is cached of a sequence. Valid until the next call that may change the cache, unless it is locked.

    `num_tokens`: where the state checkpoint `slot` stands; 0 and None when there is none. `pages`: the full pages
    before it, in order; `tail_page` holds the tokens after the last full one. All are read-only: copy the state into a
    working slot, and the tail page into a page of one's own, before writing. `kv_tokens`: how far KV alone is cached.
    `fork`: where the sequence leaves what is cached, or where cached KV has no state, beyond `num_tokens`: whoever
    computes the sequence should stop there for a moment and plant a checkpoint. None where there is nothing to gain.
    """

    version: int
    num_tokens: int = 0
    pages: Sequence[int] = ()
    slot: int | None = None
    tail_page: int | None = None
    kv_tokens: int = 0
    fork: int | None = None
    place: Any = None  # the policy's own


class Lease(Protocol):
    """Pins what one request reads. Opaque; belongs to the policy that made it."""

    version: int


class PrefixCache[L: Lease](Protocol):
    """A cache policy, with its kind of lease.

    All calls are host bookkeeping; whoever holds a lease moves the bytes, in stream order.
    """

    page_size: int
    checkpoint_unit: int  # positions that `checkpoint` takes are multiples of it

    def match(self, version: int, key: bytes) -> Match:
        """The longest usable prefix, at most all tokens but the last: a request must compute something to sample from.

        Changes the order of eviction only.
        """
        ...

    def lock(self, match: Match) -> L:
        """Pin the match's pages and state. Must follow `match` with no other call in between; balanced by `release`."""
        ...

    def extend(self, lease: L, key: bytes, pages: Sequence[int]) -> list[int]:
        """Hand over a request's full pages of `key` (those it leased come first, unchanged) and pin them.

        Gives the pages to use from now on: where the same tokens were cached already, the cached page instead of the
        request's own, which goes back to the pool. `len(pages) * page_size` tokens at most, and `key` as long.
        """
        ...

    def checkpoint(self, lease: L, key: bytes, slot: int, tail_page: int | None = None) -> bool:
        """Donate `slot`, with the state after all of `key`, and the page of the tokens after the last full one.

        `extend` must have handed the full pages over. No byte moves: from now on both are the cache's, read-only.
        False, and they stay the caller's, when a checkpoint stands there already.
        """
        ...

    def release(self, lease: L) -> None:
        """Unpin. The lease is dead afterwards; its pages and state may be evicted."""
        ...

    def evict(self, *, pages: int = 0, slots: int = 0) -> tuple[int, int]:
        """Give back at least so many pages and slots, least recently used first; what it could. Never what is pinned.

        Slots may go without their KV, which stays as a tombstone: a later request finds the fork, not the state.
        """
        ...

    def forget(self, version: int) -> None:
        """Give back everything of an adapter version that no lease pins."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Counts of now: pages, slots, pinned ones of both; and since the start: hit and missed tokens, evictions."""
        ...

    def check(self) -> None:
        """Raise CacheError unless the books balance. For tests: it walks everything."""
        ...
