"""Checksums of tensors: the formula in Python's own integers, any change seen, pieces like the whole."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from miles_k3.adapters import checksum
from miles_k3.adapters.checksum import BLOCK_WORDS, checksums, joined_checksum, streamed_checksum, stretch_sums

M64 = (1 << 64) - 1
SIZES = [0, 1, 2, 3, 4, 7, 4 * BLOCK_WORDS - 1, 4 * BLOCK_WORDS, 4 * BLOCK_WORDS + 5, 13 * BLOCK_WORDS + 2]


def mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def reference(data: bytes) -> str:
    words = [int.from_bytes(bytes(w).ljust(4, b"\0"), "little", signed=True) for w in itertools.batched(data, 4)]
    halves = []
    for j in range(2):
        total = 0
        for b, block in enumerate(itertools.batched(words, BLOCK_WORDS)):
            keys = ((mix(j * BLOCK_WORDS + k) >> 32) | 1 for k in range(len(block)))
            total += mix((sum(w * key for w, key in zip(block, keys, strict=True)) + mix(2 * b + j)) & M64)
        halves.append(total & M64)
    return "".join(f"{h:016x}" for h in halves)


def drawn(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def test_the_formula_in_plain_integers() -> None:
    tensors = [drawn(size) for size in SIZES]
    assert checksums(tensors) == [reference(bytes(t.tolist())) for t in tensors]


@pytest.mark.parametrize("cut", [1, 3, 1000, 4 * BLOCK_WORDS, 4 * BLOCK_WORDS + 1, 1 << 20])
def test_pieces_are_the_whole(cut: int) -> None:
    whole = drawn(9 * BLOCK_WORDS + 3)[: 40 * cut]
    assert [streamed_checksum(whole.split(cut))] == checksums([whole])


@pytest.mark.parametrize("size", [6, 1000, 4 * BLOCK_WORDS, 9 * BLOCK_WORDS + 3])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_stretches_add_up_to_the_whole(size: int, parts: int) -> None:
    """Wherever they begin, also within a word or a block, and whoever has summed them up."""
    whole = drawn(size)
    ends = sorted({0, size, *(size * k // parts for k in range(parts)), min(size, 3), size - 1})
    cuts = list(itertools.pairwise(ends))
    found = [(first, sums.numpy()) for first, sums in (stretch_sums(whole[a:b].clone(), a) for a, b in cuts)]
    assert [joined_checksum(found[::-1])] == checksums([whole])
    assert [joined_checksum(found[1:])] != checksums([whole])


def test_dtypes_and_views_are_their_bytes() -> None:
    x = torch.randn(7, 33)
    half = x.bfloat16()
    assert checksums([x.t(), half[1:, 1:], half[0, 1]]) == checksums(
        [t.contiguous().reshape(-1).view(torch.uint8).clone() for t in (x.t(), half[1:, 1:], half[0, 1])]
    )


def test_any_change_is_seen() -> None:
    """Every bit of some words, words and blocks that change places, sums that stay the same."""
    whole = drawn(12 * BLOCK_WORDS)
    seen = {checksums([whole])[0]}
    places = random.Random(0).sample(range(len(whole)), 40)
    for n, place in enumerate(places):
        changed = whole.clone()
        changed[place] ^= 1 << (n % 8)
        seen.add(checksums([changed])[0])
    words = whole.view(torch.int32)
    for a, b in ((0, 1), (5, 5 + BLOCK_WORDS), (0, len(words) - 1)):
        swapped = words.clone()
        swapped[[a, b]] = swapped[[b, a]]
        shifted = words.clone()
        shifted[a] += 1
        shifted[b] -= 1
        seen |= set(checksums([swapped, shifted]))
    seen.add(checksums([words.roll(BLOCK_WORDS)])[0])
    assert len(seen) == 1 + 40 + 6 + 1


def test_what_a_gpu_runs_is_the_same() -> None:
    for size in (0, 8, 4 * BLOCK_WORDS, 4 * 131 * BLOCK_WORDS + 12):
        words = drawn(size).view(torch.int32)
        assert torch.equal(checksum._device_sums(words), torch.from_numpy(checksum._host_sums(words.numpy())))


@pytest.mark.gpu
def test_a_gpu_has_the_same() -> None:
    tensors = [drawn(size) for size in SIZES] + [drawn(40 << 20)]
    assert checksums([t.cuda() for t in tensors]) == checksums(tensors)
