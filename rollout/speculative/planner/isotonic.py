"""Least-squares fit that never falls."""

from __future__ import annotations

from collections.abc import Sequence


def isotonic(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The non-decreasing sequence nearest to `values` (pool adjacent violators); weights are > 0."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        mean, total, length = float(value), float(weight), 1
        while blocks and blocks[-1][0] > mean:
            before, its, count = blocks.pop()
            mean = (before * its + mean * total) / (its + total)
            total, length = total + its, length + count
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]
