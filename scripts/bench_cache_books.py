"""What the prefix cache's bookkeeping costs: µs a token to insert, to match and to evict, while the cache grows.

The scenario is one in which SGLang's radix tree was measured (0.29 to insert, 0.13 to match, on a 2-core CPU): requests
of 552 tokens in 50 families that share a prefix, page size 1, no state checkpoints; --checkpoints adds one at the fork
and one at the end of each. An insert is match, lock, extend and release by a request that computed all of its tokens.
Each size's figures are means over its last, or over drawn, requests. Prints a table; --out writes it as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from miles_k3.rollout.cache.contract import PrefixCache, encode
from miles_k3.rollout.cache.paged import PagedCache
from miles_k3.rollout.cache.radix import RadixCache

VOCAB = 160_000
POLICIES: dict[str, Callable[[Counted, int], PrefixCache]] = {
    "radix": lambda memory, page_size: RadixCache(memory, page_size=page_size),
    "paged": lambda memory, page_size: PagedCache(memory, page_size=page_size),
}


class Counted:
    """Memory without end."""

    def __init__(self) -> None:
        self.pages = self.slots = 0

    def give_pages(self, pages: Sequence[int]) -> None:
        self.pages += len(pages)

    def give_slots(self, slots: Sequence[int]) -> None:
        self.slots += len(slots)


class Load:
    """Requests drawn one after the other, and a cache that they go through."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.draw, self.memory = args, random.Random(args.seed), Counted()
        self.cache = POLICIES[args.policy](self.memory, args.page_size)
        self.prefixes = [self._tokens(args.shared) for _ in range(args.families)]
        self.kept: list[bytes] = []
        self.next_page = self.next_slot = 0

    def _tokens(self, count: int) -> bytes:
        return encode(self.draw.choices(range(VOCAB), k=count))

    def requests(self, count: int) -> list[bytes]:
        own = self.args.tokens - self.args.shared
        return [self.draw.choice(self.prefixes) + self._tokens(own) for _ in range(count)]

    def insert(self, keys: Sequence[bytes]) -> float:
        """CPU seconds for all: others share the machine."""
        total, full = 0.0, self.args.tokens // self.args.page_size
        for key in keys:
            pages = list(range(self.next_page, self.next_page + full))
            self.next_page += full
            begin = time.thread_time()
            match = self.cache.match(0, key)
            lease = self.cache.lock(match)
            pages[: len(match.pages)] = match.pages
            self.cache.extend(lease, key[: full * self.args.page_size * 4], pages)
            for end in (self.args.shared, self.args.tokens) if self.args.checkpoints else ():
                self._checkpoint(lease, key[: end * 4])
            self.cache.release(lease)
            total += time.thread_time() - begin
        return total

    def _checkpoint(self, lease: object, key: bytes) -> None:
        self.next_slot += 1
        tail = len(key) // 4 % self.args.page_size
        self.cache.checkpoint(lease, key, self.next_slot, -self.next_slot if tail else None)

    def match(self, keys: Sequence[bytes]) -> float:
        begin = time.thread_time()
        for key in keys:
            self.cache.match(0, key)
        return time.thread_time() - begin

    def evict(self, pages: int, step: int) -> tuple[float, int]:
        """Seconds and pages, by calls that want `step` pages each."""
        begin, given = time.thread_time(), 0
        while given < pages:
            given += self.cache.evict(pages=step)[0]
        return time.thread_time() - begin, given


def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    load, rows = Load(args), []
    for size in args.requests:
        seconds, keys = 0.0, []
        while len(load.kept) < size:
            keys = load.requests(min(size - len(load.kept), args.window))
            seconds = load.insert(keys)
            load.kept += keys
        sample = load.draw.sample(load.kept, min(args.window, size))
        matching = load.match(sample)
        evicting, given = load.evict(len(sample) * (args.tokens - args.shared) // args.page_size // 4, 64)
        row = {
            "requests": size,
            "insert_us": 1e6 * seconds / (len(keys) * args.tokens),
            "match_us": 1e6 * matching / (len(sample) * args.tokens),
            "evict_us": 1e6 * evicting / (given * args.page_size),
            "pages": load.cache.stats()["pages"],
        }
        print("{requests:>9,} {insert_us:>10.3f} {match_us:>10.3f} {evict_us:>10.3f} {pages:>12,}".format(**row))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=list(POLICIES), default="radix")
    parser.add_argument("--requests", type=int, nargs="+", default=[5_000, 50_000, 200_000], help="rising sizes")
    parser.add_argument("--tokens", type=int, default=552)
    parser.add_argument("--shared", type=int, default=512, help="of them in a family's prefix")
    parser.add_argument("--families", type=int, default=50)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--window", type=int, default=2_500, help="requests that one figure is the mean of")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"{args.policy}, µs a token\n{'requests':>9} {'insert':>10} {'match':>10} {'evict':>10} {'pages held':>12}")
    rows = measure(args)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
