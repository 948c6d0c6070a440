"""A rank's shard of an adapter, and how the sums of all shards make up the hash of the whole.

A rank of an engine needs, of the factors that each routed expert has of its own, those of the experts on its GPU, and
everything else whole. Each rank sums up what it has received; equal shards must have equal sums, and those of different
experts add up to the checksums of whole tensors, so that the update's hash is the one that a single rank computes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_k3.adapters.checksum import hash_table, joined_checksum, stretch_sums
from miles_k3.adapters.layout import AdapterTensor
from miles_k3.errors import AdapterError
from miles_k3.types import AdapterConfig

Sums = tuple[int, NDArray[np.int64]]
_DAMAGED = "it was damaged on the way; the adapters before stay"


def all_experts(layout: Mapping[str, AdapterTensor]) -> range:
    """Those that have factors of their own; none in a model without them."""
    return range(next((t.shape[0] for t in layout.values() if t.per_expert), 0))


def held_layout(layout: Mapping[str, AdapterTensor], experts: range) -> dict[str, AdapterTensor]:
    """The layout of a shard."""
    return {
        name: dataclasses.replace(t, shape=(len(experts), *t.shape[1:])) if t.per_expert else t
        for name, t in layout.items()
    }


def flat_views(flat: Tensor, layout: Mapping[str, AdapterTensor]) -> dict[str, Tensor]:
    """The tensors of `layout`, one after the other in the memory of `flat`."""
    parts = flat.split([math.prod(t.shape) for t in layout.values()])
    return {name: part.view(t.shape) for (name, t), part in zip(layout.items(), parts, strict=True)}


def new_flat(layout: Mapping[str, AdapterTensor], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for the tensors of `layout`."""
    return torch.empty(sum(math.prod(t.shape) for t in layout.values()), dtype=dtype, device=device)


def sums_of(tensors: Mapping[str, Tensor], first_rows: Mapping[str, int]) -> dict[str, Sums]:
    """Name -> the sums of a tensor as the rows from `first_rows[name]` on of a longer one. All lie on one device, which
    is waited for once."""
    if not tensors:
        return {}
    starts = {name: first_rows[name] * (t.numel() // max(1, len(t))) * t.element_size() for name, t in tensors.items()}
    found = [stretch_sums(t, starts[name]) for name, t in tensors.items()]
    together = torch.cat([sums for _, sums in found], dim=1).cpu().numpy()
    ends = np.cumsum([sums.shape[1] for _, sums in found])[:-1]
    parts = np.split(together, ends, axis=1)
    return {name: (first, part) for name, (first, _), part in zip(tensors, found, parts, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holding:
    """What a rank holds of an adapter, by its sums: `table` as the hash takes it, `own` of per-expert factors."""

    version: int
    config: AdapterConfig
    experts: range
    table: Mapping[str, tuple[str, list[int], str]]
    own: Mapping[str, Sums]

    @classmethod
    def of(
        cls, version: int, config: AdapterConfig, tensors: Mapping[str, Tensor], layout: Mapping[str, AdapterTensor],
        experts: range,
    ) -> Holding:  # fmt: skip
        """`layout`: the whole adapter's."""
        sums = sums_of(tensors, {name: experts.start if layout[name].per_expert else 0 for name in tensors})
        return cls(
            version=version, config=config, experts=experts,
            table={n: (str(t.dtype), list(t.shape), joined_checksum([sums[n]])) for n, t in tensors.items()},
            own={name: part for name, part in sums.items() if layout[name].per_expert},
        )  # fmt: skip

    @property
    def sha256(self) -> str:
        """Of a shard: what is held, and which experts' it is."""
        whole = hash_table(self.version, self.config, self.table)
        return hashlib.sha256(f"{whole} {self.experts.start} {self.experts.stop}".encode()).hexdigest()

    @property
    def common(self) -> dict[str, tuple[str, list[int], str]]:
        """What every rank holds."""
        return {name: entry for name, entry in self.table.items() if name not in self.own}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Claim:
    """What a rank tells the others: of its `Holding`, and `sent`, the sums of the per-expert factors that it gave them.

    `own`: those that it holds, where it is the first with these experts.
    """

    of: tuple[int, AdapterConfig]
    experts: range
    common: str
    shard: str
    own: Mapping[str, Sums]
    sent: Mapping[str, Sums]

    @classmethod
    def made(cls, held: Holding, sent: Mapping[str, Sums], *, first: bool) -> Claim:
        return cls(
            of=(held.version, held.config), experts=held.experts, shard=held.sha256,
            common=hash_table(held.version, held.config, held.common), own=held.own if first else {}, sent=sent,
        )  # fmt: skip


def whole_sha256(layout: Mapping[str, AdapterTensor], held: Holding, claims: Sequence[Claim]) -> str:
    """The hash of the whole adapter, the same on every rank, from the ranks' claims.

    Raises AdapterError, on every rank, when ranks that should hold the same do not, when an expert's factors arrived
    otherwise than they were sent, or when the ranks' experts don't make up all of them, each once.
    """
    problems = list(_disagreements(claims, all_experts(layout)))
    table = held.common
    for name in () if problems else held.own:
        arrived = joined_checksum([claim.own[name] for claim in claims if name in claim.own])
        sent = joined_checksum([claim.sent[name] for claim in claims if name in claim.sent])
        table[name] = held.table[name][0], list(layout[name].shape), arrived
        if arrived != sent:
            problems.append(f"arrived with another {name} than was sent: {_DAMAGED}")
    if problems:
        raise AdapterError("\n".join(f"adapter v{held.version} {problem}" for problem in problems))
    return hash_table(held.version, held.config, table)


def _disagreements(claims: Sequence[Claim], experts: range) -> Iterator[str]:
    if ranks := _others([claim.of for claim in claims]):
        of = "; ".join(f"rank {r}: v{claims[r].of[0]}, {claims[r].of[1]}" for r in (0, ranks[0]))
        yield f"is not what all ranks export ({of}): they are at different steps or of different recipes"
        return
    shares = sorted({(claim.experts.start, claim.experts.stop) for claim in claims})
    starts, stops = [start for start, _ in shares], [stop for _, stop in shares]
    if [*starts, experts.stop] != [experts.start, *stops]:
        listed = ", ".join(f"{start}-{stop - 1}" for start, stop in shares)
        yield f"is held by ranks with experts {listed}; expected shares that make up {len(experts)}, each once"
        return
    if ranks := _others([claim.common for claim in claims]):
        yield f"arrived otherwise on ranks {ranks} than on rank 0: {_DAMAGED}"
    for share in shares:
        same = [rank for rank, claim in enumerate(claims) if (claim.experts.start, claim.experts.stop) == share]
        if others := _others([claims[rank].shard for rank in same]):
            ranks = [same[i] for i in others]
            yield f"has other factors of experts on ranks {ranks} than on rank {same[0]}: {_DAMAGED}"


def _others(said: Sequence[object]) -> list[int]:
    """Places of those that differ from the first."""
    return [place for place, one in enumerate(said) if one != said[0]]
