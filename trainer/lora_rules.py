"""The table of the adapter's factors: how ranks split each of them and what they owe its gradient (spec 5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Site(StrEnum):
    """Kinds of weight that carry factors."""

    O_PROJ = "o_proj"  # KDA and MLA, row-parallel
    LATENT = "latent"  # q_a_proj, kv_a_proj_with_mqa: replicated
    FC1 = "fc1"  # gate and up of the dense and the shared MLP, column-parallel
    FC2 = "fc2"  # their down projection, row-parallel
    EXPERT_FC1 = "expert_fc1"  # w1, w3 of the routed experts
    EXPERT_FC2 = "expert_fc2"  # w2


class Reduction(StrEnum):
    """What a rank's gradient of a factor lacks before data-parallel reduction."""

    NONE = "none"  # the factor is split, or every tensor-parallel rank already holds the whole gradient
    SUM_TP = "sum_tp"  # replicated, each rank saw only its own shard of the output: sum always
    SUM_TP_UNDER_SP = "sum_tp_under_sp"  # replicated, each rank saw only its own tokens under sequence parallel
    SUM_EP = "sum_ep"  # one copy for all experts: sum over the ranks that hold them
    EXPERT_DP = "expert_dp"  # one per expert: data-parallel reduction over the ranks that hold the same experts


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorRule:
    """`tp_dim`: dimension of the factor that tensor parallelism splits; `per_expert`: dimension 0 counts experts."""

    reduction: Reduction
    tp_dim: int | None = None
    per_expert: bool = False


RULES: Mapping[tuple[Site, str], FactorRule] = {
    (Site.O_PROJ, "a"): FactorRule(tp_dim=1, reduction=Reduction.NONE),
    (Site.O_PROJ, "b"): FactorRule(reduction=Reduction.NONE),
    (Site.LATENT, "a"): FactorRule(reduction=Reduction.NONE),
    (Site.LATENT, "b"): FactorRule(reduction=Reduction.NONE),
    (Site.FC1, "a"): FactorRule(reduction=Reduction.SUM_TP),
    (Site.FC1, "b"): FactorRule(tp_dim=0, reduction=Reduction.NONE),
    (Site.FC2, "a"): FactorRule(tp_dim=1, reduction=Reduction.NONE),
    (Site.FC2, "b"): FactorRule(reduction=Reduction.SUM_TP_UNDER_SP),
    (Site.EXPERT_FC1, "a"): FactorRule(reduction=Reduction.SUM_EP),
    (Site.EXPERT_FC1, "b"): FactorRule(per_expert=True, reduction=Reduction.EXPERT_DP),
    (Site.EXPERT_FC2, "a"): FactorRule(per_expert=True, reduction=Reduction.EXPERT_DP),
    (Site.EXPERT_FC2, "b"): FactorRule(reduction=Reduction.SUM_EP),
}
