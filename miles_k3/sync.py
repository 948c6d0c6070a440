"""The adapter's way from trainer to engine, with the proof that it arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from miles_k3.adapters.canary import Answers, canary_limit, check_canary
from miles_k3.adapters.transport import SyncReport, publish
from miles_k3.adapters.transport.loan import collect_lent
from miles_k3.config import Recipe
from miles_k3.errors import DataError
from miles_k3.protocols import Engine, Task, Trainer
from miles_k3.rollout.sglang.neighbour import NeighbourEngine
from miles_k3.types import Prompt
from miles_k3.world import ALONE, World

MIN_TRAJECTORIES = 5  # so that a router tie on one or two of them does not move the median


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """What both sides score: whole sequences, each from token `starts[i]` on."""

    sequences: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]

    def scored_by(self, side: Engine | Trainer) -> list[Tensor]:
        """Log-probabilities of each sequence's scored tokens."""
        scores = side.score(self.sequences)
        return [logprobs[start - 1 :] for logprobs, start in zip(scores, self.starts, strict=True)]


class AdapterSync:
    """Publishes each version and has both sides score the canary; remembers the answers to the last one.

    Each rank hands the adapter, or its shard of it with the factors of `experts`, to its own engine and judges that
    one's answers. Collective.
    """

    def __init__(
        self, recipe: Recipe, canary: Canary, trainer: Trainer, engine: Engine, world: World = ALONE,
        experts: range | None = None,
    ) -> None:  # fmt: skip
        self._trainer, self._engine, self._canary, self._world = trainer, engine, canary, world
        self._experts = experts
        self._limit = canary_limit(recipe.model.dtype, recipe.sync.canary_max_diff)
        self._previous: Answers | None = None

    def __call__(self) -> Mapping[str, float]:
        """Hand the trainer's adapter over and check it; metrics under `sync/`, of the rank that is worst off.

        Raises AdapterError when an engine refuses it and SyncError when an engine's answers do not follow.
        """
        scores, sent = self._canary.scored_by(self._trainer), self._hand_over()
        collect_lent()
        told = self._world.everywhere(lambda: self._judged(sent, scores))
        measured = [values for values in told if values is not None]
        return {name: max(values[name] for values in measured) for name in measured[0]}

    def _hand_over(self) -> SyncReport:
        """The update's memory ends with this."""
        update = self._trainer.export_adapter(self._experts)
        # Engines over several ranks talk to one another in there, and fail alike.
        return self._world.together(lambda: publish(update, self._engine))

    def _judged(self, sent: SyncReport, scores: Sequence[Tensor]) -> Mapping[str, float] | None:
        """None of a rank without an engine of its own."""
        if isinstance(self._engine, NeighbourEngine):
            return None
        answers = Answers(trainer=scores, engine=self._canary.scored_by(self._engine))
        report = check_canary(answers, max_diff=self._limit, version=sent.version, previous=self._previous)
        self._previous = answers
        moved = {} if report.trainer_moved is None else {"sync/canary_moved": report.trainer_moved}
        return {
            "sync/version": sent.version,
            "sync/bytes": sent.payload_bytes,
            "sync/load_s": sent.load_s,
            "sync/canary_diff": report.median_diff,
            **moved,
        }


def make_canary(recipe: Recipe, task: Task, tokenizer: Any, end_token: int) -> Canary:
    """Right answers to held-out questions: about `sync.canary_tokens` answer tokens, at least five questions.

    It is what the policy is about, and the same for every process of a run. A task without held-out questions lends
    its first training questions instead; its cursor is put back.
    """
    wanted = recipe.sync.canary_tokens
    num_prompts = max(MIN_TRAJECTORIES, wanted // 2)
    sequences, starts, scored = [], [], 0
    for prompt in _questions(task, num_prompts):
        answer = (*tokenizer.encode(prompt.answer, add_special_tokens=False), end_token)
        answer = answer[: recipe.rollout.sampling.max_new_tokens]
        sequences.append((*prompt.token_ids, *answer))
        starts.append(len(prompt.token_ids))
        scored += len(answer)
        if scored >= wanted and len(sequences) >= MIN_TRAJECTORIES:
            break
    return Canary(sequences=tuple(sequences), starts=tuple(starts))


def _questions(task: Task, count: int) -> Sequence[Prompt]:
    try:
        return task.eval_prompts(count)
    except DataError:
        cursor = task.state_dict()
        prompts = task.next(count)
        task.load_state_dict(cursor)
        return prompts
