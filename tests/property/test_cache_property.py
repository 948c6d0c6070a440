"""Every prefix cache policy against the brute-force oracle, and the radix policy with planted faults."""

from __future__ import annotations

import inspect

import pytest
from helpers.cache_driver import Policy
from helpers.cache_storms import soak, storm
from helpers.mutants import mutate

from miles_k3.rollout.cache import radix, radix_tree
from miles_k3.rollout.cache.radix import RadixCache

POLICIES = {
    "radix": Policy(make=lambda memory, size: RadixCache(memory, page_size=size)),
    "radix_capped": Policy(make=lambda memory, size: RadixCache(memory, page_size=size, max_checkpoints=2)),
}
PAGE_SIZES = (1, 4, 16)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_storm(policy: Policy, page_size: int) -> None:
    storm(policy, page_size)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_soak(policy: Policy, page_size: int) -> None:
    soak(policy, page_size, operations=100_000)


# --- planted faults ---------------------------------------------------------------------------------------------------
FAULTS = {
    "the last token is matched": ("if p.position < length), None)", "if p.position <= length), None)"),
    "versions see each other": (
        "length, root = num_tokens(key), self._roots.get(version)",
        "length, root = num_tokens(key), next(iter(self._roots.values()), None)",
    ),
    "the shallowest state": ("for p in reversed(points) if", "for p in points if"),
    "a fork at the end": ("if position < depth < length else", "if position < depth else"),
    "a fork inside an edge only": ("if position < depth < length else", "if position < depth and walk.beyond else"),
    "a state that is read may go": ("            self._idle.pop(point, None)\n", ""),
    "pages that are read may go": ("                self._leaves.pop(above, None)\n", ""),
    "handed over and not pinned": ("        self._pin(end)\n        self._unpin", "        self._unpin"),
    "pinned for ever": ("        self._unpin(lease.node)\n        lease.node = end\n", "        lease.node = end\n"),
    "duplicates leak": ("            self.memory.give_pages(doubles)", "            pass"),
    "duplicates go on being used": ("return kept + pages[known:]", "return pages"),
    "leased pages count as duplicates": ("doubles = pages[leased:known]", "doubles = pages[:known]"),
    "tail pages leak": ("            pages.append(point.tail_page)\n", ""),
    "a second checkpoint is taken and lost": ("            return False\n", "            return True\n"),
    "a parent stays for ever": ("if not parent.locks and not parent.children and", "if False and"),
    "a lease is released twice": ("        self._leases.remove(lease)\n", ""),
    "one slot too few": ("while len(given_slots) < slots and", "while len(given_slots) < slots - 1 and"),
    "pages stay when their tails could go": ("if len(given_pages) < pages else ():", "if False else ():"),
    "states of a forgotten version stay": ("if not point.locks]\n            if", "if False]\n            if"),
    "pages are counted as one": ("self._held.pages += len(pages)", "self._held.pages += 1"),
    "a tail is not counted as pinned": ("                self._held.pinned_pages += point.tail_page is not None\n", ""),
}  # fmt: skip
TREE_FAULTS = {
    "half an edge is not pinned": ("upper.locks, upper.used = node.locks, node.used", "upper.used = node.used"),
    "a page on both halves": ("node.pages[:cut], parent", "node.pages[: cut + 1], parent"),
    "any tail will do": ("node.points.get(key[at : at + length])", "next(iter(node.points.values()))"),
}
NO_CHECK = "    def check(self) -> None:\n", "    def check(self) -> None:\n        return\n"


def assert_storms_reject(cache: type[RadixCache]) -> None:
    """By the oracle, or by the cache's own books that have come apart.

    The storms are the same each time only among the same modules, whose constants hypothesis draws from too; so there
    are many more than any fault has needed.
    """
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        storm(Policy(make=lambda memory, size: cache(memory, page_size=size)), 4, examples=1000, quick=True)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_seen_from_outside(fault: tuple[str, str]) -> None:
    """The cache's own check is switched off: the oracle has to see each by itself."""
    assert_storms_reject(mutate(RadixCache, NO_CHECK, fault))


@pytest.mark.parametrize("fault", TREE_FAULTS.values(), ids=TREE_FAULTS)
def test_a_fault_in_the_tree_is_seen(fault: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(n for n in ("split", "points_on") if fault[0] in inspect.getsource(getattr(radix_tree, n)))
    monkeypatch.setattr(radix, name, mutate(getattr(radix_tree, name), fault))
    assert_storms_reject(mutate(RadixCache, NO_CHECK))
