"""Training of a draft: fp32 weights, AdamW, one step at a time; every step is a function of the seed and its number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_k3.errors import CheckpointError, DataError
from miles_k3.k3.draft_config import DraftConfig
from miles_k3.k3.draft_params import CONFIDENCE_BIAS, CONFIDENCE_WEIGHT, MARKOV_W2, draft_params
from miles_k3.rollout.speculative.blocks import Example, make_blocks
from miles_k3.rollout.speculative.draft import DraftModel
from miles_k3.rollout.speculative.draft_loss import LossWeights, draft_loss

STATE = "draft_state.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTraining:
    """How a draft is trained. The rate rises over `warmup_steps`, then falls by a cosine to 0 at `steps`."""

    steps: int
    seed: int = 0
    lr: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    sequences_per_step: int = 64
    max_blocks: int = 8
    loss: LossWeights = field(default_factory=LossWeights)

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def initial_weights(config: DraftConfig, seed: int) -> dict[str, Tensor]:
    """fp32 weights of a new draft. Markov and confidence heads start silent."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for p in draft_params(config):
        if p.name in (MARKOV_W2, CONFIDENCE_WEIGHT, CONFIDENCE_BIAS):
            weights[p.name] = torch.zeros(p.shape)
        elif len(p.shape) == 1:
            weights[p.name] = torch.ones(p.shape)
        else:
            gain = 0.5 if p.name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weights[p.name] = torch.randn(p.shape, generator=generator) * gain * p.shape[1] ** -0.5
    return weights


class DraftTrainer:
    """Owns the draft's weights and their optimizer; the target's embedding and head stay as they are."""

    def __init__(
        self, config: DraftConfig, weights: Mapping[str, Tensor], embed_VH: Tensor, head_VH: Tensor, at: DraftTraining
    ) -> None:
        self.at, self.num_steps = at, 0
        device = embed_VH.device
        self.weights = {n: w.detach().float().to(device).clone().requires_grad_(True) for n, w in weights.items()}
        self.model = DraftModel(config, self.weights, embed_VH.detach(), head_VH.detach())
        decayed = [w for w in self.weights.values() if w.dim() > 1]
        others = [w for w in self.weights.values() if w.dim() == 1]
        groups = [{"params": decayed, "weight_decay": at.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=at.lr, betas=(0.9, 0.95))

    def step(self, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step on examples and anchors that the step's number picks; what it measured.

        Raises DataError when no answer has two tokens, and when the loss is not finite.
        """
        generator = torch.Generator().manual_seed((self.at.seed * 1_000_003 + self.num_steps) % 2**63)
        usable = [e for e in examples if e.num_anchors]
        if not usable:
            raise DataError(f"none of {len(examples)} answers has two tokens, so nothing can be drafted; sample longer")
        order = torch.randperm(len(usable), generator=generator)[: self.at.sequences_per_step].tolist()
        batch = make_blocks(
            [usable[i] for i in order], self.model.config.block_size, max_blocks=self.at.max_blocks,
            generator=generator,
        )  # fmt: skip
        loss = draft_loss(self.model, batch, self.at.loss)
        self.adam.zero_grad(set_to_none=True)
        loss.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self.at.grad_clip)
        if not torch.isfinite(loss.total) or not torch.isfinite(norm):
            raise DataError(f"the draft's loss isn't finite at step {self.num_steps + 1}; lower --lr")
        rate = self.at.rate(self.num_steps)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.num_steps += 1
        return {
            "train/loss": float(loss.total.detach()), "draft/cross_entropy": float(loss.cross_entropy),
            "draft/distance": float(loss.distance), "draft/confidence": float(loss.confidence),
            "draft/expected_accepted": float(loss.expected_accepted), "train/grad_norm": float(norm), "train/lr": rate,
        }  # fmt: skip

    def save(self, folder: Path) -> None:
        """Weights, moments and step into an existing folder; `load` brings them back bit for bit."""
        tensors = {f"weight.{name}": w.detach().cpu() for name, w in self.weights.items()}
        for name, w in self.weights.items():
            for moment in _MOMENTS if self.adam.state.get(w) else ():
                tensors[f"{moment}.{name}"] = self.adam.state[w][moment].cpu()
        tensors["step"] = torch.tensor(self.num_steps)
        save_file(tensors, folder / STATE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Raises CheckpointError when a tensor is missing, foreign or of another shape."""
        found = load_file(folder / STATE)
        kinds = ("weight", *_MOMENTS) if int(found.get("step", 0)) else ("weight",)
        wanted = {f"{kind}.{name}": w for kind in kinds for name, w in self.weights.items()}
        if found.keys() != wanted.keys() | {"step"} or any(found[n].shape != w.shape for n, w in wanted.items()):
            raise CheckpointError(f"{folder / STATE} is the state of another draft; start anew under another --out")
        self.num_steps = int(found["step"])
        for name, w in self.weights.items():
            w.copy_(found[f"weight.{name}"])
            if self.num_steps:
                moments = {moment: found[f"{moment}.{name}"].to(w.device) for moment in _MOMENTS}
                self.adam.state[w] = {"step": torch.tensor(float(self.num_steps)), **moments}
