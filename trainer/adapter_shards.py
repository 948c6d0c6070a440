"""A rank's parts of the exported adapter tensors: named, placed, filled from whole ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from miles_k3.adapters.layout import AdapterTensor, gate_up_pairs, split_name
from miles_k3.adapters.update import key_findings
from miles_k3.errors import AdapterError
from miles_k3.trainer.distributed import Axis, Ranks
from miles_k3.trainer.lora import LoraModule
from miles_k3.trainer.lora_rules import FactorRule, Split
from miles_k3.types import AdapterConfig


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """This rank's part of one exported tensor, as a view: it begins at `start` along `dim` of the whole one.

    `owned`: whether this rank is the one of several with the same part that speaks for it.
    """

    tensor: Tensor
    split: Split
    owned: bool

    @property
    def start(self) -> int:
        return 0 if self.split.dim is None else self.split.axis.rank * self.tensor.shape[self.split.dim]

    def of(self, whole: Tensor) -> Tensor:
        """The same part of another tensor."""
        return whole if self.split.dim is None else whole.narrow(
            self.split.dim, self.start, self.tensor.shape[self.split.dim]
        )  # fmt: skip


def exported_pieces(
    chunks: Iterable[nn.Module], ranks: Ranks, like: Mapping[Parameter, Tensor] | None = None
) -> dict[str, Piece]:
    """Exported name -> this rank's part of it, of its factors or of `like` (parameter -> tensor of its shape)."""
    pieces = {}
    for module in (m for chunk in chunks for m in chunk.modules() if isinstance(m, LoraModule)):
        parameters = dict(module.named_parameters())
        own = {name: p if like is None else like[p] for name, p in parameters.items()}
        for name, (tensor, parameter) in module.exports(own).items():
            rule: FactorRule = vars(parameters[parameter])["factor_rule"]
            pieces[name] = Piece(tensor, Split.of(rule, ranks), _owned(rule, ranks))
    return pieces


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Where this rank's part of an exported tensor lies: `numel` elements of the flattened parameter from `offset` on.

    `shape` and `start`: which box of the whole tensor it is. `copies`: the data-parallel ranks that hold the same;
    `speaks`: whether of tensor-parallel ranks that hold the same too it is this one that counts.
    """

    name: str
    parameter: Parameter
    offset: int
    shape: tuple[int, ...]
    start: tuple[int, ...]
    copies: Axis
    speaks: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def placements(chunks: Iterable[nn.Module], ranks: Ranks) -> list[Placement]:
    """One for each part of a parameter; a tensor that is exported under two names has the first."""
    found: dict[tuple[Parameter, int], Placement] = {}
    for module in (m for chunk in chunks for m in chunk.modules() if isinstance(m, LoraModule)):
        parameters = dict(module.named_parameters())
        shapes = {name: torch.empty(p.shape, device="meta") for name, p in parameters.items()}
        for name, (view, parameter) in module.exports(shapes).items():
            place = _placement(name, view, parameters[parameter], ranks)
            found.setdefault((place.parameter, place.offset), place)
    return list(found.values())


def _placement(name: str, view: Tensor, parameter: Parameter, ranks: Ranks) -> Placement:
    rule: FactorRule = vars(parameter)["factor_rule"]
    split = Split.of(rule, ranks)
    start = Piece(view, split, _owned(rule, ranks)).start
    return Placement(
        name=name, parameter=parameter, offset=int(view.storage_offset()), shape=tuple(view.shape),
        start=tuple(start if dim == split.dim else 0 for dim in range(view.ndim)),
        copies=ranks.expert_dp if rule.per_expert else ranks.dp_cp,
        speaks=rule.per_expert or rule.tp_dim is not None or ranks.tp.rank == 0,
    )  # fmt: skip


def _owned(rule: FactorRule, ranks: Ranks) -> bool:
    if rule.per_expert:
        return ranks.expert_dp.rank == 0
    return ranks.dp_cp.rank == 0 and (rule.tp_dim is not None or ranks.tp.rank == 0)


def load_adapter(
    pieces: Mapping[str, Piece], layout: Mapping[str, AdapterTensor], adapter: AdapterConfig,
    tensors: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """Fill this rank's factors `pieces` from a whole adapter.

    Raises AdapterError, before anything changes, when a tensor is missing, foreign, misshapen or not finite, or when
    gate and up have two A's and the model has room for one.
    """
    problems = [f"the adapter {finding}" for finding in key_findings(tensors, layout)]
    for name in layout.keys() & tensors.keys():
        expected, found = layout[name].shape, tuple(tensors[name].shape)
        if found != expected:
            problems.append(f"{name} has shape {list(found)}, expected {list(expected)}: another model or rank")
        elif not torch.isfinite(tensors[name]).all():
            problems.append(f"{name} holds NaN or infinity")
    if adapter.share_gate_up_a and not problems:
        problems += [
            f"{split_name(gate)[0]} and {split_name(up)[0]} have different A factors but one is trained for both; "
            "set lora.share_gate_up_a: false"
            for gate, up in gate_up_pairs(layout)
            if not torch.equal(tensors[gate], tensors[up])
        ]
    if problems:
        raise AdapterError("\n".join(problems[:20]))
    with torch.no_grad():
        for name, piece in pieces.items():
            piece.tensor.copy_(piece.of(tensors[name]))
