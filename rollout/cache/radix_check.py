"""The radix policy's books against a walk of everything it holds."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from miles_k3.rollout.cache.contract import CacheError, num_tokens
from miles_k3.rollout.cache.radix_tree import Node, Point, postorder


@dataclass(slots=True)
class Held:
    """Pages (tails too) and slots that the cache owns, and how many of them leases pin."""

    pages: int = 0
    slots: int = 0
    pinned_pages: int = 0
    pinned_slots: int = 0

    def add(self, pages: int, slots: int, *, pinned: bool) -> None:
        self.pages += pages
        self.slots += slots
        if pinned:
            self.pinned_pages += pages
            self.pinned_slots += slots


def check_trees(
    roots: Mapping[int, Node],
    leases: Mapping[Node, int],
    readers: Mapping[Point, int],
    *,
    leaves: Set[Node],
    idle: Set[Point],
) -> Held:
    """What the trees hold. Raises CacheError where they, the locks or the two orders of eviction disagree.

    `leases`: live leases on each node or below; `readers`: on each checkpoint.
    """
    held = Held()
    nodes: set[Node] = set()
    points: set[Point] = set()
    pages: list[int] = []
    slots: list[int] = []
    for version, root in roots.items():
        for node in postorder(root):
            nodes.add(node)
            pages += node.pages
            held.add(len(node.pages), 0, pinned=node.locks > 0)
            _check_node(node, version)
            at = f"the node of version {version} at {node.depth} tokens"
            _expect(node.locks == leases.get(node, 0), f"{at}: {node.locks} locks, {leases.get(node, 0)} leases")
            evictable = node.parent is not None and not node.children and not node.locks
            _expect(evictable == (node in leaves), f"{at} is {'not ' * evictable}in the order of eviction")
            for tail, point in node.points.items():
                points.add(point)
                slots.append(point.slot)
                tails = [] if point.tail_page is None else [point.tail_page]
                pages += tails
                held.add(len(tails), 1, pinned=point.locks > 0)
                _expect(point.node is node and point.tail == tail, f"{at}: a checkpoint that belongs elsewhere")
                _expect(bool(tail) == bool(tails), f"{at}: tail page {tails} for {num_tokens(tail)} tokens")
                _expect(point.locks == readers.get(point, 0), f"{at}: a checkpoint has {point.locks} locks")
                _expect((not point.locks) == (point in idle), f"{at}: a checkpoint is idle or read, not both")
    _expect(leases.keys() <= nodes and readers.keys() <= points, "a lease pins what is not in the trees")
    _expect(leaves <= nodes and idle <= points, "what is not in the trees is to be evicted")
    _expect(len(set(pages)) == len(pages) and len(set(slots)) == len(slots), "a page or slot stands twice in the trees")
    return held


def _check_node(node: Node, version: int) -> None:
    parent, at = node.parent, f"the node of version {version} at {node.depth} tokens"
    _expect(node.version == version, f"{at} is of version {node.version}")
    if parent is None:
        _expect(not node.key and not node.pages and not node.depth, f"{at} is a root with an edge")
        return
    _expect(node.depth == parent.depth + num_tokens(node.key), f"{at}: {num_tokens(node.key)} tokens on its edge")
    stride, rest = divmod(len(node.key), max(len(node.pages), 1))
    _expect(bool(node.pages) and not rest, f"{at}: {len(node.pages)} pages for {num_tokens(node.key)} tokens")
    _expect(parent.children.get(node.key[:stride]) is node, f"{at} is not where its tokens lead")


def _expect(holds: bool, complaint: str) -> None:
    if not holds:
        raise CacheError(complaint)
