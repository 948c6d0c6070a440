"""The learning rate, and megatron's Adam over the adapter's factors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from miles_k3.config import TrainerSection
from miles_k3.trainer import cpu_shim
from miles_k3.trainer.mcore import (
    DistributedDataParallel,
    DistributedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


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


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What one optimizer holds of one parameter: its flattened elements from `start` on, and Adam's state of them.

    `master` is fp32; where the model is fp32 it is the parameter itself, or a view of it.
    """

    start: int
    master: Tensor
    adam: torch.optim.Optimizer
    shared_out: bool  # data-parallel ranks hold different elements; otherwise all hold the same

    @property
    def stop(self) -> int:
        return self.start + self.master.numel()

    @property
    def steps(self) -> int:
        """Adam's steps so far."""
        return int(self.adam.state[self.master]["step"]) if self.adam.state.get(self.master) else 0

    def values(self) -> dict[str, Tensor]:
        """Flat views of the master and, after the first step, the moments."""
        state = self.adam.state.get(self.master) or {}
        moments = {name: state[name].view(-1) for name in MOMENTS if name in state}
        return {"master": self.master.detach().view(-1), **moments}

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor], steps: int) -> None:
        """Take flat values as `values` gives them; without `steps` Adam's state is as before the first one."""
        self.master.view(-1).copy_(values["master"])
        state = self.adam.state[self.master]
        if not steps:
            state.clear()
            return
        state["step"] = torch.tensor(float(steps), dtype=torch.float32)
        for name in MOMENTS:
            state.setdefault(name, torch.empty_like(self.master)).view(-1).copy_(values[name])


class Optimizer:
    """Megatron's optimizer with fp32 masters."""

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

    def shards(self) -> dict[Parameter, Shard]:
        """What this rank's optimizer holds, by parameter of the model; one of which it holds nothing is left out."""
        chained: Any = self.megatron
        found: dict[Parameter, Shard] = {}
        for part in chained.chained_optimizers:
            adam: torch.optim.Optimizer | None = part.optimizer
            if adam is None:
                continue
            if isinstance(part, DistributedOptimizer):
                for parameter, (group, number) in part.model_param_group_index_map.items():
                    start = part._get_model_param_range_map(parameter)["param"].start
                    found[parameter] = Shard(start, adam.param_groups[group]["params"][number], adam, True)
                continue
            own = {id(master) for group in adam.param_groups for master in group["params"]}
            for parameter in self._trainable():
                master = getattr(parameter, "main_param", parameter)
                if id(master) in own:
                    found[parameter] = Shard(0, master, adam, False)
        return found

    def _trainable(self) -> Iterator[Parameter]:
        return (p for chunk in self.chunks for p in chunk.module.parameters() if p.requires_grad)
