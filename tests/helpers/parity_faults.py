"""Mistakes to plant into the trainer of one rank, or of all: each is a context entered in a worker.

A fault is made at the seam where such a mistake would be made, so it follows the trainer's code; one whose seam has
gone fails with AttributeError: plant it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import helpers.parity as parity
import torch
from helpers.parity import Case, Measured
from torch import Tensor

from miles_k3.trainer import adapter_export, build, lora, megatron
from miles_k3.trainer.lora_rules import FactorRule, Reduction, Site
from miles_k3.trainer.model import expert_parallel, mla, mla_context, stage, state_handover

Fault = Callable[[int], AbstractContextManager[Any]]


def measure_with(rank: int, size: int, case: Case, name: str) -> Measured:
    """`parity.measure` under the fault of that name, without the trainer's own look at its copies (`test_drift`)."""
    with FAULTS[name](rank), patch.object(adapter_export, "_refuse_drifted", lambda everyone: None):
        return parity.measure(rank, size, case)


def _wrapped(owner: Any, name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`owner.name` becomes `change(original, *args, **kwargs)`."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def _result(owner: Any, name: str, change: Callable[[Any], Any]) -> Fault:
    """What `owner.name` gives goes through `change`."""
    return lambda rank: _wrapped(owner, name, lambda original, *a, **k: change(original(*a, **k)))


def _on(culprit: int, fault: Fault, other: Fault) -> Fault:
    return lambda rank: fault(rank) if rank == culprit else other(rank)


def _nothing(rank: int) -> AbstractContextManager[Any]:
    return patch.dict({})


def _rule(site: Site, letter: str, reduction: Reduction) -> Fault:
    rules: Any = lora.RULES
    return lambda rank: patch.dict(rules, {(site, letter): replace(rules[site, letter], reduction=reduction)})


def _marked(**attributes: bool) -> Fault:
    """Megatron is told something else of the factors that are split over ranks."""

    def change(original: Callable[..., None], parameter: Any, rule: FactorRule) -> None:
        original(parameter, rule)
        if rule.per_expert or rule.tp_dim is not None:
            vars(parameter).update(attributes)

    return lambda rank: _wrapped(lora, "mark", change)


def _scaled(factor: float, ends: tuple[str, ...] = ("",)) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n: (t * factor).to(t.dtype) if n.endswith(ends) else t for n, t in tensors.items()}


def _detached_bank(parts: tuple[Tensor, tuple[Tensor, ...]]) -> tuple[Tensor, tuple[Tensor, ...]]:
    return parts[0], tuple(row.detach() for row in parts[1])


def _only_own_rows(original: Callable[..., Tensor], self: Any, x: Tensor) -> Tensor:
    """Rows that other ranks compute earn no gradient."""
    start = sum(self.send_counts[: self.ep.rank])
    own = slice(start, start + self.send_counts[self.ep.rank])
    there = x.detach()
    return original(self, torch.cat([there[: own.start], x[own], there[own.stop :]]))


def _turned_copies(original: Callable[[Any], None], parameters: Any) -> None:
    """After the reduction, this rank's copies of factors go the other way."""
    original(parameters)
    for parameter in parameters:
        if parameter.factor_rule.tp_dim is None and not parameter.factor_rule.per_expert:
            parameter.main_grad.neg_()


FAULTS: dict[str, Fault] = {
    **{
        f"{site} {letter} not summed": _rule(site, letter, Reduction.NONE)
        for site, letter in (
            (Site.O_PROJ, "b"), (Site.FC1, "a"), (Site.FC2, "b"), (Site.EXPERT_FC1, "a"), (Site.EXPERT_FC2, "b")
        )
    },
    "latent a summed twice": _rule(Site.LATENT, "a", Reduction.SUM_TP),
    "experts summed like dense factors": _marked(allreduce=True),
    "split factors counted once in the norm": _marked(tensor_model_parallel=False),
    "rank 1 has another base": _on(
        1, _result(parity, "mild_weights", _scaled(1.02, ("layers.5.self_attn.o_proj.weight",))), _nothing
    ),
    "rank 1 has another adapter": _on(1, _result(parity, "tiny_adapter", _scaled(1.01, ("lora_B.weight",))), _nothing),
    "rank 1 has another batch": _on(
        1,
        lambda rank: _wrapped(parity, "harvests", lambda original, kind, *a, **k: original("few", *a, **k)[:1]),
        _nothing,
    ),
    "rank 1 tells another loss": _on(
        1, _result(megatron.MegatronTrainer, "step", lambda stats: replace(stats, loss=stats.loss + 1e-9)), _nothing
    ),
    "copies part on rank 1": _on(1, lambda rank: _wrapped(build, "_reduce_over_tp", _turned_copies), _nothing),
    "another rate": _result(megatron, "learning_rate", lambda rate: rate * 1.001),
    "another denominator": lambda rank: _wrapped(
        megatron, "policy_loss", lambda original, *a, **k: original(*a, **{**k, "num_loss_tokens": 50})
    ),
    "a mean of means": _result(
        megatron, "finalize_metrics", lambda found: {**found, "mismatch_abs": found["mismatch_abs"] * 1.001}
    ),
    "no state from the rank before": _result(
        state_handover.StateHandover, "incoming", lambda state: None if state is None else torch.zeros_like(state)
    ),
    "no gradient from the rank behind": _result(
        state_handover.StateHandover, "outgoing", lambda grad: None if grad is None else torch.zeros_like(grad)
    ),
    "keys of other ranks earn no gradient": _result(mla_context, "gather_context", Tensor.detach),
    "the extra key not copied to the ranks": lambda rank: _wrapped(mla, "shared", lambda _, x, ranks: x),
    "a replicated use counted on each rank": lambda rank: _wrapped(mla, "replicated", lambda _, x, ranks: x),
    "the bank earns no gradient over a stage's edge": _result(stage, "unpack_boundary", _detached_bank),
    "sent rows earn no gradient": lambda rank: _wrapped(expert_parallel.ExpertExchange, "send", _only_own_rows),
}  # fmt: skip
