"""The draft follows the policy: trained in the loop, on hidden states that the step's own rollouts computed.

Every rank has the same draft: all train on the examples of all, in the same order. The new draft goes to the engine
with the adapter of the same step, and serves that version and those after it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from miles_k3.config_speculative import SpeculativeSection
from miles_k3.errors import LaunchError
from miles_k3.files import remove_tree
from miles_k3.protocols import Engine
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.speculative.blocks import Example, make_blocks
from miles_k3.rollout.speculative.draft import DraftModel
from miles_k3.rollout.speculative.draft_io import read_draft, write_draft
from miles_k3.rollout.speculative.draft_loss import LossWeights, draft_loss
from miles_k3.rollout.speculative.draft_train import STATE, DraftTrainer, DraftTraining
from miles_k3.rollout.speculative.state_keeper import StateKeeper, on_host
from miles_k3.world import World

FOREVER = 10**9  # steps, so that the rate stays at its peak
VERIFIES = "verifies_accepting_"  # of the engine's counters
MEASURED = 128  # examples on which the drafts are compared before they are trained on


class DraftFollower:
    """Owns the draft's fp32 weights and their optimizer; `frozen` is what it began with, for comparison."""

    def __init__(self, section: SpeculativeSection, engine: EmbeddedEngine, world: World, seed: int) -> None:
        assert section.draft is not None
        target = engine.runner.model.weights
        config, weights = read_draft(section.draft, engine.config, torch.float32)
        weights = {name: w.to(target.embed.device) for name, w in weights.items()}
        self.section, self.world, self._engine = section, world, engine
        self.trainer = DraftTrainer(
            config, weights, target.embed, target.head,
            DraftTraining(steps=FOREVER, seed=seed, lr=section.train_lr),
        )  # fmt: skip
        self._frozen = DraftModel(config, weights, target.embed.detach(), target.head.detach())
        self._examples: list[Example] = []

    @classmethod
    def of(cls, section: SpeculativeSection, engine: Engine, world: World, seed: int) -> DraftFollower | None:
        """None where the recipe doesn't ask for it. Raises LaunchError for an engine in another process."""
        if section.mode == "off" or not section.train:
            return None
        if not isinstance(engine, EmbeddedEngine):
            raise LaunchError(
                "rollout.speculative.train is true, but the engine is in another process, whose hidden states don't "
                "come back; set it to false, or start with miles-k3 train"
            )
        return cls(section, engine, world, seed)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around the rollouts that are learned from."""
        speculator = self._engine.speculator
        assert speculator is not None
        keeper = speculator.keeper = StateKeeper(self.section.train_tokens)
        try:
            yield
        finally:
            speculator.keeper = None
        self._examples = keeper.examples

    def step(self, version: int) -> Mapping[str, float]:
        """Train on what was heard, and draft with the result from adapter `version` on. Collective."""
        found = self.world.gather([on_host(e) for e in self._examples])
        device = self._engine.pool.device
        examples = [_moved(e, device) for part in found for e in part]
        self._examples = []
        numbers = {"draft/examples": float(len(examples))}
        if examples:
            numbers["draft/frozen_expected_accepted"] = self._expected(self._frozen, examples)
            numbers["draft/expected_accepted"] = self._expected(self.trainer.model, examples)
            measured = [self.trainer.step(examples) for _ in range(self.section.train_steps)][-1]
            numbers |= {f"draft/{name}": measured[f"draft/{name}"] for name in ("cross_entropy", "distance")}
            numbers |= {"draft/loss": measured["train/loss"], "draft/grad_norm": measured["train/grad_norm"]}
        self._hand_over(version)
        return {**numbers, "draft/version": float(version)}

    @torch.no_grad()
    def _expected(self, model: DraftModel, examples: list[Example]) -> float:
        """Tokens of a block that would be accepted, on rollouts that no draft was trained on."""
        generator = torch.Generator().manual_seed(0)
        chosen = [e for e in examples if e.num_anchors][:MEASURED]
        batch = make_blocks(chosen, model.config.block_size, max_blocks=8, generator=generator)
        return float(draft_loss(model, batch, LossWeights()).expected_accepted)

    def _hand_over(self, version: int) -> None:
        self._engine.load_draft(self.trainer.weights, version)

    # --- checkpoints --------------------------------------------------------------------------------------------
    def save(self, folder: Path) -> list[Path]:
        """Weights, optimizer and step into a new folder; the files."""
        folder.mkdir()
        self.trainer.save(folder)
        return [folder / STATE]

    def load(self, folder: Path, version: int) -> None:
        """Bring back what `save` wrote, also into the engine. Raises CheckpointError on anything missing or foreign."""
        self.trainer.load(folder)
        self._hand_over(version)

    def write(self, folder: Path) -> None:
        """The draft as others read it, in BF16."""
        remove_tree(folder)
        write_draft(folder, self.trainer.model.config, {n: w.detach().cpu() for n, w in self.trainer.weights.items()})


def _moved(example: Example, device: torch.device) -> Example:
    if device.type == "cpu":
        return example
    states = dataclasses.replace(
        example.states, taps_TW=example.states.taps_TW.to(device), final_TH=example.states.final_TH.to(device)
    )
    return dataclasses.replace(example, states=states)


class SpeculationMeter:
    """What speculation did to a step's rollouts, over all ranks; nothing where no engine drafts."""

    def __init__(self, engine: Engine, world: World) -> None:
        self._engine, self._world = engine, world
        self.metrics: Mapping[str, float] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around a step's rollouts. Collective; leaves `metrics`."""
        before = self._counts()
        yield
        found: Counter[str] = Counter()
        for counts in self._world.gather({name: n - before[name] for name, n in self._counts().items()}):
            found.update(counts)
        verifies = sum(n for name, n in found.items() if name.startswith(VERIFIES))
        self.metrics = {}
        if verifies:
            self.metrics = {
                "speculative/mean_accepted": found["accepted_tokens"] / verifies,
                "speculative/mean_verified": found["drafted_tokens"] / verifies,
                "speculative/verifies": float(verifies),
                **{
                    f"speculative/accepted_{name.removeprefix(VERIFIES)}": n / verifies
                    for name, n in found.items()
                    if name.startswith(VERIFIES)
                },
            }

    def _counts(self) -> dict[str, int]:
        wanted = ("accepted_tokens", "drafted_tokens")
        return {n: int(v) for n, v in self._engine.stats().items() if n in wanted or n.startswith(VERIFIES)}
