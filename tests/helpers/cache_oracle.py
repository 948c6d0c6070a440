"""Plain twins for the prefix caches: memory that knows who owns what, and a cache contract made of two dicts.

Nothing here knows a tree or a hash chain. Content is what bytes would stand for: (version, key of all tokens up to the
end of what was written), so that a page or a state of the wrong version, sequence or length is seen when it's read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from miles_k3.rollout.cache.contract import TOKEN_BYTES, Match, num_tokens

Content = tuple[int, bytes]

POOL, CACHE = -1, -2  # owners; requests are 0 and up


class Shelf:
    """All pages, or all slots. A free id holds nothing, and the one that was freed last is handed out first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner: list[int] = []
        self.content: list[Content | None] = []
        self.free: list[int] = []
        self.cached: set[int] = set()
        self.pins: Counter[int] = Counter()
        self.num_given = 0  # by the cache, since the start

    def take(self, owner: int, content: Content) -> int:
        if not self.free:
            self.owner.append(POOL)
            self.content.append(None)
            self.free.append(len(self.owner) - 1)
        taken = self.free.pop()
        self._move(taken, POOL, owner)
        self.content[taken] = content
        return taken

    def write(self, index: int, owner: int, content: Content) -> None:
        self._move(index, owner, owner)
        self.content[index] = content

    def read(self, index: int) -> Content:
        content = self.content[index]
        assert content is not None, f"{self.name} {index} is free, and was read"
        return content

    def hand_over(self, index: int, owner: int) -> None:
        self._move(index, owner, CACHE)

    def decline(self, index: int, owner: int) -> None:
        self._move(index, CACHE, owner)

    def drop(self, index: int, owner: int) -> None:
        """Back to the pool, poisoned."""
        self._move(index, owner, POOL)
        self.content[index] = None
        self.free.append(index)

    def give(self, indices: Sequence[int]) -> None:
        """The cache gives back."""
        for index in indices:
            assert not self.pins[index], f"{self.name} {index} was given back while {self.pins[index]} leases pin it"
            self.drop(index, CACHE)
            self.num_given += 1

    @property
    def num_pinned(self) -> int:
        return sum(count > 0 for count in self.pins.values())

    @property
    def num_out(self) -> int:
        return sum(owner != POOL for owner in self.owner)

    def _move(self, index: int, old: int, new: int) -> None:
        assert 0 <= index < len(self.owner), f"there is no {self.name} {index}"
        assert self.owner[index] == old, f"{self.name} {index} is owned by {self.owner[index]}, not by {old}"
        self.owner[index] = new
        self.cached.discard(index)
        if new == CACHE:
            self.cached.add(index)


class FakeMemory:
    """`contract.Memory` that rejects a double free, and giving back what a request owns or a lease pins."""

    def __init__(self) -> None:
        self.pages, self.slots = Shelf("page"), Shelf("slot")

    def give_pages(self, pages: Sequence[int]) -> None:
        self.pages.give(pages)

    def give_slots(self, slots: Sequence[int]) -> None:
        self.slots.give(slots)


class CacheOracle:
    """What a cache holds, by brute force. `settle` drops what the cache gave back since the last time."""

    def __init__(self, memory: FakeMemory, page_size: int) -> None:
        self.memory, self.page_size, self.stride = memory, page_size, page_size * TOKEN_BYTES
        self.pages: dict[Content, int] = {}
        self.points: dict[Content, tuple[int, int | None]] = {}
        self._settled = 0

    def settle(self) -> None:
        given = self.memory.pages.num_given + self.memory.slots.num_given
        if given == self._settled:
            return
        self._settled = given
        pages, slots = self.memory.pages.cached, self.memory.slots.cached
        self.pages = {name: page for name, page in self.pages.items() if page in pages}
        self.points = {name: held for name, held in self.points.items() if held[0] in slots}
        self.check_owners()

    def check_owners(self) -> None:
        """All that the cache owns stands for something, once."""
        pages, slots = self.memory.pages.cached, self.memory.slots.cached
        tails = [tail for _, tail in self.points.values() if tail is not None]
        assert sorted([*self.pages.values(), *tails]) == sorted(pages), "a page leaked, or a checkpoint lost its tail"
        assert sorted(slot for slot, _ in self.points.values()) == sorted(slots)

    def page_names(self, version: int, key: bytes) -> Iterator[Content]:
        """Of the full pages of `key`."""
        for end in range(self.stride, len(key) + 1, self.stride):
            yield version, key[:end]

    def usable(self, version: int, key: bytes) -> bool:
        return all(name in self.pages for name in self.page_names(version, key))

    def longest(self, version: int, key: bytes) -> bytes:
        """The longest checkpoint that leaves a token to compute and has all its pages."""
        ends = [point for v, point in self.points if v == version and len(point) < len(key) and key.startswith(point)]
        return max((end for end in ends if self.usable(version, end)), key=len, default=b"")

    def shared(self, version: int, key: bytes, *, tails: bool) -> int:
        """Tokens that `key` has in common with any cached sequence of full pages, or also with checkpoints' tails."""
        names = [*self.pages, *(self.points if tails else ())]
        cached = [path for v, path in names if v == version]
        low, high = 0, num_tokens(key)
        while low < high:
            middle = (low + high + 1) // 2
            common = key[: middle * TOKEN_BYTES]
            if any(path.startswith(common) and self.usable(version, path) for path in cached):
                low = middle
            else:
                high = middle - 1
        return low

    def check_match(self, match: Match, version: int, key: bytes, grain: int) -> None:
        """Everything that `Match` promises. A policy sees forks to `grain` tokens."""
        expected = self.longest(version, key)
        length, position = num_tokens(key), num_tokens(expected)
        assert match.version == version
        assert match.num_tokens == position, f"{match.num_tokens} tokens matched, {position} could be"
        full, rest = divmod(position, self.page_size)
        assert len(match.pages) == full
        assert (match.slot is None) == (position == 0)
        assert (match.tail_page is None) == (rest == 0)
        if match.slot is not None:
            assert self.memory.slots.read(match.slot) == (version, expected)
        ends = range(self.page_size, position + 1, self.page_size)
        for page, end in [*zip(match.pages, ends, strict=True), *([(match.tail_page, position)] if rest else [])]:
            assert page is not None
            self._check_page(page, version, key[: end * TOKEN_BYTES])
        low = self.shared(version, key, tails=False) // grain * grain
        high = self.shared(version, key, tails=True)
        assert max(low, position) <= match.kv_tokens <= high
        if match.fork is not None:
            assert position < match.fork < length
            assert low <= match.fork <= high, f"fork at {match.fork}, shared are {low} to {high}"
        elif position < low < length:
            raise AssertionError(f"{low} of {length} tokens are cached, the state stands at {position}; no fork seen")

    def _check_page(self, page: int, version: int, key: bytes) -> None:
        """The page that ends with the last token of `key` (or goes on after it) holds just these tokens."""
        held_version, held = self.memory.pages.read(page)
        assert held_version == version
        assert held.startswith(key)
        assert (len(held) - 1) // self.stride == (len(key) - 1) // self.stride
