"""The canary: a few fixed trajectories that trainer and engine both score after every sync.

If the engine's log-probabilities don't follow the trainer's, the adapter did not arrive, arrived twice or arrived
wrongly scaled, and the run must stop before it samples from stale weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.errors import SyncError

# |dlogprob| allowed when sync.canary_max_diff is null. Measured on right answers over 24 steps of the tiny K3: at most
# 1e-5 in float32 and 0.02 in bfloat16, whose 8 bits are rounded at other places by either side.
LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
MOVED = 0.01  # a trainer that moved by less than this share of the limit has no movement to follow
FOLLOWED = 0.1  # an engine that moved by less than this share of the trainer's movement did not follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Both sides' log-probabilities under one version: a tensor [scored tokens] per trajectory."""

    trainer: Sequence[Tensor]
    engine: Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """What one check measured, in nats a token: |trainer - engine|, and each side's movement since the last version."""

    version: int
    num_tokens: int
    median_diff: float
    max_diff: float
    trainer_moved: float | None = None
    engine_moved: float | None = None


def canary_limit(dtype: str, configured: float | None) -> float:
    """The limit on the difference: `sync.canary_max_diff`, or the default of the compute dtype."""
    return LIMITS[dtype] if configured is None else configured


def check_canary(answers: Answers, *, max_diff: float, version: int, previous: Answers | None = None) -> CanaryReport:
    """Compare both sides under adapter `version`; `previous` are their answers under the version before.

    Judged is the median over trajectories of the mean |difference|: where a router rates two experts alike to the last
    bits, each side may take another one and the rest of that trajectory differs; a fault differs on all of them.
    Against `previous`, an engine that stood still while the trainer moved is caught even below the limit.
    Raises SyncError when an answer is not finite, the median is above `max_diff`, or the engine did not follow.
    """
    trainer, engine = _judged(answers, version)
    diffs = [(a - b).abs() for a, b in zip(trainer, engine, strict=True)]
    median = torch.stack([d.mean() for d in diffs]).median().item()
    trainer_moved = engine_moved = None
    problems = []
    if median > max_diff:
        problems.append(
            f"trainer and engine differ by {median:.3g} nats a token on the canary, "
            f"limit {max_diff:.3g} (sync.canary_max_diff)"
        )
    if previous is not None:
        trainer_moved, engine_moved = _movement(trainer, previous.trainer), _movement(engine, previous.engine)
        if trainer_moved > max_diff * MOVED and engine_moved < FOLLOWED * trainer_moved:
            problems.append(
                f"the trainer moved by {trainer_moved:.3g} nats a token since v{version - 1}, the engine by "
                f"{engine_moved:.3g}: it still answers with the old adapter"
            )
    if problems:
        raise SyncError(f"adapter v{version}: " + "; ".join(problems) + "; the run stops, the last checkpoint is whole")
    whole = torch.cat(diffs)
    return CanaryReport(
        version=version, num_tokens=whole.numel(), median_diff=median, max_diff=whole.max().item(),
        trainer_moved=trainer_moved, engine_moved=engine_moved,
    )  # fmt: skip


def _movement(now: Sequence[Tensor], before: Sequence[Tensor]) -> float:
    return (torch.cat(list(now)) - torch.cat([t.detach().double().cpu() for t in before])).abs().mean().item()


def _judged(answers: Answers, version: int) -> tuple[list[Tensor], list[Tensor]]:
    """Both sides in float64 on the host. Raises SyncError unless they are of the same lengths and finite."""
    trainer, engine = ([t.detach().double().cpu() for t in side] for side in (answers.trainer, answers.engine))
    lengths = [[list(t.shape) for t in side] for side in (trainer, engine)]
    if lengths[0] != lengths[1] or not trainer or any(t.dim() != 1 or not t.numel() for t in trainer):
        raise SyncError(
            f"adapter v{version}: the canary gave log-probabilities of shapes {lengths[0][:3]} from the trainer and "
            f"{lengths[1][:3]} from the engine; expected the same, at least one a trajectory"
        )
    for side, tensors in (("trainer", trainer), ("engine", engine)):
        values = torch.cat(tensors)
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise SyncError(
                f"adapter v{version}: {bad} of {values.numel()} canary log-probabilities of the {side} are not finite: "
                "the base weights or the adapter hold NaN, infinity or numbers too large; check the model's files with "
                "their source, or go on from an older checkpoint with a lower trainer.lr"
            )
    return trainer, engine
