"""From a recipe to a serving engine."""

from __future__ import annotations

import torch

from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.rollout.embedded.text import Detokenizer
from miles_k3.rollout.sglang.arguments import Machine, server_arguments
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.rollout.sglang.running import RunningSglang
from miles_k3.types import AdapterConfig

_HOPPER = 9  # its major compute capability


def is_hopper(gpu: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(gpu)[0] == _HOPPER


def start_sglang(
    recipe: Recipe,
    config: K3Config,
    *,
    tokenizer: Detokenizer | None,
    adapter_config: AdapterConfig | None,
    max_sequence_tokens: int,
    first_gpu: int,
    meeting_place: str | None = None,
) -> SglangEngine:
    """Start SGLang's processes on the GPUs from `first_gpu` on; minutes for a large model. Raises EngineError.

    An engine over several machines waits at `meeting_place` for the others' processes.
    """
    arguments = server_arguments(
        recipe, config, Machine(hopper=is_hopper(first_gpu), first_gpu=first_gpu, meeting_place=meeting_place)
    )
    return SglangEngine(
        RunningSglang(arguments, config), config, tokenizer=tokenizer, adapter_config=adapter_config,
        max_lora_rank=recipe.rollout.max_lora_rank, max_sequence_tokens=max_sequence_tokens,
        memory_saver="enable_memory_saver" in arguments, routed_experts="enable_return_routed_experts" in arguments,
    )  # fmt: skip
