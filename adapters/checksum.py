"""A 128-bit checksum of a tensor's bytes, computed where the tensor lies: a GPU reads its own memory once and sends 16
bytes for each 256 KiB, where a cryptographic hash would need all of it on the host.

Against damage, not against forgery. Bytes are little-endian words of 32 bits, the last one filled up with zeros; block
b holds the words [b W, (b + 1) W). With odd 32-bit keys K_0, K_1 (multilinear hashing; Carter and Wegman 1979), signed
words and all arithmetic modulo 2^64, for j in {0, 1}:

    s_j[b] = sum over k of word[b W + k] K_j[k]
    c_j    = sum over b of mix(s_j[b] + mix(2 b + j))

`mix` is the finalizer of splitmix64 (Steele et al. 2014). A change of one word always changes both s; any other change
goes unseen with a chance of about 2^-62.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from miles_k3.types import AdapterConfig

BLOCK_WORDS = 1 << 16
_BLOCK_BYTES = 4 * BLOCK_WORDS
_BLOCKS_AT_ONCE = 128  # on a GPU; as int64 they take 64 MiB


def checksums(tensors: Sequence[Tensor]) -> list[str]:
    """Of each dense tensor, 32 hex digits. Waits for each device once."""
    sums = [_block_sums(_words(t)) for t in tensors]
    found: list[NDArray[np.uint64] | None] = [None] * len(sums)
    for device in {s.device for s in sums}:
        places = [i for i, s in enumerate(sums) if s.device == device]
        together = torch.cat([sums[i] for i in places], dim=1).cpu().numpy().view(np.uint64)
        ends = np.cumsum([sums[i].shape[1] for i in places])[:-1]
        for i, part in zip(places, np.split(together, ends, axis=1), strict=True):
            found[i] = part
    return [_combined(s) for s in found if s is not None]


def stretch_sums(tensor: Tensor, start: int = 0) -> tuple[int, Tensor]:
    """(first block, int64 [2, blocks]): what a dense tensor adds to the s_j of a longer one's blocks, as the stretch of
    its bytes that begins at byte `start`. They lie where the tensor does."""
    flat = F.pad(_bytes(tensor), (start % 4, 0)) if start % 4 else _bytes(tensor)  # a word in two parts is their sum
    words, (first, lead) = _words(flat), divmod(start // 4, BLOCK_WORDS)
    if not lead:
        return first, _block_sums(words)
    head, rest = words[: BLOCK_WORDS - lead].long(), words[BLOCK_WORDS - lead :]
    keys = _keys(words.device)[:, lead : lead + len(head)]
    return first, torch.cat([(keys * head).sum(1, keepdim=True), _block_sums(rest)], dim=1)


def joined_checksum(stretches: Iterable[tuple[int, NDArray[np.int64]]]) -> str:
    """The checksum of a tensor from the `stretch_sums`, on the host, of stretches that make it up."""
    found = list(stretches)
    sums = np.zeros((2, max((first + part.shape[1] for first, part in found), default=0)), dtype=np.uint64)
    for first, part in found:
        sums[:, first : first + part.shape[1]] += part.view(np.uint64)
    return _combined(sums)


def streamed_checksum(pieces: Iterable[Tensor]) -> str:
    """The same of a tensor whose bytes come in pieces, in order; one block and one piece are in memory at a time."""
    sums, rest = [], torch.empty(0, dtype=torch.uint8)
    for piece in pieces:
        flat = torch.cat([rest, _bytes(piece)]) if len(rest) else _bytes(piece)
        whole = flat.numel() // _BLOCK_BYTES * _BLOCK_BYTES
        sums.append(_block_sums(_words(flat[:whole])))
        rest = flat[whole:].clone()
    sums.append(_block_sums(_words(rest)))
    return _combined(torch.cat([s.cpu() for s in sums], dim=1).numpy().view(np.uint64))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _words(tensor: Tensor) -> Tensor:
    """int32, a view where the bytes lie so that one is possible."""
    flat = _bytes(tensor)
    if flat.numel() % 4 or flat.data_ptr() % 4 or flat.storage_offset() % 4:
        flat = F.pad(flat, (0, -flat.numel() % 4))
    return flat.view(torch.int32)


def _block_sums(words: Tensor) -> Tensor:
    """int64 [2, blocks]."""
    return torch.from_numpy(_host_sums(words.numpy())) if words.is_cpu else _device_sums(words)


def _device_sums(words: Tensor) -> Tensor:
    keys, whole = _keys(words.device), words.numel() // BLOCK_WORDS * BLOCK_WORDS
    sums = [keys.new_empty(2, 0)]
    for blocks in words[:whole].view(-1, BLOCK_WORDS).split(_BLOCKS_AT_ONCE):
        wide = blocks.long()
        sums.append(torch.stack([(wide * key).sum(1) for key in keys]))
    if whole < words.numel():
        rest = words[whole:].long()
        sums.append((keys[:, : len(rest)] * rest).sum(1, keepdim=True))
    return torch.cat(sums, dim=1)


def _host_sums(words: NDArray[np.int32]) -> NDArray[np.int64]:
    """The same a block at a time in the same two buffers, which stay in a core's cache."""
    keys, wide, products = _keys(torch.device("cpu")).numpy(), *np.empty((2, BLOCK_WORDS), dtype=np.int64)
    sums = np.empty((2, -(-len(words) // BLOCK_WORDS)), dtype=np.int64)
    for b, start in enumerate(range(0, len(words), BLOCK_WORDS)):
        block = words[start : start + BLOCK_WORDS]
        size = len(block)
        wide[:size] = block
        for j, key in enumerate(keys):
            sums[j, b] = np.multiply(wide[:size], key[:size], out=products[:size]).sum()
    return sums


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """int64 [2, words of a block], odd and below 2^32."""
    drawn = _mix(np.arange(2 * BLOCK_WORDS, dtype=np.uint64)).reshape(2, BLOCK_WORDS)
    odd = (drawn >> np.uint64(32)) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _combined(sums: NDArray[np.uint64]) -> str:
    places = np.arange(sums.shape[1], dtype=np.uint64)
    columns = [
        _mix(row + _mix(np.uint64(2) * places + np.uint64(j))).sum(dtype=np.uint64) for j, row in enumerate(sums)
    ]
    return "".join(f"{int(c):016x}" for c in columns)


def hash_table(version: int, config: AdapterConfig, table: Mapping[str, tuple[str, list[int], str]]) -> str:
    """SHA-256 over version, config, and name -> (dtype, shape, checksum of the bytes in row-major order)."""
    digest = hashlib.sha256()
    _hash_fields(digest, [version, config.rank, float(config.alpha), config.share_gate_up_a, len(table)])
    for name in sorted(table):
        _hash_fields(digest, [name, *table[name]])
    return digest.hexdigest()


def _hash_fields(digest: hashlib._Hash, fields: list[object]) -> None:
    text = json.dumps(fields).encode()
    digest.update(len(text).to_bytes(8, "little") + text)
