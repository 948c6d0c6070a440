"""The radix policy: a tree of token sequences per adapter version, pages along its edges, state checkpoints at nodes.

An edge holds whole pages. A checkpoint hangs on the node where its last full page ends, under the tokens that follow
that page (its tail), so a prompt may end anywhere. Eviction is least recently used, of checkpoints alone (their KV
stays as a tombstone) or of whole leaves.

Shape legend: keys are int32 bytes, see `contract`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from miles_k3.rollout.cache.contract import TOKEN_BYTES, CacheError, Match, Memory, num_tokens

MAX_CHECKPOINTS = 8  # on one path from the root; beyond it the one that is least worth keeping goes


class Node:
    """The end of an edge. `depth`: tokens from the root to here; `locks`: leases on it or below."""

    __slots__ = ("children", "depth", "key", "locks", "pages", "parent", "points", "version")

    def __init__(self, version: int, parent: Node | None, key: bytes, pages: list[int], depth: int) -> None:
        self.version, self.parent, self.key, self.pages, self.depth = version, parent, key, pages, depth
        self.children: dict[bytes, Node] = {}
        self.points: dict[bytes, Point] = {}
        self.locks = 0

    def path(self) -> Iterator[Node]:
        """From here up, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Point:
    """A state checkpoint, `tail` tokens behind its node's end."""

    __slots__ = ("locks", "node", "slot", "tail", "tail_page")

    def __init__(self, node: Node, tail: bytes, slot: int, tail_page: int | None) -> None:
        self.node, self.tail, self.slot, self.tail_page, self.locks = node, tail, slot, tail_page, 0

    @property
    def position(self) -> int:
        return self.node.depth + num_tokens(self.tail)


@dataclass(slots=True, eq=False)
class RadixLease:
    """`node` is the deepest whose pages are pinned; `point` the checkpoint that was matched."""

    version: int
    node: Node
    point: Point | None
    live: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class _Walk:
    """How far a key goes into the tree: `nodes` that it passes whole, then `shared` bytes of the edge to `beyond`."""

    nodes: list[Node]
    beyond: Node | None
    shared: int

    @property
    def depth(self) -> int:
        return self.nodes[-1].depth + self.shared // TOKEN_BYTES


class RadixCache:
    """Implements `contract.PrefixCache`. Every call costs the nodes on one path, not the cached requests."""

    def __init__(self, memory: Memory, *, page_size: int, max_checkpoints: int = MAX_CHECKPOINTS) -> None:
        self.memory, self.page_size, self.max_checkpoints = memory, page_size, max_checkpoints
        self._stride = page_size * TOKEN_BYTES
        self._roots: dict[int, Node] = {}
        # What may be evicted, least recently used first: leaves that nobody pins, and checkpoints that nobody reads.
        self._leaves: OrderedDict[Node, None] = OrderedDict()
        self._idle: OrderedDict[Point, None] = OrderedDict()
        self._num_pages = self._num_slots = 0
        self.counters: Counter[str] = Counter()

    # --- reading ------------------------------------------------------------------------------------------------
    def match(self, version: int, key: bytes) -> Match:
        root = self._roots.get(version)
        if root is None:
            return Match(version=version, place=self._root(version))
        walk = self._walk(root, key)
        self._touch(walk)
        point = self._deepest_point(walk.nodes, key)
        position = 0 if point is None else point.position
        depth, leaves_edge = walk.depth, walk.beyond is not None or bool(walk.nodes[-1].children)
        # At its end the key is about to be computed to there anyway; a fork is worth a stop before that only.
        fork = depth if position < depth < num_tokens(key) and (leaves_edge or not walk.nodes[-1].points) else None
        self.counters["hit_tokens"] += position
        self.counters["missed_tokens"] += num_tokens(key) - position
        return Match(
            version=version, num_tokens=position, kv_tokens=depth, fork=fork,
            pages=[] if point is None else _pages_of(point.node), slot=point.slot if point else None,
            tail_page=point.tail_page if point else None, place=(walk.nodes[0] if point is None else point.node, point),
        )  # fmt: skip

    def _walk(self, root: Node, key: bytes) -> _Walk:
        nodes, at = [root], 0
        while True:
            child = nodes[-1].children.get(key[at : at + self._stride])
            if child is None:
                return _Walk(nodes, None, 0)
            end = at + len(child.key)
            if key[at:end] != child.key:
                return _Walk(nodes, child, self._common(child.key, key[at:end]))
            nodes.append(child)
            at = end

    def _common(self, edge: bytes, key: bytes) -> int:
        """Bytes of whole pages that both begin with."""
        short = min(len(edge), len(key))
        a, b = (np.frombuffer(x, np.int32, short // TOKEN_BYTES) for x in (edge, key))
        different = a != b
        same = int(different.argmax()) * TOKEN_BYTES if different.any() else short
        return same // self._stride * self._stride

    def _deepest_point(self, nodes: Sequence[Node], key: bytes) -> Point | None:
        """The last checkpoint that stands before the key's last token."""
        limit = len(key) - TOKEN_BYTES
        for node in reversed(nodes):
            at = node.depth * TOKEN_BYTES
            for length in sorted({len(tail) for tail in node.points}, reverse=True) if node.points else ():
                point = node.points.get(key[at : at + length])
                if point is not None and at + length <= limit:
                    return point
        return None

    def _touch(self, walk: _Walk) -> None:
        last = walk.beyond or walk.nodes[-1]
        if last in self._leaves:
            self._leaves.move_to_end(last)
        for node in walk.nodes:
            for point in node.points.values():
                if point in self._idle:
                    self._idle.move_to_end(point)

    # --- leases -------------------------------------------------------------------------------------------------
    def lock(self, match: Match) -> RadixLease:
        node, point = match.place if isinstance(match.place, tuple) else (match.place, None)
        if point is not None:
            point.locks += 1
            self._idle.pop(point, None)
        self._pin(node)
        return RadixLease(match.version, node, point)

    def release(self, lease: RadixLease) -> None:
        self._refuse_dead(lease)
        lease.live = False
        point = lease.point
        if point is not None:
            point.locks -= 1
            if point.locks < 0:
                raise CacheError(f"the checkpoint at {point.position} was unlocked more often than locked")
            if not point.locks:
                self._idle[point] = None
        self._unpin(lease.node)

    def _pin(self, node: Node) -> None:
        for above in node.path():
            above.locks += 1
            self._leaves.pop(above, None)

    def _unpin(self, node: Node) -> None:
        for above in node.path():
            above.locks -= 1
            if above.locks < 0:
                raise CacheError(f"a node at {above.depth} tokens was unlocked more often than locked")
            self._offer(above)

    def _offer(self, node: Node) -> None:
        """Let a leaf that nobody pins be evicted, the last of all."""
        if not node.locks and not node.children and node.parent is not None:
            self._leaves[node] = None

    @staticmethod
    def _refuse_dead(lease: RadixLease) -> None:
        if not lease.live:
            raise CacheError("the lease was released before")

    # --- writing ------------------------------------------------------------------------------------------------
    def extend(self, lease: RadixLease, key: bytes, pages: Sequence[int]) -> list[int]:
        self._refuse_dead(lease)
        if len(key) < len(pages) * self._stride:
            raise CacheError(f"{len(pages)} pages of {self.page_size} tokens for {num_tokens(key)} tokens")
        key, root = key[: len(pages) * self._stride], self._root(lease.version)
        walk = self._walk(root, key)
        end = walk.nodes[-1]
        if walk.beyond is not None and walk.shared:
            end = self._split(walk.beyond, walk.shared)
        known = end.depth // self.page_size
        kept = _pages_of(end)
        doubles = [own for own, cached in zip(pages[:known], kept, strict=True) if own != cached]
        if known < len(pages):
            end = self._add(end, key[known * self._stride :], list(pages[known:]))
        self._pin(end)
        self._unpin(lease.node)
        lease.node = end
        if doubles:
            self.memory.give_pages(doubles)
        return [*kept, *pages[known:]]

    def _add(self, parent: Node, key: bytes, pages: list[int]) -> Node:
        node = Node(parent.version, parent, key, pages, parent.depth + num_tokens(key))
        parent.children[key[: self._stride]] = node
        self._leaves.pop(parent, None)
        self._num_pages += len(pages)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut the edge to `node` after `at` bytes; the new node in between."""
        parent, cut = node.parent, at // self._stride
        assert parent is not None
        upper = Node(node.version, parent, node.key[:at], node.pages[:cut], parent.depth + at // TOKEN_BYTES)
        upper.locks = node.locks
        parent.children[node.key[: self._stride]] = upper
        node.parent, node.key, node.pages = upper, node.key[at:], node.pages[cut:]
        upper.children[node.key[: self._stride]] = node
        return upper

    def checkpoint(self, lease: RadixLease, key: bytes, slot: int, tail_page: int | None = None) -> bool:
        self._refuse_dead(lease)
        full = len(key) // self._stride * self._stride
        tail = key[full:]
        if bool(tail) != (tail_page is not None):
            raise CacheError(f"{num_tokens(tail)} tokens after the last full page, tail page {tail_page}")
        walk = self._walk(self._root(lease.version), key[:full])
        if walk.depth * TOKEN_BYTES != full:
            raise CacheError(f"a checkpoint at {num_tokens(key)}, but pages are handed over to {walk.depth} only")
        node = self._split(walk.beyond, walk.shared) if walk.beyond is not None else walk.nodes[-1]
        if tail in node.points:
            return False
        point = node.points[tail] = Point(node, tail, slot, tail_page)
        self._idle[point] = None
        self._num_slots += 1
        self._num_pages += tail_page is not None
        self._cap(node, point)
        return True

    def _cap(self, node: Node, newest: Point) -> None:
        """Drop checkpoints of a path that has too many: first those where nothing forks, the oldest first."""
        on_path = [p for above in node.path() for p in above.points.values()]
        if len(on_path) <= self.max_checkpoints:
            return
        idle = [p for p in on_path if not p.locks and p is not newest]
        plain = [p for p in idle if len(p.node.children) < 2]
        age = {p: i for i, p in enumerate(self._idle)} if len(idle) > 1 else {}
        for point in sorted(plain or idle, key=lambda p: age.get(p, 0))[: len(on_path) - self.max_checkpoints]:
            self.memory.give_slots([self._drop_point(point)])

    # --- giving back --------------------------------------------------------------------------------------------
    def evict(self, *, pages: int = 0, slots: int = 0) -> tuple[int, int]:
        given_pages: list[int] = []
        given_slots: list[int] = []
        while len(given_slots) < slots and self._idle:
            point = next(iter(self._idle))
            given_slots.append(self._drop_point(point, given_pages))
            self.counters["evicted_slots"] += 1
        while len(given_pages) < pages and self._leaves:
            self._drop_leaf(next(iter(self._leaves)), given_pages, given_slots)
        self._give(given_pages, given_slots)
        return len(given_pages), len(given_slots)

    def forget(self, version: int) -> None:
        root = self._roots.get(version)
        if root is None:
            return
        pages: list[int] = []
        slots: list[int] = []
        for node in list(_postorder(root)):
            for point in [p for p in node.points.values() if not p.locks]:
                slots.append(self._drop_point(point, pages))
            if node in self._leaves:
                self._drop_leaf(node, pages, slots)
        self._give(pages, slots)
        if not root.children and not root.points:
            del self._roots[version]

    def _drop_point(self, point: Point, pages: list[int] | None = None) -> int:
        """Take a checkpoint out; its slot. Its tail page goes into `pages`, or back at once."""
        del self._idle[point]
        del point.node.points[point.tail]
        self._num_slots -= 1
        if point.tail_page is not None:
            self._num_pages -= 1
            if pages is None:
                self.memory.give_pages([point.tail_page])
            else:
                pages.append(point.tail_page)
        return point.slot

    def _drop_leaf(self, leaf: Node, pages: list[int], slots: list[int]) -> None:
        parent = leaf.parent
        assert parent is not None
        for point in list(leaf.points.values()):
            slots.append(self._drop_point(point, pages))
            self.counters["evicted_slots"] += 1
        del self._leaves[leaf]
        del parent.children[leaf.key[: self._stride]]
        pages += leaf.pages
        self._num_pages -= len(leaf.pages)
        self.counters["evicted_pages"] += len(leaf.pages)
        if not parent.locks and not parent.children and parent.parent is not None:
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)  # used no later than the leaf was

    def _give(self, pages: list[int], slots: list[int]) -> None:
        if pages:
            self.memory.give_pages(pages)
        if slots:
            self.memory.give_slots(slots)

    # --- books --------------------------------------------------------------------------------------------------
    def _root(self, version: int) -> Node:
        if version not in self._roots:
            self._roots[version] = Node(version, None, b"", [], 0)
        return self._roots[version]

    def stats(self) -> Mapping[str, int]:
        return {"pages": self._num_pages, "slots": self._num_slots, **self.counters}


def _pages_of(node: Node) -> list[int]:
    """Pages from the root to the node's end."""
    parts = [above.pages for above in node.path()]
    return [page for part in reversed(parts) for page in part]


def _postorder(root: Node) -> Iterator[Node]:
    """Children before parents."""
    stack, found = [root], []
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return reversed(found)
