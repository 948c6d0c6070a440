"""The tree below the radix policy: whole pages along edges, checkpoints at nodes. Who may be evicted is not its matter.

Shape legend: keys are int32 bytes, see `contract`; `stride` is the bytes of a page's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from miles_k3.rollout.cache.contract import TOKEN_BYTES, num_tokens


class Node:
    """The end of an edge. `depth`: tokens from the root to here; `locks`: leases on it or below.

    `used`: when a sequence last ended here; those that went on to a child don't count.
    """

    __slots__ = ("children", "depth", "key", "locks", "pages", "parent", "points", "used", "version")

    def __init__(self, version: int, parent: Node | None, key: bytes, pages: list[int], depth: int) -> None:
        self.version, self.parent, self.key, self.pages, self.depth = version, parent, key, pages, depth
        self.children: dict[bytes, Node] = {}
        self.points: dict[bytes, Point] = {}
        self.locks = self.used = 0

    def path(self) -> Iterator[Node]:
        """From here up, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Point:
    """A state checkpoint, `tail` tokens behind its node's end."""

    __slots__ = ("locks", "node", "slot", "tail", "tail_page", "used")

    def __init__(self, node: Node, tail: bytes, slot: int, tail_page: int | None) -> None:
        self.node, self.tail, self.slot, self.tail_page = node, tail, slot, tail_page
        self.locks = self.used = 0

    @property
    def position(self) -> int:
        return self.node.depth + num_tokens(self.tail)


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """How far a key goes into the tree: `nodes` that it passes whole, then `shared` bytes of the edge to `beyond`."""

    nodes: list[Node]
    beyond: Node | None
    shared: int

    @property
    def depth(self) -> int:
        return self.nodes[-1].depth + self.shared // TOKEN_BYTES


def walk_down(root: Node, key: bytes, stride: int) -> Walk:
    nodes, at = [root], 0
    while True:
        child = nodes[-1].children.get(key[at : at + stride])
        if child is None:
            return Walk(nodes, None, 0)
        end = at + len(child.key)
        if key[at:end] != child.key:
            return Walk(nodes, child, _common(child.key, key[at:end]) // stride * stride)
        nodes.append(child)
        at = end


def _common(a: bytes, b: bytes) -> int:
    """Bytes of whole tokens that both begin with."""
    short = min(len(a), len(b)) // TOKEN_BYTES
    different = np.frombuffer(a, np.int32, short) != np.frombuffer(b, np.int32, short)
    return (int(different.argmax()) if different.any() else short) * TOKEN_BYTES


def split(node: Node, at: int, stride: int) -> Node:
    """Cut the edge to `node` after `at` bytes; the new node in between, as pinned as the old."""
    parent, cut = node.parent, at // stride
    assert parent is not None
    upper = Node(node.version, parent, node.key[:at], node.pages[:cut], parent.depth + at // TOKEN_BYTES)
    upper.locks, upper.used = node.locks, node.used
    parent.children[node.key[:stride]] = upper
    node.parent, node.key, node.pages = upper, node.key[at:], node.pages[cut:]
    upper.children[node.key[:stride]] = node
    return upper


def points_on(nodes: Sequence[Node], key: bytes, stride: int) -> list[Point]:
    """The checkpoints that `key` passes or ends at, given the nodes that it passes; the deepest last."""
    found = []
    for node in nodes:
        if not node.points:
            continue
        at = node.depth * TOKEN_BYTES
        # Thousands of short prompts may hang on one node; a key passes at most a page's worth of them.
        many = len(node.points) * TOKEN_BYTES > stride
        for length in range(0, stride, TOKEN_BYTES) if many else sorted({len(tail) for tail in node.points}):
            point = node.points.get(key[at : at + length])
            if point is not None and at + length <= len(key):
                found.append(point)
    return found


def pages_of(node: Node) -> list[int]:
    """Pages from the root to the node's end."""
    parts = [above.pages for above in node.path()]
    return [page for part in reversed(parts) for page in part]


def postorder(root: Node) -> Iterator[Node]:
    """Children before parents."""
    stack, found = [root], []
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return reversed(found)
