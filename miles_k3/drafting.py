"""Offline training of a draft for a recipe's policy, or a run's: sample, compute taps, train, measure, write.

FOLDER/settings.json        what the draft is trained on and how
       samples.jsonl        the policy's answers, sampled once
       metrics.jsonl        a line every tenth step
       checkpoints/         weights and optimizer; whole or absent
       draft/               the trained draft, in the layout of the published ones
       acceptance.json      what the policy accepts on held-out prompts
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from miles_k3.adapters.peft_io import load_peft
from miles_k3.adapters.transport import publish
from miles_k3.adapters.update import make_update
from miles_k3.assemble import load_engine
from miles_k3.config import Recipe
from miles_k3.errors import ConfigError, DataError
from miles_k3.files import FolderLock, remove_tree, write_text
from miles_k3.k3.config import K3Config
from miles_k3.k3.draft_config import DraftConfig
from miles_k3.launch import refuse_other_engine
from miles_k3.metrics import MetricsLog
from miles_k3.rollout.collect import request_seed
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.speculative.blocks import Example
from miles_k3.rollout.speculative.draft import DraftModel
from miles_k3.rollout.speculative.draft_eval import Acceptance, measure_acceptance
from miles_k3.rollout.speculative.draft_io import read_draft, write_draft
from miles_k3.rollout.speculative.draft_train import DraftTrainer, DraftTraining, initial_weights
from miles_k3.rollout.speculative.taps import target_states
from miles_k3.rollout.tasks.registry import GradedTask, make_task
from miles_k3.run_folder import RunFolder
from miles_k3.types import Completion, FinishReason, SamplingParams
from miles_k3.world import ALONE

log = logging.getLogger(__name__)

SETTINGS, SAMPLES, ACCEPTANCE = "settings.json", "samples.jsonl", "acceptance.json"
LOG_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What is trained on what. `past_stop`: answers go on behind their end, to the recipe's limit of new tokens.

    `start`: a draft to go on from; None makes a small new one. `save_every`: steps between checkpoints.
    """

    training: DraftTraining
    num_prompts: int
    group_size: int
    eval_prompts: int
    past_stop: bool
    start: str | None
    save_every: int


def train_draft(recipe: Recipe, adapter: Path | None, out: Path, plan: DraftPlan, *, resume: bool) -> dict[str, Any]:
    """Train into `out`; with `resume`, go on with what is there. Returns the content of acceptance.json.

    Raises ConfigError when `out` holds something else, or was begun with other settings.
    """
    refuse_other_engine(recipe, "draft train", "learns from hidden states that only the embedded engine hands out")
    settings = {
        "model": recipe.model.path, "adapter": str(adapter) if adapter else None, "task": recipe.task.model_dump(),
        "max_new_tokens": recipe.rollout.sampling.max_new_tokens, "run_seed": recipe.run.seed, **asdict(plan),
    }  # fmt: skip
    lock = _take(out, json.loads(json.dumps(settings)), resume)
    try:
        engine = load_engine(recipe, ALONE)
        try:
            return _Drafting(recipe, adapter, engine, RunFolder(out, recipe, None), plan).run()
        finally:
            engine.close()
    finally:
        if not resume and not (out / SAMPLES).exists():  # nothing was begun: the folder can be asked for again
            (out / SETTINGS).unlink(missing_ok=True)
        lock.release()


def new_draft_config(target: K3Config) -> DraftConfig:
    """A draft in the proportions of the published one, for a target of any size."""
    h, depth = target.hidden_size, target.num_hidden_layers
    head_dim = 64 if h >= 1024 else 16
    heads = max(4, (h * 4 // 7) // head_dim // 4 * 4)
    num_taps = min(5, max(1, depth // 2 - 1))
    return DraftConfig(
        hidden_size=h, num_hidden_layers=min(5, max(1, depth // 4)), num_attention_heads=heads,
        num_key_value_heads=max(2, heads // 4), head_dim=head_dim, intermediate_size=2 * h,
        vocab_size=target.vocab_size, rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings, block_size=7,
        markov_rank=min(256, max(8, target.vocab_size // 16)), mask_token_id=target.pad_token_id,
        use_confidence_head=True, num_target_layers=depth,
        target_layer_ids=tuple(int((i + 0.5) * depth / num_taps) for i in range(num_taps)),
    )  # fmt: skip


class _Drafting:
    """One training of a draft, from samples to the measured result."""

    def __init__(
        self, recipe: Recipe, adapter: Path | None, engine: EmbeddedEngine, folder: RunFolder, plan: DraftPlan
    ) -> None:
        self.recipe, self.engine, self.folder, self.plan = recipe, engine, folder, plan
        if adapter is not None:
            config, tensors = load_peft(adapter, engine.config)
            publish(make_update(0, config, tensors), engine)
        if plan.start is None:
            config, weights = new_draft_config(engine.config), None
        else:
            config, weights = read_draft(plan.start, engine.config, torch.float32)
        target = engine.runner.model.weights
        self.trainer = DraftTrainer(
            config, weights or initial_weights(config, plan.training.seed), target.embed, target.head, plan.training
        )
        self.task: GradedTask = make_task(recipe.task, engine.tokenizer, seed=recipe.run.seed)

    def run(self) -> dict[str, Any]:
        newest = self.folder.latest_checkpoint()
        self.folder.truncate_metrics(newest[0] if newest else -1)
        if newest is not None:
            self.trainer.load(newest[1])
        steps = self.plan.training.steps
        examples = self._examples() if self.trainer.num_steps < steps else []
        with MetricsLog(self.folder.metrics_path, total_steps=steps) as metrics:
            while self.trainer.num_steps < steps:
                numbers = self.trainer.step(examples)
                step = self.trainer.num_steps
                if step % LOG_EVERY == 0 or step in (1, steps):
                    metrics.write(step, numbers)
                if step == steps or (self.plan.save_every and step % self.plan.save_every == 0):
                    self._save(step)
        place = self.folder.path / "draft"
        remove_tree(place)
        weights = {name: w.detach().cpu() for name, w in self.trainer.weights.items()}
        write_draft(place, self.trainer.model.config, weights)
        return self._measure(place)

    def _save(self, step: int) -> None:
        draft = self.folder.begin_checkpoint(step)
        if draft is not None:
            self.trainer.save(draft.folder)
            self.folder.commit_checkpoint(draft)
        self.folder.prune(2)

    def _examples(self) -> list[Example]:
        """The policy's answers and its states of them; held in memory, W + H numbers a token."""
        path = self.folder.path / SAMPLES
        if not path.exists():
            rows = self._sample(self.task.next(self.plan.num_prompts))
            write_text(path, "".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows))
        rows = _rows(path)
        log.info("computing the states of %d answers", len(rows))
        sequences = [(*row["prompt"], *row["answer"]) for row in rows]
        states = target_states(self.engine, sequences, self.trainer.model.config.target_layer_ids)
        return [
            Example(token_ids=s, num_prompt_tokens=len(row["prompt"]), states=state)
            for s, row, state in zip(sequences, rows, states, strict=True)
        ]

    def _sample(self, prompts: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
        """Answers at temperature 1 from the whole distribution, which is the one that a draft learns."""
        stop = () if self.plan.past_stop else (self.engine.config.eos_token_id,)
        most = self.recipe.rollout.sampling.max_new_tokens

        async def all_of_them() -> list[Completion]:
            return await asyncio.gather(*(
                self.engine.generate(prompt.token_ids, SamplingParams(
                    max_new_tokens=most, stop_token_ids=stop,
                    seed=request_seed(self.plan.training.seed, "draft", i, j),
                ))
                for i, prompt in enumerate(prompts) for j in range(self.plan.group_size)
            ))  # fmt: skip

        log.info("sampling %d answers to %d prompts", len(prompts) * self.plan.group_size, len(prompts))
        asked = [list(prompt.token_ids) for prompt in prompts for _ in range(self.plan.group_size)]
        answers = asyncio.run(all_of_them())
        if failed := [a.error for a in answers if a.finish_reason is FinishReason.ERROR]:
            raise DataError(f"the engine failed {len(failed)} of {len(answers)} answers, the first with: {failed[0]}")
        return [(prompt, list(a.token_ids)) for prompt, a in zip(asked, answers, strict=True)]

    def _measure(self, place: Path) -> dict[str, Any]:
        """Of the draft as it was written, BF16 rounding included."""
        log.info("measuring what is accepted, on %d held-out prompts", self.plan.eval_prompts)
        config, weights = read_draft(place, self.engine.config, torch.float32)
        target = self.engine.runner.model.weights
        device = target.embed.device
        model = DraftModel(config, {n: w.to(device) for n, w in weights.items()}, target.embed, target.head)
        found = measure_all(
            model, self.engine, [p.token_ids for p in self.task.eval_prompts(self.plan.eval_prompts)],
            max_new_tokens=self.recipe.rollout.sampling.max_new_tokens, seed=self.plan.training.seed,
        )  # fmt: skip
        content = {name: _as_json(a) for name, a in found.items()}
        write_text(self.folder.path / ACCEPTANCE, json.dumps(content, indent=1) + "\n")
        return content


def measure_all(
    model: DraftModel, engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, seed: int = 0
) -> dict[str, Acceptance]:
    """Greedy and sampled, of answers as they end and of answers that go on behind their end."""
    stop = (engine.config.eos_token_id,)
    return {
        f"{'sampled' if sampled else 'greedy'}{'' if stops else ', past the end'}": measure_acceptance(
            model, engine, prompts, max_new_tokens=max_new_tokens, stop_token_ids=stop if stops else (),
            sampled=sampled, seed=seed,
        )
        for stops in (True, False) for sampled in (False, True)
    }  # fmt: skip


def _rows(path: Path) -> list[dict[str, list[int]]]:
    """Raises DataError for a line that isn't one of ours."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append({key: [int(token) for token in row[key]] for key in ("prompt", "answer")})
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path}:{number} is damaged; remove the file, and --resume samples again") from None
    return rows


def _as_json(a: Acceptance) -> dict[str, Any]:
    return {
        "rounds": a.rounds, "mean_accepted": a.mean_accepted, "room": a.room, "reached": a.reached,
        "accepted": a.accepted,
    }  # fmt: skip


def _take(out: Path, settings: dict[str, Any], resume: bool) -> FolderLock:
    """The folder, locked, with its settings in it."""
    stored = out / SETTINGS
    if resume and not stored.is_file():
        raise ConfigError(f"{out} holds no training of a draft to go on with; start it without --resume")
    if not resume and out.exists() and (not out.is_dir() or any(p.name != ".lock" for p in out.iterdir())):
        raise ConfigError(f"{out} is there already; go on with it by --resume, or choose another --out")
    lock = FolderLock.take(out, "another --out")
    try:
        if resume:
            try:
                known = dict(json.loads(stored.read_text(encoding="utf-8")))
            except (ValueError, TypeError):
                raise ConfigError(f"{stored} is damaged: nobody knows how it began; choose another --out") from None
            if said := "; ".join(_differences(known, settings)):
                raise ConfigError(f"{out} was begun with other settings ({said}); give the same, or another --out")
        else:
            write_text(stored, json.dumps(settings, indent=1) + "\n")
    except BaseException:
        lock.release()
        raise
    return lock


def _differences(known: dict[str, Any], now: dict[str, Any], place: str = "") -> Iterator[str]:
    """A phrase for each setting that isn't the same, sections' by their dotted names."""
    for key in sorted(known.keys() | now.keys()):
        there, here = known.get(key), now.get(key)
        if isinstance(there, dict) and isinstance(here, dict):
            yield from _differences(there, here, f"{place}{key}.")
        elif there != here:
            yield f"{place}{key}: {there} there, {here} now"
