"""The adapter as it leaves the trainer: whole, or the shard that a rank asks for; hashed alike on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from miles_k3.adapters.layout import AdapterTensor
from miles_k3.adapters.shard import (
    Claim,
    Holding,
    all_experts,
    flat_views,
    held_layout,
    new_flat,
    sums_of,
    whole_sha256,
)
from miles_k3.adapters.update import remember
from miles_k3.errors import MilesError
from miles_k3.trainer.adapter_exchange import Arrival, Wanted, exchange
from miles_k3.trainer.adapter_shards import Piece
from miles_k3.types import AdapterConfig, AdapterUpdate, Shard
from miles_k3.world import World


def export(
    pieces: Mapping[str, Piece], layout: Mapping[str, AdapterTensor], world: World, *, version: int,
    config: AdapterConfig, experts: range | None,
) -> AdapterUpdate:  # fmt: skip
    """The adapter of all ranks' `pieces`, or this rank's shard of it. Collective.

    Ranks may ask for different `experts`, which together are all of them. Raises MilesError, on all ranks, when a part
    is missing, when copies of a factor have drifted apart, or when ranks that should hold the same don't.
    """
    held = all_experts(layout) if experts is None else experts
    like = next(iter(pieces.values())).tensor
    inner = held_layout(layout, held)
    if experts is None:
        flat, tensors = None, {name: like.new_empty(t.shape) for name, t in inner.items()}
    else:
        flat = new_flat(inner, dtype=like.dtype, device=like.device)
        tensors = flat_views(flat, inner)
    arrivals = exchange(pieces, _wanted(tensors, layout, held), world)
    _refuse_missing(arrivals)
    _refuse_drifted(arrivals)
    holding, shares = Holding.of(version, config, tensors, layout, held), world.gather(held)
    sent = {name: piece for name, piece in pieces.items() if piece.owned and layout[name].per_expert}
    claim = Claim.made(
        holding, first=shares.index(held) == world.rank,
        sent=sums_of({n: p.tensor.detach() for n, p in sent.items()}, {n: p.start for n, p in sent.items()}),
    )  # fmt: skip
    sha256 = whole_sha256(layout, holding, world.gather(claim))
    shard = None if flat is None else Shard(experts=held, flat=flat, sha256=holding.sha256)
    update = AdapterUpdate(version=version, config=config, tensors=tensors, sha256=sha256, shard=shard)
    remember(update)
    return update


def whole_tensors(
    pieces: Mapping[str, Piece], layout: Mapping[str, AdapterTensor], world: World
) -> dict[str, Tensor]:  # fmt: skip
    """All of what `pieces` are parts of, gradients for instance, in the layout's order on every rank. Collective."""
    like = next(iter(pieces.values())).tensor
    tensors = {name: like.new_empty(t.shape) for name, t in layout.items()}
    _refuse_missing(exchange(pieces, _wanted(tensors, layout, all_experts(layout)), world))
    return tensors


def _wanted(
    tensors: Mapping[str, Tensor], layout: Mapping[str, AdapterTensor], experts: range
) -> dict[str, Wanted]:  # fmt: skip
    return {name: Wanted(t, experts.start if layout[name].per_expert else 0) for name, t in tensors.items()}


def _refuse_missing(everyone: Sequence[Arrival]) -> None:
    if names := [name for arrival in everyone for name in arrival.short]:
        ranks = [rank for rank, arrival in enumerate(everyone) if arrival.short]
        raise MilesError(
            f"{names[0]} did not come whole to ranks {ranks} ({len(names)} tensors): no rank owns a part of it, or "
            "several own the same; the ranks must be of one layout and one version of miles-k3"
        )


def _refuse_drifted(everyone: Sequence[Arrival]) -> None:
    if names := [name for arrival in everyone for name in arrival.apart]:
        ranks = [rank for rank, arrival in enumerate(everyone) if arrival.apart]
        raise MilesError(
            f"copies of the adapter have drifted apart on ranks {ranks}, first of all {names[0]} ({len(names)} "
            "tensors): a gradient was reduced on some ranks only, or a device computes wrongly; go on from the "
            "last checkpoint with --resume"
        )
