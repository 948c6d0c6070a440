"""An adapter as a stream of bytes, cut into buckets, and put together again at the far end.

All tensors' bytes, one after the other, are the stream. A bucket is a stretch of it, so it may hold many tensors or a
part of one. Whoever receives copies every bucket out into tensors that own their memory; nothing of it is used before
the hash of the whole is right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

from miles_k3.adapters.update import adapter_sha256
from miles_k3.errors import TransportError
from miles_k3.types import AdapterConfig, AdapterUpdate

BUCKETS_ALIVE = 2  # one is filled while the other is emptied
DEFAULT_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a tensor is, without its values; `dtype` as torch spells it, without the `torch.`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is about to come: everything of an AdapterUpdate but its tensors' values, and how they are cut."""

    version: int
    config: AdapterConfig
    sha256: str
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)

    @property
    def num_buckets(self) -> int:
        return -(-self.total_bytes // self.bucket_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest bucket; 1 where there is nothing to send, since no memory can be mapped of size 0."""
        return max(1, min(self.bucket_bytes, self.total_bytes))

    def bucket_length(self, index: int) -> int:
        """Bytes of bucket `index`, which begins at `index * bucket_bytes` of the stream."""
        return min(self.bucket_bytes, self.total_bytes - index * self.bucket_bytes)


def manifest_of(update: AdapterUpdate, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Manifest:
    """What describes `update` to its receiver. Raises ValueError when `bucket_bytes` is below 1."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket holds 1 byte or more")
    specs = tuple(
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in update.tensors.items()
    )
    return Manifest(
        version=update.version, config=update.config, sha256=update.sha256, tensors=specs, bucket_bytes=bucket_bytes
    )


def torch_dtype(name: str) -> torch.dtype:
    """Raises TransportError when torch knows no such type."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TransportError(f"an adapter with a tensor of type {name!r} was announced; this torch knows no such type")
    return dtype


class Stream:
    """The bytes of some tensors, to be read or written by their place in the stream. Tensors stay where they are."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        self._ends = list(accumulate(flat.numel() for flat in self._flat))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, bucket: torch.Tensor) -> None:
        """Fill `bucket`, uint8 [n], with the stream's bytes from `start` on."""
        for flat, place in self._pieces(start, bucket.numel()):
            bucket[place : place + flat.numel()].copy_(flat)

    def write(self, start: int, bucket: torch.Tensor) -> None:
        """Put the bytes of `bucket`, uint8 [n], where the stream has them from `start` on."""
        for flat, place in self._pieces(start, bucket.numel()):
            flat.copy_(bucket[place : place + flat.numel()])

    def _pieces(self, start: int, length: int) -> Iterator[tuple[torch.Tensor, int]]:
        """Stretches of tensors that make up the stream's bytes, each with its place among them."""
        index, place = bisect_right(self._ends, start), 0
        while place < length:
            flat = self._flat[index]
            first = start + place - (self._ends[index] - flat.numel())
            piece = flat[first : first + length - place]
            if piece.numel():
                yield piece, place
            place, index = place + piece.numel(), index + 1


class Outgoing:
    """The buckets of an update at its source."""

    def __init__(self, update: AdapterUpdate, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.manifest = manifest_of(update, bucket_bytes)
        self._stream = Stream(list(update.tensors.values()))

    def fill(self, index: int, slot: torch.Tensor) -> torch.Tensor:
        """Copy bucket `index` to the front of `slot`, uint8; the part of it that the bucket takes."""
        bucket = slot[: self.manifest.bucket_length(index)]
        self._stream.read(index * self.manifest.bucket_bytes, bucket)
        settle(slot)
        return bucket


class Incoming:
    """An update that is being put together from its buckets, which come in order, each once."""

    def __init__(self, manifest: Manifest, device: torch.device | str = "cpu") -> None:
        self.manifest = manifest
        names = {spec.name for spec in manifest.tensors}
        if len(names) != len(manifest.tensors) or manifest.bucket_bytes < 1:
            raise TransportError(
                f"adapter v{manifest.version} was announced with {len(manifest.tensors)} tensors of {len(names)} names "
                f"in buckets of {manifest.bucket_bytes} bytes; names must differ and buckets hold something"
            )
        self._tensors = {
            spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
            for spec in manifest.tensors
        }
        self._stream = Stream(list(self._tensors.values()))
        self._next = 0

    def take(self, index: int, slot: torch.Tensor) -> None:
        """Copy bucket `index` out of the front of `slot`; `slot` is free again afterwards.

        Raises TransportError when another bucket is due.
        """
        if index != self._next or index >= self.manifest.num_buckets:
            due = f"{self._next}" if self._next < self.manifest.num_buckets else "the end"
            raise TransportError(
                f"adapter v{self.manifest.version}: bucket {index} of {self.manifest.num_buckets} came where {due} was "
                "due; one was lost, doubled or out of order"
            )
        self._stream.write(index * self.manifest.bucket_bytes, slot[: self.manifest.bucket_length(index)])
        settle(slot)
        self._next += 1

    def finish(self) -> AdapterUpdate:
        """The whole update. Raises TransportError when buckets are missing or it is not what was announced."""
        manifest, tensors = self.manifest, self._tensors
        if self._next != manifest.num_buckets:
            raise TransportError(
                f"adapter v{manifest.version}: it ended after {self._next} of {manifest.num_buckets} buckets"
            )
        _refuse_other(manifest, tensors)
        return AdapterUpdate(version=manifest.version, config=manifest.config, tensors=tensors, sha256=manifest.sha256)


def _refuse_other(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    found = adapter_sha256(manifest.version, manifest.config, tensors)
    if found != manifest.sha256:
        raise TransportError(
            f"adapter v{manifest.version} arrived with sha256 {found[:12]}..., announced was "
            f"{manifest.sha256[:12]}...: it was damaged on the way, or changed while it was sent; send it again"
        )


def settle(slot: torch.Tensor) -> None:
    """Until the copies in or out of a device's memory are done: the other side does not see this side's stream."""
    if slot.is_cuda:
        torch.cuda.current_stream(slot.device).synchronize()
