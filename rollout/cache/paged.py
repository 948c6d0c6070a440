"""The paged policy: fixed blocks under chained hashes, states at block boundaries, one partial tail a request.

Between boundaries a request leaves one partial block: a state, and the page it stands in, under the hash of that
position. Whoever hits it copies both. When a later state of the request comes, the tail gives way to it.

Shape legend: keys are int32 bytes, see `contract`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miles_k3.rollout.cache.contract import TOKEN_BYTES, CacheError, Match, Memory, num_tokens
from miles_k3.rollout.cache.hashed_blocks import Block, BlockStore, Given, digest_of


@dataclass(slots=True, eq=False)
class PagedLease:
    """`blocks` are the full blocks that are pinned, in order; `read` holds the state that was matched."""

    version: int
    blocks: list[Block]
    read: Block | None
    tail: Block | None = None  # the request's own partial block


class PagedCache:
    """Implements `contract.PrefixCache`, and keeps less than it is offered.

    `checkpoint` declines (False) positions that aren't multiples of `checkpoint_unit`: `hash_block_size` with partial
    tails, the page size without. A request's next tail, or its state at the end of the block that the tail stands in,
    takes the tail's place, unless another request went on from there. A fork is the block boundary below the place
    where sequences part: a shared prefix inside longer prompts is missed until somebody plants a state there.
    """

    def __init__(self, memory: Memory, *, page_size: int, hash_block_size: int | None = None, partial: bool = True,
                 digest: Callable[[bytes], bytes] = digest_of) -> None:  # fmt: skip
        hash_block_size = hash_block_size or page_size
        if page_size % hash_block_size:
            raise ValueError(f"hash_block_size {hash_block_size} does not divide the block of {page_size} tokens")
        self.memory, self.page_size = memory, page_size
        self.checkpoint_unit = hash_block_size if partial else page_size
        self._stride, self._step = page_size * TOKEN_BYTES, hash_block_size * TOKEN_BYTES
        self._store = BlockStore(stride=self._stride, step=self._step, digest=digest)
        self._leases: set[PagedLease] = set()
        self.counters: Counter[str] = Counter(hit_tokens=0, missed_tokens=0, evicted_pages=0, evicted_slots=0)

    # --- reading ------------------------------------------------------------------------------------------------
    def match(self, version: int, key: bytes) -> Match:
        blocks, digests = self._walk(version, key)
        hit = self._deepest_state(blocks, digests, version, key)
        self._store.touch(self._leaf_first(blocks, hit), hit)
        position, depth = hit.end if hit else 0, len(blocks) * self.page_size
        self.counters["hit_tokens"] += position
        self.counters["missed_tokens"] += num_tokens(key) - position
        before = blocks[: position // self.page_size]
        return Match(
            version=version, num_tokens=position, pages=[block.page for block in before],
            slot=hit.slot if hit else None, tail_page=hit.page if hit and self._store.is_partial(hit) else None,
            kv_tokens=max(depth, position), fork=depth if position < depth < num_tokens(key) else None,
            place=(before, hit),
        )  # fmt: skip

    def _walk(self, version: int, key: bytes) -> tuple[list[Block], list[bytes]]:
        """The full blocks that `key` begins with, and its hashes to the end of the first that is missing."""
        blocks: list[Block] = []
        digest = self._store.seed(version)
        digests: list[bytes] = []
        whole = len(key) // self._step * self._step
        for at in range(0, whole, self._stride):
            tokens = key[at : min(at + self._stride, whole)]
            digests += self._store.chain(digest, tokens)
            digest = digests[-1]
            block = self._store.find(digest, version, blocks[-1] if blocks else None, tokens)
            if block is None or len(tokens) < self._stride:
                break
            blocks.append(block)
        return blocks, digests

    def _deepest_state(self, blocks: Sequence[Block], digests: Sequence[bytes], version: int, key: bytes
                       ) -> Block | None:  # fmt: skip
        """The last state before the key's last token."""
        table, last = self._store.table, max(len(key) - TOKEN_BYTES, 0) // self._step
        for i in range(min(len(digests), last), 0, -1):
            found = table.get(digests[i - 1])
            if found is None or found.slot is None:
                continue
            end = i * self._step
            before = (end - TOKEN_BYTES) // self._stride
            parent = blocks[before - 1] if before else None
            if self._store.find(digests[i - 1], version, parent, key[before * self._stride : end]):
                return found
        return None

    def _leaf_first(self, blocks: Sequence[Block], read: Block | None) -> list[Block]:
        """`blocks` from the last to the first, before them the partial block that is read."""
        return [*([read] if read and self._store.is_partial(read) else ()), *reversed(blocks)]

    # --- leases -------------------------------------------------------------------------------------------------
    def lock(self, match: Match) -> PagedLease:
        blocks, read = match.place
        if read is not None:
            if read not in self._store.blocks or read.slot != match.slot:
                raise CacheError(f"the state at {match.num_tokens} is gone: lock a match before anything else changes")
            self._store.read(read)
        lease = PagedLease(match.version, list(blocks), read)
        for block in self._leaf_first(blocks, read):
            self._store.pin(block)
        self._leases.add(lease)
        return lease

    def release(self, lease: PagedLease) -> None:
        self._refuse_dead(lease)
        self._leases.remove(lease)
        if lease.read is not None:
            self._store.unread(lease.read)
        for block in self._leaf_first(lease.blocks, lease.read):
            self._store.unpin(block)

    def _refuse_dead(self, lease: PagedLease) -> None:
        if lease not in self._leases:
            raise CacheError("the lease was released before, or is another cache's")

    def _refuse_foreign(self, lease: PagedLease, key: bytes) -> None:
        """Raise when `key` went another way than the lease; the last block that both have is looked at."""
        common = min(len(lease.blocks), len(key) // self._stride)
        if common and lease.blocks[common - 1].tokens != key[(common - 1) * self._stride : common * self._stride]:
            raise CacheError(f"the key differs from the leased tokens before {common * self.page_size}")

    # --- writing ------------------------------------------------------------------------------------------------
    def extend(self, lease: PagedLease, key: bytes, pages: Sequence[int]) -> list[int]:
        self._refuse_dead(lease)
        if len(key) < len(pages) * self._stride:
            raise CacheError(f"{len(pages)} pages of {self.page_size} tokens for {num_tokens(key)} tokens")
        self._refuse_foreign(lease, key)
        kept = [block.page for block in lease.blocks[: len(pages)]]
        if kept != list(pages[: len(kept)]):
            raise CacheError(f"pages {list(pages[: len(kept)])} in place of the leased {kept}")
        doubles = []
        for i in range(len(kept), len(pages)):
            tokens = key[i * self._stride : (i + 1) * self._stride]
            parent = lease.blocks[-1] if lease.blocks else None
            digest = self._digest_after(lease, parent, tokens)
            block = self._store.find(digest, lease.version, parent, tokens)
            if block is None:
                block = self._store.add(Block(lease.version, parent, tokens, digest, pages[i]))
            else:
                doubles.append(pages[i])  # also where it is the cached one, held once more for the cache
            self._store.pin(block)
            lease.blocks.append(block)
            kept.append(block.page)
        self._give(Given(pages=doubles))
        return kept

    def _digest_after(self, lease: PagedLease, parent: Block | None, tokens: bytes) -> bytes:
        return self._store.chain(parent.digest if parent else self._store.seed(lease.version), tokens)[-1]

    def checkpoint(self, lease: PagedLease, key: bytes, slot: int, tail_page: int | None = None) -> bool:
        self._refuse_dead(lease)
        self._refuse_foreign(lease, key)
        count = len(key) // self._stride
        tail = key[count * self._stride :]
        if not key or bool(tail) != (tail_page is not None):
            raise CacheError(f"{num_tokens(tail)} tokens after the last full page, tail page {tail_page}")
        if count > len(lease.blocks):
            raise CacheError(f"a checkpoint at {num_tokens(key)}, but {len(lease.blocks)} pages are handed over only")
        if num_tokens(key) % self.checkpoint_unit:
            return False
        parent = lease.blocks[count - 1] if count else None
        if tail_page is None:
            block = parent
        else:
            digest = self._digest_after(lease, parent, tail)
            if digest in self._store.table:
                return False
            block = self._store.add(Block(lease.version, parent, tail, digest, tail_page))
        assert block is not None
        if block.slot is not None:
            return False
        self._store.put_state(block, slot)
        self._retire_tail(lease, block)
        return True

    def _retire_tail(self, lease: PagedLease, newer: Block) -> None:
        """The request's tail gives way to the next one, or is promoted: `newer` holds the state at its block's end."""
        old, partial = lease.tail, self._store.is_partial(newer)
        if old is not None and (partial or old.parent is newer.parent):
            lease.tail = None
            if old in self._store.blocks and not old.shared:
                given = Given()
                self._store.drop(old, given)
                self._give(given)
        if partial:
            lease.tail = newer

    # --- giving back --------------------------------------------------------------------------------------------
    def evict(self, *, pages: int = 0, slots: int = 0) -> tuple[int, int]:
        given, store = Given(), self._store
        while len(given.slots) < slots and store.idle:
            store.drop_state(next(iter(store.idle)), given)
        while len(given.pages) < pages and store.free:
            store.drop(next(iter(store.free)), given)
        self.counters["evicted_pages"] += len(given.pages)
        self.counters["evicted_slots"] += len(given.slots)
        self._give(given)
        return len(given.pages), len(given.slots)

    def forget(self, version: int) -> None:
        given, store = Given(), self._store
        for block in [block for block in store.free if block.version == version]:
            store.drop(block, given)
        for block in [block for block in store.idle if block.version == version]:
            store.drop_state(block, given)
        self._give(given)

    def _give(self, given: Given) -> None:
        if given.pages:
            self.memory.give_pages(given.pages)
        if given.slots:
            self.memory.give_slots(given.slots)

    # --- books --------------------------------------------------------------------------------------------------
    def stats(self) -> Mapping[str, int]:
        store = self._store
        return {
            "pages": len(store.blocks), "slots": store.num_slots, "pinned_pages": len(store.blocks) - len(store.free),
            "pinned_slots": store.num_slots - len(store.idle), **self.counters,
        }  # fmt: skip

    def check(self) -> None:
        self._store.check()
        locks: Counter[Block] = Counter()
        readers: Counter[Block] = Counter()
        for lease in self._leases:
            locks.update(self._leaf_first(lease.blocks, lease.read))
            readers.update([lease.read] if lease.read else [])
        for block in self._store.blocks:
            if (block.locks, block.readers) != (locks[block], readers[block]):
                raise CacheError(
                    f"the block that ends at {block.end} has {block.locks} locks and {block.readers} readers; "
                    f"leases account for {locks[block]} and {readers[block]}"
                )
