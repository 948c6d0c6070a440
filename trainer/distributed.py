"""Process group, megatron's parallel state and random seeds."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from miles_k3.config import ParallelSection
from miles_k3.errors import LaunchError
from miles_k3.trainer import cpu_shim
from miles_k3.trainer.mcore import model_parallel_cuda_manual_seed, parallel_state

_SIZES = ("tp", "pp", "cp", "ep")


def initialize(parallel: ParallelSection, *, device: torch.device, seed: int) -> None:
    """Bring up gloo (CPU) or NCCL (CUDA), megatron's groups for `parallel`, and the random states.

    One process needs no launcher and no port. Later calls in the same process only seed again.
    Raises LaunchError when the layout can't run in this process.
    """
    problems = layout_problems(parallel, os.environ)
    if device.type == "cpu" and not cpu_shim.needed():
        problems.append(
            "the model is on the CPU but this machine has CUDA devices, and megatron-core would compute on them; "
            "set model.device: cuda, or hide the devices with CUDA_VISIBLE_DEVICES="
        )
    if problems:
        raise LaunchError("; ".join(problems))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(_leave)
    with cpu_shim.on_cpu():
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tp,
                pipeline_model_parallel_size=parallel.pp,
                context_parallel_size=parallel.cp,
                expert_model_parallel_size=parallel.ep,
                create_gloo_process_groups=False,
            )
        model_parallel_cuda_manual_seed(seed)


def _leave() -> None:
    """NCCL warns of leaked resources when a process ends without this."""
    if dist.is_initialized():
        dist.destroy_process_group()


def layout_problems(parallel: ParallelSection, environ: Mapping[str, str]) -> list[str]:
    """Why this layout can't run, one sentence each; empty when it can."""
    problems = []
    if wide := [f"{name}={getattr(parallel, name)}" for name in _SIZES if getattr(parallel, name) > 1]:
        problems.append(
            f"trainer.parallel asks for {', '.join(wide)}, but this trainer runs on one rank: it neither splits "
            "weights, layers, sequences or experts nor sums their gradients over ranks; set tp, pp, cp and ep to 1"
        )
    if (world := int(environ.get("WORLD_SIZE", "1"))) > 1:
        problems.append(f"WORLD_SIZE is {world}, but this trainer runs as one process; start it without torchrun")
    return problems
