"""One trainer's work under a layout, measured so that two layouts can be compared number by number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from helpers.parity_data import TEMPERATURE, harvests, scored_sequences
from helpers.ranks import CALL_TIMEOUT_S, RankPool
from helpers.tiny import mild_weights, tiny_adapter, tiny_base, tiny_config
from helpers.trainers import ADAPTER
from torch import Tensor

from miles_k3.config import AlgorithmSection, ParallelSection, TrainerSection
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.types import StepStats

# Adam divides by the root of the squared gradient: near a gradient of 0 it turns rounding into whole steps. An eps
# above the smallest gradients keeps every part of its formula and makes the step a smooth function of them. The rate is
# large: three steps move each factor by 1 % to 20 % of its norm, so a bound on the factor is one on the movement.
SECTION: Mapping[str, Any] = {
    "lr": 5e-3, "lr_warmup_steps": 1, "weight_decay": 0.01, "grad_clip": 0.5, "adam_eps": 1e-4,
    "micro_batch_tokens": 96,
}  # fmt: skip
_LAYOUT_ONLY = ("parallel", "recompute", "recompute_sublayers", "distributed_optimizer")  # none may change a number


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of the trainer: `ranks` processes laid out as `parallel` says, and what they work on."""

    name: str
    ranks: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    section: Mapping[str, Any] = field(default_factory=dict)
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    dense: bool = False  # no layer with routed experts
    base_dtype: str = "bf16"
    updates: int = 1  # optimizer steps a harvest
    replay: bool = False  # the batch forces experts
    batches: str = "uneven"  # see parity_data
    dtype: str = "float32"
    cuda: bool = False

    def on_one_rank(self) -> Case:
        """The same work without a layout."""
        section = {name: value for name, value in self.section.items() if name not in _LAYOUT_ONLY}
        return replace(self, name="one rank", ranks=1, parallel={}, section=section)


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What one rank saw."""

    loss: float
    gradients: dict[str, Tensor]
    scores: list[Tensor]
    stats: list[StepStats]
    adapter: dict[str, Tensor]
    scores_after: list[Tensor]  # with what each rank itself holds: copies of a factor that drifted apart show here


def build(case: Case, rank: int) -> MegatronTrainer:
    """The trainer of `case` with a whole random adapter, B included: at B = 0 half of the gradients vanish."""
    config = tiny_config(**({"first_k_dense_replace": 8} if case.dense else {}))
    dtype, device = getattr(torch, case.dtype), f"cuda:{rank}" if case.cuda else "cpu"
    trainer = MegatronTrainer(
        tiny_base(config, mild_weights(config), dtype, case.base_dtype, device), config, adapter=ADAPTER,
        section=TrainerSection(**{**SECTION, **case.section, "parallel": ParallelSection(**case.parallel)}),
        algorithm=AlgorithmSection(**case.algorithm, routing_replay=case.replay), total_steps=100, seed=0,
    )  # fmt: skip
    trainer.load_adapter(tiny_adapter(config, ADAPTER, dtype=torch.float32))
    return trainer


def measure(rank: int, size: int, case: Case) -> Measured:
    """Gradients of the first mini-batch, scores, a step on each harvest, scores again. Collective, on `size` ranks."""
    assert size == case.ranks
    trainer = build(case, rank)
    batches = harvests(case.batches, trainer.config, updates=case.updates, replay=case.replay)
    loss, gradients = trainer.gradients(batches[0].mini_batches[0], temperature=TEMPERATURE)
    gradients = _copies(gradients)
    scores = trainer.score(scored_sequences(), temperature=TEMPERATURE)
    stats = [trainer.step(batch) for batch in batches]
    adapter = _copies(trainer.export_adapter().tensors)
    after = trainer.score(scored_sequences(), temperature=TEMPERATURE)
    return Measured(loss=loss, gradients=gradients, scores=scores, stats=stats, adapter=adapter, scores_after=after)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the host and compact: a pickled view takes its whole storage along."""
    return {name: t.detach().to("cpu", torch.float32, copy=True).contiguous() for name, t in tensors.items()}


class Bench:
    """Measures cases on a pool; what one rank makes of the same work is kept."""

    def __init__(self, pool: RankPool, *, timeout_s: float = CALL_TIMEOUT_S):
        self.pool, self.timeout_s = pool, timeout_s
        self._kept: dict[str, Measured] = {}

    def all_ranks(self, case: Case) -> list[Measured]:
        return self.pool.run(case.ranks, measure, case, timeout_s=self.timeout_s)

    def one_rank(self, case: Case) -> Measured:
        """What one rank makes of the work of `case`."""
        alone = case.on_one_rank()
        if repr(alone) not in self._kept:
            self._kept[repr(alone)] = self.all_ranks(alone)[0]
        return self._kept[repr(alone)]


def differences(found: Measured, wanted: Measured) -> dict[str, float]:
    """Relative differences of all that was measured, by name; infinite where one side has what the other lacks."""
    return dict(_differences(found, wanted))


def _differences(found: Measured, wanted: Measured) -> Iterator[tuple[str, float]]:
    yield "loss", _relative(found.loss, wanted.loss)
    yield from _of_tensors("gradient", found.gradients, wanted.gradients)
    yield from _of_tensors("score", dict(enumerate(found.scores)), dict(enumerate(wanted.scores)))
    for i, (ours, theirs) in enumerate(zip(found.stats, wanted.stats, strict=True)):
        yield f"step {i} loss", _relative(ours.loss, theirs.loss)
        yield f"step {i} grad_norm", _relative(ours.grad_norm, theirs.grad_norm)
        yield f"step {i} lr", _relative(ours.lr, theirs.lr)
        for name in sorted(ours.metrics.keys() | theirs.metrics.keys()):
            pair = ours.metrics.get(name, math.inf), theirs.metrics.get(name, math.inf)
            # A ratio's distance from 1 and a divergence of equals are rounding: they have no relative error.
            yield f"step {i} {name}", abs(pair[0] - pair[1]) / max(abs(pair[1]), 1.0)
    yield from _of_tensors("adapter", found.adapter, wanted.adapter)
    yield from _of_tensors("score after", dict(enumerate(found.scores_after)), dict(enumerate(wanted.scores_after)))


def _of_tensors(kind: str, found: Mapping[Any, Tensor], wanted: Mapping[Any, Tensor]) -> Iterator[tuple[str, float]]:
    for name in dict.fromkeys([*wanted, *found]):
        if name not in found or name not in wanted or found[name].shape != wanted[name].shape:
            yield f"{kind} {name}", math.inf
            continue
        ours, theirs = found[name].double(), wanted[name].double()
        yield f"{kind} {name}", _ratio(float((ours - theirs).norm()), float(theirs.norm()))


def _relative(found: float, wanted: float) -> float:
    return _ratio(abs(found - wanted), abs(wanted))


def _ratio(difference: float, size: float) -> float:
    """What must be exactly 0 has no size to compare with."""
    return 0.0 if difference == 0.0 else difference / size if size else math.inf


def beyond(found: Mapping[str, float], bound: float) -> dict[str, float]:
    """Those above `bound` (NaN is), the worst first."""
    worst = sorted(found.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])
    return {name: value for name, value in worst if not value <= bound}


def check(found: list[Measured], wanted: Measured, bound: float) -> None:
    """Every rank saw the same, and that within `bound` of `wanted`. Raises AssertionError naming the worst."""
    for rank, other in enumerate(found[1:], start=1):
        if apart := beyond(differences(other, found[0]), 0.0):
            raise AssertionError(f"rank {rank} differs from rank 0 in {len(apart)} numbers: {_shown(apart)}")
    if wrong := beyond(differences(found[0], wanted), bound):
        raise AssertionError(f"{len(wrong)} numbers differ by more than {bound:g} from one rank's: {_shown(wrong)}")


def _shown(numbers: Mapping[str, float], most: int = 12) -> str:
    lines = [f"{value:.2e} {name}" for name, value in list(numbers.items())[:most]]
    return "".join("\n  " + line for line in lines) + ("\n  ..." if len(numbers) > most else "")
