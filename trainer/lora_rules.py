"""The table of the adapter's factors: how ranks split each of them and what they owe its gradient.

Shapes and targets: spec 5.1. The reductions follow from where our collectives are (docs/architecture.md):
- A block's input is gathered once and its output reduced once, with the delta added to each rank's partial output
  before that. So a factor that is not split has seen only this rank's heads or channels: its gradient is summed over
  the tensor-parallel ranks.
- The MLA latents' gradients are summed on the way back (copy-to-TP), so their factors already hold the whole. Each rank
  has computed it itself, on a GPU perhaps to another last bit; their mean keeps the copies equal.
- Each rank sees its own tokens of the factors that all experts share. Expert-parallel ranks are tensor-, context- or
  data-parallel ranks, so the sum over those is also the sum over expert parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from miles_k3.trainer.distributed import Axis, Ranks


class Site(StrEnum):
    """Kinds of weight that carry factors."""

    O_PROJ = "o_proj"  # KDA and MLA, row-parallel
    LATENT = "latent"  # q_a_proj, kv_a_proj_with_mqa: replicated
    FC1 = "fc1"  # gate and up of the dense and the shared MLP, column-parallel
    FC2 = "fc2"  # their down projection, row-parallel
    EXPERT_FC1 = "expert_fc1"  # w1, w3 of the routed experts
    EXPERT_FC2 = "expert_fc2"  # w2


class Reduction(StrEnum):
    """What a rank's gradient of a factor lacks before megatron's data-parallel reduction."""

    NONE = "none"  # the factor is split: each rank's gradient is its own
    MEAN_TP = "mean_tp"  # replicated, and each rank has computed the whole gradient
    SUM_TP = "sum_tp"  # replicated, and each rank saw a part of the heads, channels, tokens or experts
    EXPERT_DP = "expert_dp"  # one per expert: data-parallel reduction over the ranks that hold the same experts


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorRule:
    """`tp_dim`: dimension of the factor that tensor parallelism splits; `per_expert`: dimension 0 counts experts."""

    reduction: Reduction
    tp_dim: int | None = None
    per_expert: bool = False


RULES: Mapping[tuple[Site, str], FactorRule] = {
    (Site.O_PROJ, "a"): FactorRule(tp_dim=1, reduction=Reduction.NONE),
    (Site.O_PROJ, "b"): FactorRule(reduction=Reduction.SUM_TP),
    (Site.LATENT, "a"): FactorRule(reduction=Reduction.MEAN_TP),
    (Site.LATENT, "b"): FactorRule(reduction=Reduction.MEAN_TP),
    (Site.FC1, "a"): FactorRule(reduction=Reduction.SUM_TP),
    (Site.FC1, "b"): FactorRule(tp_dim=0, reduction=Reduction.NONE),
    (Site.FC2, "a"): FactorRule(tp_dim=1, reduction=Reduction.NONE),
    (Site.FC2, "b"): FactorRule(reduction=Reduction.SUM_TP),
    (Site.EXPERT_FC1, "a"): FactorRule(reduction=Reduction.SUM_TP),
    (Site.EXPERT_FC1, "b"): FactorRule(per_expert=True, reduction=Reduction.EXPERT_DP),
    (Site.EXPERT_FC2, "a"): FactorRule(per_expert=True, reduction=Reduction.EXPERT_DP),
    (Site.EXPERT_FC2, "b"): FactorRule(reduction=Reduction.SUM_TP),
}


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """How ranks share one tensor: along `dim` over the ranks of `axis`; None for a whole copy on each."""

    dim: int | None
    axis: Axis

    @classmethod
    def of(cls, rule: FactorRule, ranks: Ranks) -> Split:
        if rule.per_expert:
            return cls(0, ranks.ep)
        return cls(rule.tp_dim, ranks.tp) if rule.tp_dim is not None else cls(None, Axis())

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part, as a view."""
        if self.dim is None:
            return whole
        own = self.axis.part(whole.shape[self.dim])
        return whole.narrow(self.dim, own.start, own.stop - own.start)
