"""A recipe and a model's config -> its memory, judged against the machines that it asks for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from miles_k3.config import Recipe
from miles_k3.errors import ConfigError
from miles_k3.k3.config import K3Config
from miles_k3.parallel import layout_problems, planned_world
from miles_k3.plan.phases import rank_plans
from miles_k3.plan.shapes import Phase, Plan, Pool, RankPlan, Verdict
from miles_k3.plan.weights import Share, adapter_numbers

FP32 = 4
NUMBERS_ON_DISK = 3  # master and two moments of each trained number


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a plan is judged against where the recipe doesn't say: bytes, None where nobody knows.

    `gpus`: CUDA devices here; 0 plans for a CPU unless the recipe asks for CUDA. `fla`: whether its kernels are here.
    `apart`: embedded engines get processes of their own, as `miles-k3 launch` starts them.
    """

    gpus: int = 0
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    name: str = "this machine"
    fla: bool = True
    apart: bool = False


def read_config(recipe: Recipe) -> K3Config:
    """The model's config alone; no weights are needed. Raises CheckpointError."""
    config = K3Config.from_folder(recipe.model.path)
    if recipe.model.mla_latent_norm_eps is not None:
        config = dataclasses.replace(config, mla_latent_norm_eps=recipe.model.mla_latent_norm_eps)
    return config


def plan(recipe: Recipe, config: K3Config, machine: Machine, *, world: int | None = None, name: str = "") -> Plan:
    """`world`: ranks, where a launcher has decided; otherwise those that the recipe asks for.

    Raises ConfigError, with every reason, when the layout can't work.
    """
    world = planned_world(recipe) if world is None else world
    problems = layout_problems(config, recipe.trainer, world)
    if recipe.rollout.engine != "embedded" and world % recipe.rollout.engine_tp:
        problems.append(
            f"rollout.engine_tp {recipe.rollout.engine_tp} doesn't divide the {world} ranks; choose one that does"
        )
    if problems:
        raise ConfigError(problems)
    cuda = on_cuda(recipe, machine)
    kernel = recipe.trainer.kda_kernel
    fla = cuda and (kernel == "fla" or (kernel == "auto" and machine.fla and recipe.model.dtype == "bfloat16"))
    ranks = rank_plans(recipe, config, world, cuda=cuda, fla=fla, apart=machine.apart)
    return Plan(
        name=name, world=world, cuda=cuda, ranks=ranks, verdicts=_verdicts(recipe, ranks, world, machine, cuda),
        disk_bytes=checkpoint_bytes(recipe, config),
    )  # fmt: skip


def checkpoint_bytes(recipe: Recipe, config: K3Config) -> int:
    """One checkpoint on disk: fp32 masters and moments of the whole adapter; the base is never written."""
    shared = recipe.lora.share_gate_up_a
    numbers = adapter_numbers(config, Share.whole(config), recipe.lora.rank, one_gate_up_a=shared).total
    return numbers * NUMBERS_ON_DISK * FP32


def on_cuda(recipe: Recipe, machine: Machine) -> bool:
    """What `auto` means where the plan is for: a recipe that states GPU memory is for GPUs."""
    if recipe.model.device != "auto":
        return recipe.model.device == "cuda"
    return machine.gpus > 0 or recipe.cluster.gpu_memory_gb is not None


def _verdicts(
    recipe: Recipe, ranks: tuple[RankPlan, ...], world: int, machine: Machine, cuda: bool
) -> tuple[Verdict, ...]:  # fmt: skip
    cluster = recipe.cluster
    per_node = cluster.ranks_per_node or (min(world, machine.gpus) if machine.gpus else world)
    host = _pool("host", cluster.host_memory_gb, machine.host_bytes, machine, per_node)
    if not cuda:
        return (_worst(host, ranks, cuda),)
    gpu = _pool("GPU", cluster.gpu_memory_gb, machine.gpu_bytes, machine, 1)
    return _worst(gpu, ranks, cuda), _worst(host, ranks, cuda)


def _pool(where: str, stated_gb: float | None, found: int | None, machine: Machine, ranks: int) -> Pool:
    if stated_gb is not None:
        return Pool(
            where=where, capacity=int(stated_gb * 1e9), source=f"cluster.{where.lower()}_memory_gb", ranks=ranks
        )
    return Pool(where=where, capacity=found, source=f"free on {machine.name}", ranks=ranks)


def _worst(pool: Pool, ranks: tuple[RankPlan, ...], cuda: bool) -> Verdict:
    """The rank and phase that take most; ranks of a node are counted as if all of them were the worst kind."""
    kinds = [(rank, phase, rank.in_pool(pool, phase, cuda=cuda)) for rank in ranks for phase in Phase]
    rank, phase, items = max(kinds, key=lambda kind: sum(kind[2].values()))
    return Verdict(pool=pool, rank=rank, phase=phase, needed=sum(items.values()), items=items)


def this_machine(gpu: bool) -> Machine:
    """What is free here; imports torch only where a GPU may be asked for."""
    host = free_host_bytes()
    if not gpu:
        return Machine(host_bytes=host)
    from importlib.util import find_spec

    import torch

    if not torch.cuda.is_available():
        return Machine(host_bytes=host)
    return Machine(
        gpus=torch.cuda.device_count(), gpu_bytes=torch.cuda.mem_get_info()[0], host_bytes=host,
        name=torch.cuda.get_device_name(), fla=find_spec("fla") is not None,
    )  # fmt: skip


def free_host_bytes() -> int:
    """What the kernel says is available, and a container's limit leaves."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    if free is None:
        import os

        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(free, _cgroup_free())


def _cgroup_free() -> int:
    """What a container's limit leaves, which is often less than the machine has."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.exists() or not used.exists() or (text := limit.read_text().strip()) == "max":
        return 1 << 62
    return max(0, int(text) - int(used.read_text()))
