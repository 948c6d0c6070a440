"""How much memory and disk a recipe takes, from its numbers and the model's: good to a factor, not to a byte."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from miles_k3.config import Recipe

if TYPE_CHECKING:
    from miles_k3.k3.config import K3Config

# The interpreter with torch, megatron-core and transformers takes about 0.7 GB; the rest is room. One grading process.
PROCESS_BYTES = 900_000_000
GRADER_BYTES = 200_000_000
FP32, BF16 = 4, 2
# A trained number is kept as parameter, gradient, fp32 master and Adam's two moments, all in fp32.
COPIES_IN_TRAINING = 5
# On disk: parameter, master and two moments in fp32.
COPIES_ON_DISK = 4
LIVE_ADAPTERS = 2  # the engine's slots
# Per token and layer a micro-batch keeps about this many hidden-wide vectors for its backward pass.
ACTIVATIONS_PER_LAYER = 24
# What `recompute: selective` doesn't keep of them; `full` keeps a layer's input only.
RECOMPUTED = {"attention": 8, "mlp": 12}
# Logits, their gradient and the softmax between them.
LOGIT_COPIES = 3


def memory_estimate(recipe: Recipe, config: K3Config, ranks: int = 1) -> dict[str, int]:
    """Bytes by purpose for trainer and engine of one rank, or of all `ranks` of a host where they share its memory.

    Each rank's engine holds the whole base and its own caches. Pipeline ranks keep the micro-batches of the stages
    behind them, so that splitting layers saves no activations.
    """
    itemsize = FP32 if recipe.model.dtype == "float32" else BF16
    trained, parallel = _adapter_numbers(recipe, config), recipe.trainer.parallel
    tokens = -(-recipe.trainer.micro_batch_tokens // parallel.cp)
    split = parallel.tp if parallel.sequence_parallel else 1
    hidden = _activations_per_layer(recipe) * config.num_hidden_layers * config.hidden_size * itemsize // split
    logits = LOGIT_COPIES * config.vocab_size * FP32 // parallel.tp
    parts = {
        "base": _base_bytes(recipe, config, itemsize),
        "adapter": trained * COPIES_IN_TRAINING * FP32 // (parallel.tp * parallel.pp)
        + trained * LIVE_ADAPTERS * itemsize,
        "cache": cache_bytes(recipe, config, itemsize),
        "activations": tokens * (hidden + logits),
    }
    if _on_cpu(recipe.model.device):
        parts["processes"] = PROCESS_BYTES + recipe.task.reward_workers * GRADER_BYTES
        parts = {name: size * ranks for name, size in parts.items()}
    return parts


def _activations_per_layer(recipe: Recipe) -> int:
    if recipe.trainer.recompute == "full":
        return 1
    dropped = recipe.trainer.recompute_sublayers if recipe.trainer.recompute == "selective" else ()
    return ACTIVATIONS_PER_LAYER - sum(RECOMPUTED[name] for name in set(dropped))


def cache_bytes(recipe: Recipe, config: K3Config, itemsize: int) -> int:
    """The engine's pages of MLA latents, and a KDA state and convolution window per running request and checkpoint."""
    longest = recipe.task.max_prompt_tokens + recipe.rollout.sampling.max_new_tokens
    page, running = recipe.rollout.page_size, recipe.rollout.max_running
    pages = recipe.rollout.num_pages or running * -(-longest // page)
    latents = pages * page * config.latent_cache_dim * len(config.mla_layers) * itemsize
    state = config.kda_num_heads * config.kda_head_dim**2 * FP32
    window = 3 * config.kda_dim * (config.short_conv_kernel_size - 1) * itemsize
    slots = running
    if recipe.rollout.prefix_cache != "off":
        slots += recipe.rollout.cache_slots or -(-running // 4)
    return latents + slots * len(config.kda_layers) * (state + window)


def checkpoint_bytes(recipe: Recipe, config: K3Config) -> int:
    """One checkpoint on disk: adapter and optimizer; the base is never written."""
    return _adapter_numbers(recipe, config) * COPIES_ON_DISK * FP32


def available_bytes(device: str) -> tuple[str, int]:
    """Where a run's memory comes from, and how much of it is free now."""
    if not _on_cpu(device):
        import torch

        return torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    if free is None:
        import os

        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "this machine", min(free, _cgroup_free())


def _on_cpu(device: str) -> bool:
    """`auto` too, where there is no CUDA device."""
    import torch

    return device == "cpu" or not torch.cuda.is_available()


def _cgroup_free() -> int:
    """What a container's limit leaves, which is often less than the machine has."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.exists() or not used.exists() or (text := limit.read_text().strip()) == "max":
        return 1 << 62
    return max(0, int(text) - int(used.read_text()))


def _adapter_numbers(recipe: Recipe, config: K3Config) -> int:
    from miles_k3.adapters.layout import adapter_layout, parameter_count
    from miles_k3.types import AdapterConfig

    lora = recipe.lora
    shape = AdapterConfig(rank=lora.rank, alpha=lora.alpha, share_gate_up_a=lora.share_gate_up_a)
    return parameter_count(adapter_layout(config, shape))


def _base_bytes(recipe: Recipe, config: K3Config, itemsize: int) -> int:
    from miles_k3.k3.params import DType, text_params

    total = 0
    for param in text_params(config):
        if param.quantised:
            unpacked = prod(param.logical_shape) * itemsize if param.logical_shape else 0
            total += unpacked if recipe.model.base_dtype == "bf16" else param.num_bytes
        else:
            total += prod(param.shape) * (FP32 if param.dtype is DType.F32 else itemsize)
    return total
