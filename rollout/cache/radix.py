"""The radix policy: a tree of token sequences per adapter version, pages along its edges, state checkpoints at nodes.

An edge holds whole pages. A checkpoint hangs on the node where its last full page ends, under the tokens that follow
that page (its tail), so a prompt may end anywhere. Eviction is least recently used, of checkpoints alone (their KV
stays as a tombstone) or of whole leaves.

Shape legend: keys are int32 bytes, see `contract`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from miles_k3.rollout.cache.contract import TOKEN_BYTES, CacheError, Match, Memory, num_tokens
from miles_k3.rollout.cache.radix_check import Held, check_trees
from miles_k3.rollout.cache.radix_tree import Node, Point, Walk, pages_of, points_on, postorder, split, walk_down

MAX_CHECKPOINTS = 8  # on one path from the root; beyond it the one that is least worth keeping goes


@dataclass(slots=True, eq=False)
class RadixLease:
    """`node` is the deepest whose pages are pinned; `point` the checkpoint that was matched."""

    version: int
    node: Node
    point: Point | None


class RadixCache:
    """Implements `contract.PrefixCache`. Every call costs the nodes on one path, not the cached requests.

    It sees forks to a whole page.
    """

    checkpoint_unit = 1

    def __init__(self, memory: Memory, *, page_size: int, max_checkpoints: int = MAX_CHECKPOINTS) -> None:
        self.memory, self.page_size, self.max_checkpoints = memory, page_size, max_checkpoints
        self._stride = page_size * TOKEN_BYTES
        self._roots: dict[int, Node] = {}
        self._leases: set[RadixLease] = set()
        # What may be evicted, least recently used first: leaves that nobody pins, and checkpoints that nobody reads.
        self._leaves: OrderedDict[Node, None] = OrderedDict()
        self._idle: OrderedDict[Point, None] = OrderedDict()
        self._held = Held()
        self._clock = 0
        self.counters = Counter(hit_tokens=0, missed_tokens=0, evicted_pages=0, evicted_slots=0)

    # --- reading ------------------------------------------------------------------------------------------------
    def match(self, version: int, key: bytes) -> Match:
        length, root = num_tokens(key), self._roots.get(version)
        if root is None:
            self.counters["missed_tokens"] += length
            return Match(version=version, place=(None, None))
        walk = walk_down(root, key, self._stride)
        points = points_on(walk.nodes, key, self._stride)
        self._touch(walk, points)
        point = next((p for p in reversed(points) if p.position < length), None)
        position, depth = point.position if point else 0, walk.depth
        self.counters["hit_tokens"] += position
        self.counters["missed_tokens"] += length - position
        return Match(
            version=version, num_tokens=position, kv_tokens=max(position, depth),
            # At its end the key is about to be computed to there anyway; a fork is worth a stop before that only.
            fork=depth if position < depth < length else None,
            pages=[] if point is None else pages_of(point.node), slot=point.slot if point else None,
            tail_page=point.tail_page if point else None, place=(point.node if point else root, point),
        )  # fmt: skip

    def _touch(self, walk: Walk, points: Sequence[Point]) -> None:
        self._clock += 1
        last = walk.beyond or walk.nodes[-1]
        last.used = self._clock
        if last in self._leaves:
            self._leaves.move_to_end(last)
        for point in points:
            point.used = self._clock
            if point in self._idle:
                self._idle.move_to_end(point)

    # --- leases -------------------------------------------------------------------------------------------------
    def lock(self, match: Match) -> RadixLease:
        node, point = match.place
        if point is not None:
            if not point.locks:
                self._held.pinned_slots += 1
                self._held.pinned_pages += point.tail_page is not None
            point.locks += 1
            self._idle.pop(point, None)
        lease = RadixLease(match.version, node or self._root(match.version), point)
        self._pin(lease.node)
        self._leases.add(lease)
        return lease

    def release(self, lease: RadixLease) -> None:
        self._refuse_dead(lease)
        self._leases.remove(lease)
        point = lease.point
        if point is not None:
            point.locks -= 1
            if not point.locks:
                self._held.pinned_slots -= 1
                self._held.pinned_pages -= point.tail_page is not None
                self._idle[point] = None
        self._clock += 1
        lease.node.used = self._clock
        self._unpin(lease.node)

    def _pin(self, node: Node) -> None:
        for above in node.path():
            if not above.locks:
                self._held.pinned_pages += len(above.pages)
                self._leaves.pop(above, None)
            above.locks += 1

    def _unpin(self, node: Node) -> None:
        for above in node.path():
            above.locks -= 1
            if above.locks < 0:
                raise CacheError(f"a node at {above.depth} tokens was unlocked more often than locked")
            if not above.locks:
                self._held.pinned_pages -= len(above.pages)
                if not above.children:
                    self._leaves[above] = None

    def _refuse_dead(self, lease: RadixLease) -> None:
        if lease not in self._leases:
            raise CacheError("the lease was released before, or is another cache's")

    # --- writing ------------------------------------------------------------------------------------------------
    def extend(self, lease: RadixLease, key: bytes, pages: Sequence[int]) -> list[int]:
        self._refuse_dead(lease)
        if len(key) < len(pages) * self._stride:
            raise CacheError(f"{len(pages)} pages of {self.page_size} tokens for {num_tokens(key)} tokens")
        key, pages = key[: len(pages) * self._stride], list(pages)
        walk = walk_down(self._root(lease.version), key, self._stride)
        end = split(walk.beyond, walk.shared, self._stride) if walk.beyond is not None else walk.nodes[-1]
        kept = pages_of(end)
        leased, known = lease.node.depth // self.page_size, len(kept)
        if pages[:leased] != kept[:leased] or known < leased:
            raise CacheError(f"the {leased} pages that the lease pins must come first, unchanged, under their tokens")
        doubles = pages[leased:known]
        if known < len(pages):
            end = self._add(end, key[known * self._stride :], pages[known:])
        self._pin(end)
        self._unpin(lease.node)
        lease.node = end
        if doubles:
            self.memory.give_pages(doubles)
        return kept + pages[known:]

    def _add(self, parent: Node, key: bytes, pages: list[int]) -> Node:
        node = Node(parent.version, parent, key, pages, parent.depth + num_tokens(key))
        parent.children[key[: self._stride]] = node
        self._leaves.pop(parent, None)
        self._held.pages += len(pages)
        return node

    def checkpoint(self, lease: RadixLease, key: bytes, slot: int, tail_page: int | None = None) -> bool:
        self._refuse_dead(lease)
        full = len(key) // self._stride * self._stride
        tail = key[full:]
        if not key or bool(tail) != (tail_page is not None):
            raise CacheError(f"{num_tokens(tail)} tokens after the last full page, tail page {tail_page}")
        walk = walk_down(self._root(lease.version), key[:full], self._stride)
        if walk.depth * TOKEN_BYTES != full:
            raise CacheError(f"a checkpoint at {num_tokens(key)}, but pages are handed over to {walk.depth} only")
        nodes = walk.nodes
        if walk.beyond is not None:
            nodes.append(split(walk.beyond, walk.shared, self._stride))
        if tail in nodes[-1].points:
            return False
        point = nodes[-1].points[tail] = Point(nodes[-1], tail, slot, tail_page)
        self._clock += 1
        point.used = self._clock
        self._idle[point] = None
        self._held.slots += 1
        self._held.pages += tail_page is not None
        self._cap(points_on(nodes, key, self._stride), point)
        return True

    def _cap(self, on_path: Sequence[Point], newest: Point) -> None:
        """Drop checkpoints of a path that has too many: first those where nothing forks, the oldest first."""
        excess = len(on_path) - self.max_checkpoints
        if excess <= 0:
            return
        idle = [p for p in on_path if not p.locks and p is not newest]
        plain = [p for p in idle if len(p.node.children) < 2]
        pages: list[int] = []
        slots = [self._drop_point(p, pages) for p in sorted(plain or idle, key=lambda p: p.used)[:excess]]
        self._give(pages, slots)

    # --- giving back --------------------------------------------------------------------------------------------
    def evict(self, *, pages: int = 0, slots: int = 0) -> tuple[int, int]:
        given_pages: list[int] = []
        given_slots: list[int] = []
        while len(given_slots) < slots and self._idle:
            given_slots.append(self._drop_point(next(iter(self._idle)), given_pages))
        while len(given_pages) < pages and self._leaves:
            self._drop_leaf(next(iter(self._leaves)), given_pages, given_slots)
        # What is left are tails behind nodes that a lease pins, or behind the root.
        for point in list(self._idle) if len(given_pages) < pages else ():
            if point.tail_page is not None and len(given_pages) < pages:
                given_slots.append(self._drop_point(point, given_pages))
        self.counters["evicted_pages"] += len(given_pages)
        self.counters["evicted_slots"] += len(given_slots)
        self._give(given_pages, given_slots)
        return len(given_pages), len(given_slots)

    def forget(self, version: int) -> None:
        root = self._roots.get(version)
        if root is None:
            return
        pages: list[int] = []
        slots: list[int] = []
        for node in postorder(root):
            slots += [self._drop_point(point, pages) for point in list(node.points.values()) if not point.locks]
            if node in self._leaves:
                self._drop_leaf(node, pages, slots)
        self._give(pages, slots)
        if not root.children and not root.points:
            del self._roots[version]

    def _drop_point(self, point: Point, pages: list[int]) -> int:
        """Take a checkpoint out; its slot. Its tail page goes into `pages`."""
        del self._idle[point]
        del point.node.points[point.tail]
        self._held.slots -= 1
        if point.tail_page is not None:
            self._held.pages -= 1
            pages.append(point.tail_page)
        return point.slot

    def _drop_leaf(self, leaf: Node, pages: list[int], slots: list[int]) -> None:
        parent = leaf.parent
        assert parent is not None
        slots += [self._drop_point(point, pages) for point in list(leaf.points.values())]
        del self._leaves[leaf]
        del parent.children[leaf.key[: self._stride]]
        pages += leaf.pages
        self._held.pages -= len(leaf.pages)
        if not parent.locks and not parent.children and parent.parent is not None:
            self._leaves[parent] = None
            # Used when the leaf was, unless sequences ended right there since: then as recently as can be.
            self._leaves.move_to_end(parent, last=parent.used > leaf.used)

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
        return {**asdict(self._held), **self.counters}

    def check(self) -> None:
        leases = Counter(node for lease in self._leases for node in lease.node.path())
        readers = Counter(lease.point for lease in self._leases if lease.point is not None)
        held = check_trees(self._roots, leases, readers, leaves=set(self._leaves), idle=set(self._idle))
        if held != self._held:
            raise CacheError(f"the books say {self._held}, the trees hold {held}")
