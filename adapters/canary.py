"""The canary: a fixed trajectory that trainer and engine both score after every sync.

If the engine's log-probabilities don't follow the trainer's, the adapter did not arrive, arrived twice or arrived
wrongly scaled, and the run must stop before it samples from stale weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from miles_k3.errors import ConfigError, SyncError
from miles_k3.k3.config import K3Config

# Mean |dlogprob| when sync.canary_max_diff is null. On random tokens bf16 alone puts one implementation 0.04 from fp32
# (tests/golden/README.md) and two of them 0.052 from each other (tiny K3 on an H200): the limit is three times that.
# It is there for gross faults; an adapter that did not arrive is caught by MOVED and FOLLOWED, well below it.
LIMITS = {"float32": 1e-3, "bfloat16": 0.15}
MOVED = 0.01  # a trainer that moved by less than this share of the limit has no movement to follow
FOLLOWED = 0.1  # an engine that moved by less than this share of the trainer's movement did not follow


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """What one check measured, all in nats: |trainer - engine| and each side's mean movement since the last version."""

    version: int
    num_tokens: int
    mean_diff: float
    max_diff: float
    trainer_moved: float | None = None
    engine_moved: float | None = None


def canary_limit(dtype: str, configured: float | None) -> float:
    """The limit on the mean difference: `sync.canary_max_diff`, or the default of the compute dtype."""
    return LIMITS[dtype] if configured is None else configured


def canary_tokens(config: K3Config, length: int, seed: int) -> list[int]:
    """`length` token ids that depend on config and seed alone, without special tokens.

    Besides bos, eos, pad and the media placeholder, everything between them is avoided where they sit together (the
    release keeps its special tokens in one block). Raises ConfigError on a length that leaves nothing to score.
    """
    if not 2 <= length <= config.max_position_embeddings:
        raise ConfigError(
            f"sync.canary_tokens is {length}; expected 2 to {config.max_position_embeddings} "
            "(the first token is never scored)"
        )
    special = {config.bos_token_id, config.eos_token_id, config.pad_token_id}
    placeholder = config.raw.get("media_placeholder_token_id")
    if placeholder is not None:
        special.add(placeholder)
    if max(special) - min(special) < config.vocab_size // 8:
        special = set(range(min(special), max(special) + 1))
    plain = [token for token in range(config.vocab_size) if token not in special]
    draw = random.Random(seed)
    return [plain[int(draw.random() * len(plain))] for _ in range(length)]


def check_canary(
    trainer_logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    *,
    max_diff: float,
    version: int,
    previous_trainer: torch.Tensor | None = None,
    previous_engine: torch.Tensor | None = None,
    elsewhere: Callable[[], float] | None = None,
) -> CanaryReport:
    """Compare both sides' log-probabilities [length - 1] of the trajectory under adapter `version`.

    `previous_*` are the same two of the version before. With both, an engine that stood still while the trainer moved
    is caught even below the limit; with `previous_engine` alone, the trainer's movement is taken from there.
    Where a router rates two experts alike to the last bits, each side may take another one and all that follows
    differs: `elsewhere`, called only then, gives the least mean |difference| on other trajectories. A fault shows
    there, too; a tie does not.
    Raises SyncError when a side is not finite, the mean |difference| is above `max_diff`, or the engine did not follow.
    """
    trainer, engine = (t.detach().double().cpu() for t in (trainer_logprobs, engine_logprobs))
    _judge_inputs(trainer, engine, version)
    diff = (trainer - engine).abs()
    mean = diff.mean().item()
    trainer_moved = engine_moved = None
    problems = []
    if mean > max_diff and not (elsewhere is not None and elsewhere() <= max_diff):
        problems.append(
            f"trainer and engine differ by {mean:.3g} nats a token on the canary, "
            f"limit {max_diff:.3g} (sync.canary_max_diff)"
        )
    if previous_engine is not None:
        before = previous_engine.detach().double().cpu()
        start = before if previous_trainer is None else previous_trainer.detach().double().cpu()
        trainer_moved, engine_moved = ((x - y).abs().mean().item() for x, y in ((trainer, start), (engine, before)))
        floor = max_diff * (1.0 if previous_trainer is None else MOVED)
        if trainer_moved > floor and engine_moved < FOLLOWED * trainer_moved:
            problems.append(
                f"the trainer moved by {trainer_moved:.3g} nats a token since v{version - 1}, the engine by "
                f"{engine_moved:.3g}: it still answers with the old adapter"
            )
    if problems:
        raise SyncError(f"adapter v{version}: " + "; ".join(problems) + "; the run stops, the last checkpoint is whole")
    return CanaryReport(
        version=version, num_tokens=diff.numel(), mean_diff=mean, max_diff=diff.max().item(),
        trainer_moved=trainer_moved, engine_moved=engine_moved,
    )  # fmt: skip


def _judge_inputs(trainer: torch.Tensor, engine: torch.Tensor, version: int) -> None:
    if trainer.dim() != 1 or trainer.shape != engine.shape or not trainer.numel():
        raise SyncError(
            f"adapter v{version}: the canary gave {list(trainer.shape)} log-probabilities from the trainer and "
            f"{list(engine.shape)} from the engine; expected the same number, at least one"
        )
    for side, values in (("trainer", trainer), ("engine", engine)):
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise SyncError(
                f"adapter v{version}: {bad} of {values.numel()} canary log-probabilities of the {side} are not finite"
            )
