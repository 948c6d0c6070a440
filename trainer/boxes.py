"""Rectangular parts of a tensor: what a run of its elements in row-major order consists of, and which parts overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The elements `start[d] .. start[d] + shape[d]` along every dimension d."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shifted(self, by: Sequence[int]) -> Box:
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it lies within a tensor of this shape."""
        return len(shape) == len(self.start) == len(self.shape) and all(
            a >= 0 and n > 0 and a + n <= most for a, n, most in zip(self.start, self.shape, shape, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        """The elements of both."""
        start = tuple(map(max, self.start, other.start))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        if any(end <= a for a, end in zip(start, ends, strict=True)):
            return None
        return Box(start, tuple(end - a for a, end in zip(start, ends, strict=True)))

    def within(self, other: Box) -> tuple[slice, ...]:
        """Where its elements lie in a tensor that holds those of `other`."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.start, other.start, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True)) + "]"


def boxes_of_run(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Elements begin .. end of a tensor in row-major order, as few boxes, in that order; each box is a run itself."""
    if begin >= end:
        return
    if len(shape) == 1:
        yield Box((begin,), (end - begin,))
        return
    inner = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(begin, inner), divmod(end, inner)
    if first == last:
        yield from _in_row(first, shape, skipped, rest)
        return
    if skipped:
        yield from _in_row(first, shape, skipped, inner)
        first += 1
    if last > first:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(last, shape, 0, rest)


def _in_row(row: int, shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    for box in boxes_of_run(shape[1:], begin, end):
        yield Box((row, *box.start), (1, *box.shape))


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The numbers of two boxes that share elements; None where none do.

    Sweeps along the first dimension in which the boxes differ: boxes that tile a tensor meet few others there.
    """
    if not boxes:
        return None
    dims = range(len(boxes[0].start))
    along = next((d for d in dims if len({(box.start[d], box.shape[d]) for box in boxes}) > 1), 0)
    active: list[int] = []
    for i in sorted(range(len(boxes)), key=lambda i: boxes[i].start[along]):
        box = boxes[i]
        active = [j for j in active if boxes[j].start[along] + boxes[j].shape[along] > box.start[along]]
        for j in active:
            if box.overlap(boxes[j]):
                return min(i, j), max(i, j)
        active.append(i)
    return None
