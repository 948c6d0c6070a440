"""What the planner says of SGLang's memory at the whole K3, against what SGLang's own code computes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_k3.k3.config import K3Config
from miles_k3.plan.engine import BF16, kv_bytes_per_token, state_bytes
from miles_k3.plan.sglang import SLOTS, Split, slot_numbers
from miles_k3.rollout.sglang.hooks.hidden_dims import module_dims

KIMI = Path(__file__).parents[2] / "assets" / "kimi-k3"


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (8, 8), (16, 16), (8, 2), (4, 1)])
def test_slots_of_the_whole_model_on_every_split(tp: int, ep: int) -> None:
    """By the pool's own functions, without allocating."""
    from sglang.srt.lora.mem_pool import LoRAMemoryPool
    from sglang.srt.lora.utils import get_normalized_target_modules

    from miles_k3.rollout.sglang.names import TARGETS

    text = SimpleNamespace(**json.loads((KIMI / "config.json").read_text())["text_config"])
    model: Any = SimpleNamespace(
        config=text, get_hidden_dim=lambda module, layer: module_dims(text, module, layer),
    )  # fmt: skip
    pool = LoRAMemoryPool.__new__(LoRAMemoryPool)
    pool.base_hf_config, pool.max_loras_per_batch, pool.num_layer = text, SLOTS, text.num_hidden_layers
    pool.tp_size = pool.attn_tp_size = tp
    pool.moe_tp_size, pool.moe_ep_size, pool.moe_use_local_expert_ids = tp // ep, ep, ep > 1
    pool.experts_shared_outer_loras = True
    targets = get_normalized_target_modules(TARGETS)
    targets |= {f"{name}_moe" for name in targets & {"gate_up_proj", "down_proj"}}
    rank, numbers = 32, 0
    for layer in range(text.num_hidden_layers):
        for name in targets:
            for shape in (
                pool.get_lora_A_shape(name, model, rank, layer),
                pool.get_lora_B_shape(name, model, rank, layer),
            ):
                size = 1
                for length in shape:
                    size *= length
                numbers += size
    assert numbers == SLOTS * slot_numbers(K3Config.from_folder(KIMI), rank, Split(tp=tp, ep=ep))


@pytest.mark.parametrize("tp", [1, 8, 16])
def test_states_and_kv_of_the_whole_model(tp: int) -> None:
    from sglang.srt.configs.mamba_utils import KimiLinearStateShape

    config = K3Config.from_folder(KIMI)
    shape = KimiLinearStateShape.create(
        tp_world_size=tp, num_heads=config.kda_num_heads, head_dim=config.kda_head_dim,
        conv_kernel_size=config.short_conv_kernel_size,
    )  # fmt: skip
    (window,) = shape.conv
    heads, width, depth = shape.temporal
    one = heads * width * depth * 4 + window[0] * window[1] * 2
    assert state_bytes(config, BF16, tp) == len(config.kda_layers) * one
    assert kv_bytes_per_token(config, BF16) == len(config.mla_layers) * (config.kv_lora_rank + 64) * 2
