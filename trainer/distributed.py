"""Process group, megatron's parallel state, this rank's place in each of its groups, and random seeds."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from miles_k3.config import ParallelSection, TrainerSection
from miles_k3.errors import LaunchError
from miles_k3.k3.base_shard import BaseShard
from miles_k3.k3.config import K3Config
from miles_k3.k3.weights import ResidentBase
from miles_k3.parallel import layout_problems, rank_stages
from miles_k3.trainer import cpu_shim
from miles_k3.trainer.mcore import model_parallel_cuda_manual_seed, parallel_state
from miles_k3.world import World, leave_world, world_of


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """One direction of the layout: the group of ranks along it, and this one's number there."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def of(cls, group: Any) -> Axis:
        return cls(group.rank(), group.size(), group)

    def part(self, length: int) -> slice:
        """This rank's equal part of something that is `length` long."""
        each = length // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """This rank's place along every axis. `dp_cp` reduces ordinary gradients, `expert_dp` those of per-expert factors.

    `sequence_parallel`: whether activations between sublayers are split over `tp`; never with one rank.
    """

    tp: Axis = Axis()
    cp: Axis = Axis()
    ep: Axis = Axis()
    pp: Axis = Axis()
    dp: Axis = Axis()
    dp_cp: Axis = Axis()
    expert_dp: Axis = Axis()
    sequence_parallel: bool = False

    @property
    def sp(self) -> Axis:
        """Ranks that share the tokens between sublayers."""
        return self.tp if self.sequence_parallel else Axis()


def initialize(k3: K3Config, section: TrainerSection, *, device: torch.device, seed: int) -> Ranks:
    """Bring up megatron's groups for the section's layout, and the random states.

    One process needs no launcher and no port; several have joined their world before (`miles_k3.world`). Raises
    LaunchError, with all reasons, when the layout can't run here.
    """
    world = world_of(os.environ)
    problems = layout_problems(k3, section, world.size)
    if device.type == "cpu" and not cpu_shim.needed():
        problems.append(
            "the model is on the CPU but this machine has CUDA devices, and megatron-core would compute on them; "
            "set model.device: cuda, or hide the devices with CUDA_VISIBLE_DEVICES="
        )
    if problems:
        raise LaunchError("\n".join(problems))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    _join(world, device)
    with cpu_shim.on_cpu():
        _make_groups(section.parallel)
        model_parallel_cuda_manual_seed(seed)
    return _ranks(section.parallel)


def base_shard(config: K3Config, parallel: ParallelSection, ranks: Ranks) -> BaseShard:
    """What this rank must hold of the base, for `load_base`."""
    layers = tuple(i for stage in rank_stages(parallel, config.num_hidden_layers, ranks.pp.rank) for i in stage)
    experts = range(config.num_experts)[ranks.ep.part(config.num_experts)]
    return BaseShard(layers=layers, experts=experts, tp_rank=ranks.tp.rank, tp_size=ranks.tp.size)


def check_shard(base: ResidentBase, parallel: ParallelSection, ranks: Ranks) -> None:
    """Raises LaunchError when the base was loaded as another rank's shard."""
    expected = base_shard(base.config, parallel, ranks)
    if base.shard not in (None, expected):
        raise LaunchError(
            f"the base holds {base.shard}, but this rank needs {expected}; load it with distributed.base_shard"
        )


def _join(world: World, device: torch.device) -> None:
    if dist.is_initialized():
        return
    if world.size > 1:
        raise LaunchError(f"WORLD_SIZE is {world.size} but this process has not joined; call world.join_world first")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    atexit.register(leave_world)


def _make_groups(parallel: ParallelSection) -> None:
    """Megatron's groups, made anew where another layout's are up: tests run many in one process."""
    wanted = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
    }
    if parallel_state.model_parallel_is_initialized():
        found = _layout_up()
        if found == tuple(wanted.values()):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        **wanted, expert_tensor_parallel_size=1, order="tp-cp-ep-dp-pp", create_gloo_process_groups=False
    )


def _layout_up() -> tuple[int | None, ...]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


def _ranks(parallel: ParallelSection) -> Ranks:
    state = parallel_state
    return Ranks(
        tp=Axis.of(state.get_tensor_model_parallel_group()),
        cp=Axis.of(state.get_context_parallel_group()),
        ep=Axis.of(state.get_expert_model_parallel_group()),
        pp=Axis.of(state.get_pipeline_model_parallel_group()),
        dp=Axis.of(state.get_data_parallel_group()),
        dp_cp=Axis.of(state.get_data_parallel_group(with_context_parallel=True)),
        expert_dp=Axis.of(state.get_expert_data_parallel_group()),
        sequence_parallel=parallel.tp > 1 and parallel.sequence_parallel,
    )
