"""The exported adapter, put together on each rank from the parts that their owners hold, a bucket at a time.

Every bucket goes to all ranks. Each copies out what it wants, whole tensors or those of some experts, and compares what
it has a copy of itself; beside what it wants it needs memory for two buckets.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from miles_k3.trainer.adapter_shards import Piece
from miles_k3.world import PEER_LOST, PeerLostError, World

BUCKET_BYTES = 64 << 20
BUCKETS_ALIVE = 2  # one is on its way while the one before is emptied


@dataclass(frozen=True, slots=True)
class Part:
    """What an owner says of its piece of a tensor: it begins at `start` along `dim` of the whole one."""

    dim: int | None
    start: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, piece: Piece) -> Part:
        return cls(piece.split.dim, piece.start, tuple(piece.tensor.shape))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [begin, end) along dimension 0 of a part of tensor `name`, in a bucket of rank `source`."""

    name: str
    part: Part
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.end - self.begin, *self.part.shape[1:]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where one tensor goes: `tensor` holds rows of the whole one from `first` on."""

    tensor: Tensor
    first: int = 0

    def take(self, rows: Rows, values: Tensor) -> int:
        """Copy what belongs here; how many numbers that were."""
        dim, start = rows.part.dim, rows.part.start
        if dim not in (None, 0):
            self.tensor.narrow(dim, start, values.shape[dim])[rows.begin : rows.end].copy_(values)
            return values.numel()
        at = start + rows.begin - self.first
        low, high = max(at, 0), min(at + len(values), len(self.tensor))
        if low >= high:
            return 0
        self.tensor[low:high].copy_(values[low - at : high - at])
        return self.tensor[low:high].numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a rank has to complain of: names of tensors that did not come whole, and of those of which its own copy has
    other bits than the owner's."""

    short: Sequence[str]
    apart: Sequence[str]


def exchange(
    pieces: Mapping[str, Piece], wanted: Mapping[str, Wanted], world: World, *, bucket_bytes: int | None = None
) -> list[Arrival]:
    """Fill `wanted` from the owners of its tensors; every rank's complaints. Collective.

    `pieces`: this rank's, all of one dtype and on one device. Raises PeerLostError when a rank ends.
    """
    filled, copies = Counter[str](), _Copies(pieces)
    owned = {name: Part.of(piece) for name, piece in pieces.items() if piece.owned}
    like = next(iter(pieces.values())).tensor
    everyone = world.gather(owned)
    numel = (bucket_bytes or BUCKET_BYTES) // like.element_size()
    for rows, values in _travelling(pieces, everyone, world, like, numel):
        if rows.name in wanted:
            filled[rows.name] += wanted[rows.name].take(rows, values)
        copies.compare(rows, values)
    short = [name for name, one in wanted.items() if filled[name] != one.tensor.numel()]
    return world.gather(Arrival(short=short, apart=copies.apart()))


def _travelling(
    pieces: Mapping[str, Piece], everyone: Sequence[Mapping[str, Part]], world: World, like: Tensor, numel: int
) -> Iterator[tuple[Rows, Tensor]]:
    """Everything that is owned, as it comes by; the values are there until the next are asked for."""
    if world.size == 1:
        for rows in (rows for bucket in _buckets(everyone[0], numel) for rows in bucket):
            yield rows, pieces[rows.name].tensor.detach()[rows.begin : rows.end]
        return
    plan = [(source, bucket) for source, parts in enumerate(everyone) for bucket in _buckets(parts, numel)]
    largest = max((_numel(bucket) for _, bucket in plan), default=0)
    slots = [like.new_empty(largest) for _ in range(BUCKETS_ALIVE)]
    coming: deque[tuple[dist.Work, Sequence[Rows], Tensor]] = deque()
    for index, (source, bucket) in enumerate(plan):
        if len(coming) == BUCKETS_ALIVE:
            yield from _unpacked(*coming.popleft())
        values = slots[index % BUCKETS_ALIVE][: _numel(bucket)]
        if source == world.rank:
            for rows, place in _places(bucket, values):
                place.copy_(pieces[rows.name].tensor.detach()[rows.begin : rows.end])
        coming.append((_broadcast(values, source), bucket, values))
    while coming:
        yield from _unpacked(*coming.popleft())


def _broadcast(values: Tensor, source: int) -> dist.Work:
    try:
        work = dist.broadcast(values, src=source, async_op=True)
    except RuntimeError as error:
        raise PeerLostError(PEER_LOST) from error
    assert work is not None
    return work


def _unpacked(work: dist.Work, bucket: Sequence[Rows], values: Tensor) -> Iterator[tuple[Rows, Tensor]]:
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLostError(PEER_LOST) from error
    yield from _places(bucket, values)


def _places(bucket: Sequence[Rows], values: Tensor) -> Iterator[tuple[Rows, Tensor]]:
    for rows, place in zip(bucket, values.split([math.prod(rows.shape) for rows in bucket]), strict=True):
        yield rows, place.view(rows.shape)


def _numel(bucket: Sequence[Rows]) -> int:
    return sum(math.prod(rows.shape) for rows in bucket)


def _buckets(parts: Mapping[str, Part], numel: int) -> Iterator[list[Rows]]:
    """One rank's parts, cut into buckets of at most `numel` numbers, but of a whole row at least."""
    bucket, room = [], numel
    for name, part in parts.items():
        row, begin = math.prod(part.shape[1:]), 0
        while begin < part.shape[0]:
            if bucket and room < row:
                yield bucket
                bucket, room = [], numel
            end = min(part.shape[0], begin + max(1, room // row))
            bucket.append(Rows(name, part, begin, end))
            room, begin = room - (end - begin) * row, end
    if bucket:
        yield bucket


class _Copies:
    """This rank's copies of what others own, compared bit by bit as it comes by; a device is asked at the end."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        self._pieces = {name: piece for name, piece in pieces.items() if not piece.owned}
        self._other: dict[str, list[Tensor]] = {}

    def compare(self, rows: Rows, values: Tensor) -> None:
        piece = self._pieces.get(rows.name)
        if piece is not None and Part.of(piece) == rows.part:
            own = piece.tensor.detach()[rows.begin : rows.end]
            self._other.setdefault(rows.name, []).append((_bits(own) != _bits(values)).any())

    def apart(self) -> list[str]:
        """Names of those that differ."""
        if not self._other:
            return []
        found = torch.stack([torch.stack(flags).any() for flags in self._other.values()]).tolist()
        return [name for name, differs in zip(self._other, found, strict=True) if differs]


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals NaN here: that is another error than drift."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
