"""The adapter's way from trainer to engine, with the proof that it arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from miles_k3.adapters.canary import canary_limit, canary_tokens, check_canary
from miles_k3.adapters.transport import publish
from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.protocols import Engine, Trainer

NUM_SPARE = 2  # trajectories that are scored only when the first one differs


class AdapterSync:
    """Publishes each version and scores one fixed trajectory on both sides; remembers the answers to the last one."""

    def __init__(self, recipe: Recipe, config: K3Config, trainer: Trainer, engine: Engine) -> None:
        self._trainer, self._engine = trainer, engine
        self._tokens, *self._spare = (
            canary_tokens(config, recipe.sync.canary_tokens, recipe.run.seed + i) for i in range(1 + NUM_SPARE)
        )
        self._limit = canary_limit(recipe.model.dtype, recipe.sync.canary_max_diff)
        self._previous: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self) -> Mapping[str, float]:
        """Hand the trainer's adapter over and check it; metrics under `sync/`.

        Raises AdapterError when the engine refuses it and SyncError when the engine's answers do not follow.
        """
        sent = publish(self._trainer.export_adapter(), self._engine)
        ours, theirs = self._score(self._tokens)
        before = self._previous or (None, None)
        report = check_canary(
            ours, theirs, max_diff=self._limit, version=sent.version,
            previous_trainer=before[0], previous_engine=before[1],
            elsewhere=self._least_spare_diff,
        )  # fmt: skip
        self._previous = ours, theirs
        moved = {} if report.trainer_moved is None else {"sync/canary_moved": report.trainer_moved}
        return {
            "sync/version": sent.version,
            "sync/bytes": sent.payload_bytes,
            "sync/load_s": sent.load_s,
            "sync/canary_diff": report.mean_diff,
            **moved,
        }

    def _score(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._trainer.score([tokens])[0], self._engine.score([tokens])[0]

    def _least_spare_diff(self) -> float:
        pairs = [self._score(tokens) for tokens in self._spare]
        return min((ours.double().cpu() - theirs.double().cpu()).abs().mean().item() for ours, theirs in pairs)
