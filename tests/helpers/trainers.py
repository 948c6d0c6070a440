"""Tiny trainers for the trainer's tests, and the naive loss and gradients they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from helpers.batches import train_batch
from helpers.oracle64 import Oracle64
from helpers.tiny import tiny_adapter, tiny_base, tiny_config, tiny_weights
from torch import Tensor

from miles_k3.config import AlgorithmSection, TrainerSection
from miles_k3.k3.config import K3Config
from miles_k3.trainer.loss import policy_loss, token_entropy, token_logprobs
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.types import AdapterConfig, MiniBatch

ADAPTER = AdapterConfig(rank=6, alpha=12.0)
CONFIG = tiny_config()
_CALM = {"res_proj.weight": 0.2, "o_proj.weight": 0.3}


@cache
def weights(calm: bool = False) -> dict[str, Tensor]:
    """Spec 7.1's random weights. They amplify rounding about a thousandfold (AttnRes picks sharply). `calm` ones, with
    smaller `_res_proj` and `o_proj`, have every formula too and leave fp32 errors near 1e-6: a bound can be tight."""
    found = tiny_weights(CONFIG)
    if not calm:
        return found
    return {n: next(((t * f).to(t.dtype) for end, f in _CALM.items() if n.endswith(end)), t) for n, t in found.items()}


def tiny_trainer(*, calm: bool = False, dtype: torch.dtype = torch.float32, adapter: AdapterConfig = ADAPTER,
                 algorithm: Mapping[str, Any] | None = None, section: Mapping[str, Any] | None = None,
                 total_steps: int = 100, seed: int = 0, base_dtype: str = "bf16",
                 routing_replay: bool = False) -> MegatronTrainer:  # fmt: skip
    """A trainer over its own resident base."""
    return MegatronTrainer(
        tiny_base(CONFIG, weights(calm), dtype, base_dtype), CONFIG, adapter=adapter,
        section=TrainerSection(**{"lr": 1e-3, **(section or {})}), total_steps=total_steps, seed=seed,
        algorithm=AlgorithmSection(**(algorithm or {}), routing_replay=routing_replay),
    )  # fmt: skip


def adapter_tensors(adapter: AdapterConfig = ADAPTER, seed: int = 0, scale: float = 0.05) -> dict[str, Tensor]:
    """A whole random adapter, B included, in fp32."""
    return tiny_adapter(CONFIG, adapter, seed=seed, scale=scale, dtype=torch.float32)


def gradients(trainer: MegatronTrainer, mini: MiniBatch, temperature: float = 1.0) -> dict[str, Tensor]:
    """Gradient of one mini-batch by exported name, as a step would take it, without taking it."""
    return trainer.gradients(mini, temperature)[1]


def leaves(tensors: Mapping[str, Tensor], dtype: torch.dtype, share: bool) -> dict[str, Tensor]:
    """Leaf tensors to differentiate by; gate and up of a pair are one leaf where they share their A."""
    made = {name: t.to(dtype).clone().requires_grad_() for name, t in tensors.items()}
    if share:
        for name in made:
            made[name] = made[name.replace(".up_proj.lora_A.", ".gate_proj.lora_A.")]
    return made


def naive_loss(adapter: Mapping[str, Tensor], mini: MiniBatch, algorithm: AlgorithmSection, *, scaling: float,
               temperature: float = 1.0, calm: bool = False, oracle: type[Oracle64] = Oracle64,
               config: K3Config = CONFIG) -> Tensor:  # fmt: skip
    """The mini-batch loss through the naive model, sequence by sequence; old log-probabilities are the current ones."""
    policy, base = oracle(config, weights(calm), adapter, scaling), oracle(config, weights(calm))
    total = torch.zeros((), dtype=torch.float64)
    for micro in mini.micro_batches:
        ends = micro.cu_seqlens.tolist()
        rows = [micro.tokens[None, a:b] for a, b in pairwise(ends)]
        logits = torch.cat([policy(row)[0] for row in rows])
        logprobs = token_logprobs(logits, micro.targets, temperature)
        with torch.no_grad():
            reference = token_logprobs(torch.cat([base(row)[0] for row in rows]), micro.targets, temperature)
        total = total + policy_loss(
            logprobs, logprobs.detach(), micro.rollout_logprobs.double(), micro.advantages.double(), micro.loss_mask,
            micro.cu_seqlens, algorithm=algorithm, num_loss_tokens=mini.num_loss_tokens,
            num_sequences=mini.num_sequences, ref_logprobs=reference, entropy=token_entropy(logits, temperature),
        ).loss  # fmt: skip
    return total


def relative_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """|found - wanted| / |wanted| per tensor, in the 2-norm."""
    return {
        name: float((found[name].double() - want.double()).norm() / want.double().norm())
        for name, want in wanted.items()
    }


__all__ = [
    "ADAPTER",
    "CONFIG",
    "adapter_tensors",
    "gradients",
    "leaves",
    "naive_loss",
    "relative_difference",
    "tiny_trainer",
    "train_batch",
    "weights",
]
