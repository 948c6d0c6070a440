"""Where a prefill stops: chunks that end where a state may be kept. Positions are tokens from the sequence's start."""

from __future__ import annotations

from collections.abc import Iterable


def chunk_ends(start: int, total: int, chunk_tokens: int, block: int, marks: Iterable[int] = ()) -> list[int]:
    """Ends of the chunks that compute tokens `start` to `total`, ascending; the last is `total`.

    No chunk is longer than `chunk_tokens`, and every mark in between is an end. Other chunks go to the last multiple of
    `block` within reach. Where none is, since `chunk_tokens` is shorter than what is left of the block, a chunk ends
    inside it: its state is only carried on.
    """
    if not 0 <= start <= total or chunk_tokens < 1 or block < 1:
        raise ValueError(
            f"can't cut tokens {start} to {total} into chunks of {chunk_tokens}, aligned to {block}; "
            "expected 0 <= start <= total and sizes of at least 1"
        )
    ends, at = [], start
    for stop in [*sorted({mark for mark in marks if start < mark < total}), total]:
        while at < stop:
            reach = at + chunk_tokens
            aligned = reach // block * block
            at = stop if reach >= stop else aligned if aligned > at else reach
            ends.append(at)
    return ends


def state_marks(start: int, total: int, *, block: int, unit: int = 1, fork: int | None = None,
                interval: int | None = None) -> list[int]:  # fmt: skip
    """Positions at which a prefill of `total` tokens should leave a checkpoint, ascending, beyond `start`.

    The fork that the match reported; every `interval` tokens, on block boundaries; and, where the policy keeps states
    at multiples of `unit` only, the last multiples of `block` and `unit` before the last token. A policy that keeps
    them anywhere gets the state of the end itself, which is no stop.
    """
    found = {(total - 1) // block * block, (total - 1) // unit * unit} if unit > 1 else set()
    if fork is not None:
        found.add(fork)
    if interval is not None:
        every = -(-interval // block) * block
        found.update(range((start // every + 1) * every, total, every))
    return sorted(mark for mark in found if start < mark < total)
