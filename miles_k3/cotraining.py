"""The draft follows the policy: trained in the loop, on hidden states that the step's own rollouts computed.

Every rank has the same draft: all train on the examples of all, in the same order. The new draft goes to the engine
with the adapter of the same step, and serves that version and those after it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from miles_k3.config_speculative import SpeculativeSection
from miles_k3.errors import EngineError, LaunchError
from miles_k3.files import remove_tree
from miles_k3.k3.params import LM_HEAD, TEXT
from miles_k3.k3.weights import ResidentBase
from miles_k3.protocols import Engine
from miles_k3.ray.remote_engine import RemoteEngine
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.speculative.blocks import Example, make_blocks
from miles_k3.rollout.speculative.draft import DraftModel
from miles_k3.rollout.speculative.draft_io import read_draft, write_draft
from miles_k3.rollout.speculative.draft_loss import LossWeights, draft_loss
from miles_k3.rollout.speculative.draft_train import STATE, DraftTrainer, DraftTraining
from miles_k3.rollout.speculative.target_states import TargetStates
from miles_k3.world import World

FOREVER = 10**9  # steps, so that the rate stays at its peak
VERIFIES = "verifies_accepting_"  # of the engine's counters
MEASURED = 128  # examples on which the drafts are compared before they are trained on


class DraftFollower:
    """Owns the draft's fp32 weights and their optimizer; `frozen` is what it began with, for comparison."""

    def __init__(
        self, section: SpeculativeSection, engine: EmbeddedEngine | RemoteEngine, base: ResidentBase, world: World,
        seed: int,
    ) -> None:  # fmt: skip
        assert section.draft is not None
        embed, head = (base[name].detach() for name in (TEXT + "embed_tokens.weight", LM_HEAD))
        config, weights = read_draft(section.draft, base.config, torch.float32)
        weights = {name: w.to(embed.device) for name, w in weights.items()}
        self.section, self.world, self._engine, self._device = section, world, engine, embed.device
        self.trainer = DraftTrainer(
            config, weights, embed, head, DraftTraining(steps=FOREVER, seed=seed, lr=section.train_lr)
        )
        self._frozen = DraftModel(config, weights, embed, head)
        self._examples: list[Example] = []

    @classmethod
    def of(
        cls, section: SpeculativeSection, engine: Engine, base: ResidentBase | None, world: World, seed: int
    ) -> DraftFollower | None:
        """None where the recipe doesn't ask for it; `base` is the policy's. Raises LaunchError for an engine whose
        hidden states don't come back."""
        if section.mode == "off" or not section.train:
            return None
        if not isinstance(engine, EmbeddedEngine | RemoteEngine) or base is None:
            raise LaunchError(
                f"rollout.speculative.train is true, but the hidden states of a {type(engine).__name__} don't come "
                "back; set it to false, or rollout.engine to embedded"
            )
        return cls(section, engine, base, world, seed)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around the rollouts that are learned from."""
        self._engine.listen(self.section.train_tokens)
        try:
            yield
        except BaseException:
            with suppress(EngineError):  # it may be what failed
                self._engine.heard()
            raise
        self._examples = self._engine.heard()

    def step(self, version: int) -> Mapping[str, float]:
        """Train on what was heard, and draft with the result from adapter `version` on. Collective."""
        found = self.world.gather(self._examples)
        examples = [_moved(e, self._device) for part in found for e in part]
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
    """In fp32, as the draft is trained."""
    taps_TW, final_TH = (t.to(device, torch.float32) for t in (example.states.taps_TW, example.states.final_TH))
    return dataclasses.replace(example, states=TargetStates(taps_TW=taps_TW, final_TH=final_TH))


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
