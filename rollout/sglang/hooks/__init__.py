"""What stock SGLang lacks for K3 with LoRA, one gap a module. Each has `install()`, called once in each process.

Nothing of SGLang is imported before that, so the modules can be read, and their own arithmetic tested, without it.
"""

from __future__ import annotations

from types import ModuleType

from miles_k3.rollout.sglang.hooks import (
    config_aliases,
    direct_swap,
    draft_allowed,
    draft_logprobs,
    draft_runner,
    expert_capture,
    expert_lora,
    graph_buffers,
    hidden_dims,
    moe_front,
    output_gate,
    reduce_fusion,
    report,
    verify_batch,
)

HOOKS: tuple[ModuleType, ...] = (
    config_aliases,
    hidden_dims,
    output_gate,
    moe_front,
    reduce_fusion,
    expert_lora,
    graph_buffers,
    expert_capture,
    direct_swap,
    draft_runner,
    verify_batch,
    draft_logprobs,
    draft_allowed,
    report,
)


def hook_names() -> tuple[str, ...]:
    """What a process with all hooks reports."""
    return tuple(hook.__name__.rpartition(".")[2] for hook in HOOKS)
