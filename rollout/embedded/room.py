"""Room for a request by eviction, whichever pool there is."""

from __future__ import annotations

from miles_k3.rollout.cache.contract import PrefixCache
from miles_k3.rollout.cache.memory import BlockPool


def make_room(pool: BlockPool, cache: PrefixCache, *, pages: int, slots: int) -> bool:
    """Evict until so many of both can be taken, together. False when the cache has nothing more to give.

    Where one pool holds both kinds, a checkpoint goes first, since a state is worth thousands of tokens of KV, and then
    as many pages as are still lacking.
    """
    while not pool.fits(slots=slots, pages=pages):
        lack_slots, lack_pages = pool.lacking(slots=slots, pages=pages)
        if lack_slots and lack_pages:
            given = cache.evict(slots=1)
            if given == (0, 0):
                given = cache.evict(pages=lack_pages)
        else:
            given = cache.evict(slots=lack_slots, pages=lack_pages)
        if given == (0, 0):
            return False
    return True
