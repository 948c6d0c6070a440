"""The learning rate, and megatron's Adam over the adapter's factors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from miles_k3.config import TrainerSection
from miles_k3.trainer import cpu_shim
from miles_k3.trainer.mcore import (
    DistributedDataParallel,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)


def learning_rate(section: TrainerSection, step: int, total_steps: int) -> float:
    """The rate of harvest `step` (from 0) of `total_steps`.

    It rises linearly from 0 before the first harvest to the peak at harvest `lr_warmup_steps`, then stays or falls to
    0 at the end of the run. A pure function of the step: nothing to save, nothing that a resume could step twice.
    """
    warmup = section.lr_warmup_steps
    if step < warmup:
        return section.lr * (step + 1) / (warmup + 1)
    if section.lr_decay == "constant":
        return section.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if section.lr_decay == "linear":
        return section.lr * (1.0 - progress)
    return section.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


class Optimizer:
    """Megatron's optimizer with fp32 masters, seen by parameter name."""

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], section: TrainerSection, dtype: torch.dtype
    ):  # fmt: skip
        config = OptimizerConfig(
            optimizer="adam", lr=section.lr, min_lr=0.0, weight_decay=section.weight_decay,
            adam_beta1=section.adam_beta1, adam_beta2=section.adam_beta2, adam_eps=section.adam_eps,
            clip_grad=section.grad_clip, bf16=dtype == torch.bfloat16, params_dtype=dtype,
            use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
        )  # fmt: skip
        self.chunks = chunks
        with cpu_shim.on_cpu():
            self.megatron: MegatronOptimizer = get_megatron_optimizer(
                config, list(chunks), use_gloo_process_groups=False
            )  # pyright: ignore[reportArgumentType]

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def grad_norm(self) -> float:
        """Global norm of the gradients before clipping."""
        with cpu_shim.on_cpu():
            self.megatron.prepare_grads()
            return float(self.megatron.get_grad_norm())

    def step(self, lr: float) -> None:
        """Clip, then one Adam step at rate `lr`."""
        for group in self.megatron.param_groups:
            group["lr"] = lr
        with cpu_shim.on_cpu():
            self.megatron.step()

    def reload_masters(self) -> None:
        """Take the masters from the model's parameters, which someone else has written."""
        self.megatron.reload_model_params()

    def named_masters(self) -> Iterator[tuple[str, Parameter, Tensor]]:
        """(parameter name, the model's parameter, its fp32 master: the same tensor where the model is fp32)."""
        for name, parameter in (named for chunk in self.chunks for named in chunk.module.named_parameters()):
            if parameter.requires_grad:
                yield name, parameter, getattr(parameter, "main_param", parameter)

    def state_of(self, master: Tensor) -> dict[str, Tensor]:
        """Adam's state of one master, to read and to write; empty before the first step."""
        for part in self._torch_optimizers():
            if any(master is p for group in part.param_groups for p in group["params"]):
                return part.state[master]
        raise AssertionError("a trainable parameter without an optimizer")

    def _torch_optimizers(self) -> Iterator[torch.optim.Optimizer]:
        chained: Any = self.megatron
        yield from (part.optimizer for part in chained.chained_optimizers if part.optimizer is not None)
