"""CUDA graphs with LoRA on Marlin's experts.

SGLang sizes the graphs' LoRA buffers from the experts' plain weights. Marlin's are packed under other names, and it
ends with AttributeError 'w13_weight' at its start; without graphs a decode step costs ten times as much. And it sizes
them for one token a request, where a step that verifies a draft's has several.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from miles_k3.rollout.sglang.hooks.draft_allowed import ALGORITHM


def plain_shapes(experts: Any, packed: Any) -> SimpleNamespace:
    """What the experts' weights would be unpacked: w13 [E, 2 * width, latent] and w2 [E, latent, width], no numbers."""
    width, device = experts.intermediate_size_per_partition, packed.w13_qweight.device
    count, latent = packed.w13_qweight.shape[0], experts.hidden_size
    return SimpleNamespace(
        w13_weight=SimpleNamespace(shape=(count, 2 * width, latent), device=device),
        w2_weight=SimpleNamespace(shape=(count, latent, width), device=device),
    )


def rows_of(options: Any) -> int:
    """Rows of a request in a captured step, by the server's arguments."""
    return int(options.speculative_num_draft_tokens) if options.speculative_algorithm == ALGORITHM else 1


def install() -> None:
    from sglang.srt.lora.backend.base_backend import BaseLoRABackend
    from sglang.srt.runtime_context import get_server_args

    allocate = BaseLoRABackend.init_cuda_graph_moe_buffers

    @functools.wraps(allocate)
    def from_plain_shapes(self: Any, max_bs: int, max_loras: int, compute_dtype: Any, moe_layer: Any) -> None:
        if not hasattr(moe_layer._quant_info, "w13_weight"):
            base = moe_layer.base_layer
            moe_layer = SimpleNamespace(base_layer=base, _quant_info=plain_shapes(base, moe_layer._quant_info))
        allocate(self, max_bs * rows_of(get_server_args()), max_loras, compute_dtype, moe_layer)

    BaseLoRABackend.init_cuda_graph_moe_buffers = from_plain_shapes
