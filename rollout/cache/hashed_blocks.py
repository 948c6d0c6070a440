"""Blocks of tokens under chained hashes, and the order in which they are evicted. Leases are the policy's affair.

A hash stands for an adapter version and all tokens up to a position, chained over pieces of `step` bytes. A block is
believed only when its parent and its tokens are those asked for, so a collision costs a hit and never a wrong one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from miles_k3.rollout.cache.contract import CacheError, num_tokens


def digest_of(data: bytes) -> bytes:
    """128 bits make a collision a curiosity: one in 2^65 for a billion blocks, and then the tokens are compared."""
    return blake2b(data, digest_size=16).digest()


class Block:
    """Up to a page of tokens, ending `end` tokens from the sequence's start. Partial ones always hold a state.

    `locks`: leases on the page, `readers`: leases on the state, `children`: blocks right after it, `shared`: a request
    went on from the state.
    """

    __slots__ = (
        "children", "digest", "end", "locks", "page", "parent", "readers", "shared", "slot", "tokens", "version"
    )  # fmt: skip

    def __init__(self, version: int, parent: Block | None, tokens: bytes, digest: bytes, page: int) -> None:
        self.version, self.parent, self.tokens, self.digest, self.page = version, parent, tokens, digest, page
        self.end = num_tokens(tokens) + (parent.end if parent else 0)
        self.slot: int | None = None
        self.locks = self.readers = self.children = 0
        self.shared = False


@dataclass(slots=True)
class Given:
    """What goes back to the pools."""

    pages: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class BlockStore:
    """Blocks of `stride` bytes, and partial ones.

    What may be evicted, least recently used first: `free` are the blocks that no lease pins, children before their
    parents, and `idle` those with a state that no lease reads.
    """

    def __init__(self, *, stride: int, step: int, digest: Callable[[bytes], bytes]) -> None:
        self.stride, self.step, self._digest = stride, step, digest
        self.table: dict[bytes, Block] = {}
        self.blocks: set[Block] = set()
        self.free: OrderedDict[Block, None] = OrderedDict()
        self.idle: OrderedDict[Block, None] = OrderedDict()
        self.num_slots = 0

    def is_partial(self, block: Block) -> bool:
        return len(block.tokens) < self.stride

    # --- hashes -------------------------------------------------------------------------------------------------
    def seed(self, version: int) -> bytes:
        return self._digest(version.to_bytes(8, "little", signed=True))

    def chain(self, digest: bytes, tokens: bytes) -> list[bytes]:
        """The hashes after each piece of `tokens`, which follow the sequence of `digest`."""
        digests = []
        for at in range(0, len(tokens), self.step):
            digest = self._digest(digest + tokens[at : at + self.step])
            digests.append(digest)
        return digests

    def find(self, digest: bytes, version: int, parent: Block | None, tokens: bytes) -> Block | None:
        """The block of exactly these tokens behind `parent`. A parent outlives its children, so identity will do."""
        block = self.table.get(digest)
        same = block is not None and block.parent is parent and block.version == version and block.tokens == tokens
        return block if same else None

    # --- in and out ---------------------------------------------------------------------------------------------
    def add(self, block: Block) -> Block:
        """Take a block in. Where a foreign one has its hash it is never found, and waits for its eviction."""
        self.table.setdefault(block.digest, block)
        self.blocks.add(block)
        self.free[block] = None
        if block.parent:
            block.parent.children += 1
        return block

    def put_state(self, block: Block, slot: int) -> None:
        block.slot = slot
        self.idle[block] = None
        self.num_slots += 1

    def drop_state(self, block: Block, given: Given) -> None:
        """Take out a state that nobody reads: a partial block goes with it, of a full one the KV stays."""
        if self.is_partial(block):
            self.drop(block, given)
            return
        del self.idle[block]
        self._lose_state(block, given)

    def drop(self, block: Block, given: Given) -> None:
        """Take out a block that nobody pins, with its state."""
        del self.free[block]
        self.blocks.remove(block)
        if self.table.get(block.digest) is block:
            del self.table[block.digest]
        if block.parent:
            block.parent.children -= 1
        given.pages.append(block.page)
        if block.slot is not None:
            del self.idle[block]
            self._lose_state(block, given)

    def _lose_state(self, block: Block, given: Given) -> None:
        assert block.slot is not None
        given.slots.append(block.slot)
        block.slot, block.shared = None, False
        self.num_slots -= 1

    # --- pins ---------------------------------------------------------------------------------------------------
    def pin(self, block: Block) -> None:
        block.locks += 1
        self.free.pop(block, None)

    def unpin(self, block: Block) -> None:
        block.locks -= 1
        if not block.locks:
            self.free[block] = None

    def read(self, block: Block) -> None:
        block.readers += 1
        block.shared = True
        self.idle.pop(block, None)

    def unread(self, block: Block) -> None:
        block.readers -= 1
        if not block.readers:
            self.idle[block] = None

    def touch(self, blocks: Iterable[Block], hit: Block | None) -> None:
        """Make `blocks`, children first, and the state of `hit` the most recently used."""
        if hit in self.idle:
            self.idle.move_to_end(hit)
        for block in blocks:
            if block in self.free:
                self.free.move_to_end(block)

    # --- books --------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise CacheError unless everything agrees with everything."""
        rank = {block: i for i, block in enumerate(self.free)}
        holders = [block for block in self.blocks if block.slot is not None]
        children = dict.fromkeys(self.blocks, 0)
        for block in self.blocks:
            self._check_block(block, rank)
            if block.parent:
                children[block.parent] += 1
        for what, wrong in (
            ("blocks miscount their children", any(block.children != n for block, n in children.items())),
            ("the table names blocks that are gone", not self.blocks.issuperset(self.table.values())),
            ("a page is held twice", len({block.page for block in self.blocks}) != len(self.blocks)),
            ("a slot is held twice", len({block.slot for block in holders}) != len(holders)),
            ("states are miscounted", len(holders) != self.num_slots),
            ("free blocks are those that nobody pins", rank.keys() != {b for b in self.blocks if not b.locks}),
            ("idle states are those that nobody reads", self.idle.keys() != {b for b in holders if not b.readers}),
        ):
            if wrong:
                raise CacheError(what)

    def _check_block(self, block: Block, rank: dict[Block, int]) -> None:
        parent = block.parent
        name = f"the block that ends at {block.end}"
        if block.locks < block.readers or block.readers < 0 or (block.readers and block.slot is None):
            raise CacheError(f"{name} has {block.locks} locks and {block.readers} readers, slot {block.slot}")
        if self.is_partial(block) and (block.slot is None or block.children):
            raise CacheError(f"{name} is partial, with slot {block.slot} and {block.children} children")
        if parent is None:
            return
        if parent not in self.blocks or block.locks > parent.locks:
            raise CacheError(f"{name} is pinned without its parent, or has lost it")
        if block in rank and parent in rank and rank[block] > rank[parent]:
            raise CacheError(f"{name} would be evicted after its parent")
