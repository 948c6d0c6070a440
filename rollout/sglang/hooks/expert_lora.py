"""LoRA on K3's routed experts, which SGLang serves from packed MXFP4 with Marlin.

SGLang's wrapper refuses the MXFP4 method, takes SiTU's beta for a sign of interleaved gates and ups, and has a Marlin
runner for SiLU only. Here the wrapper gets the packed weights, halves as they are, and a runner of ours; small batches
get LoRA kernels of ours, too (`row_lora`).
"""

from __future__ import annotations

import functools
import os
from typing import Any

# 0: SGLang's own LoRA kernels for every batch, to compare with.
ROWS = os.environ.get("MILES_K3_SGLANG_ROW_LORA", "1") != "0"


def refuse_padding(experts: Any) -> None:
    """Raise ValueError where Marlin padded the experts: LoRA's factors have the widths of the checkpoint."""
    pad = int(getattr(experts.quant_method, "hidden_pad", 0) or 0)
    width = experts.intermediate_size_per_partition
    if pad or width % 128 or experts.hidden_size % 256:
        raise ValueError(
            f"experts of latent width {experts.hidden_size} and {width} columns a GPU don't fit Marlin without "
            "padding, which LoRA doesn't know; the latent width must be a multiple of 256 and the columns of 128: "
            "lower the tensor parallelism of the experts (raise rollout.sglang.ep)"
        )


def runs_base_only(batch: Any, *, capturing: bool) -> bool:
    """Whether no request of a batch has an adapter. While a graph is captured all kernels must go into it."""
    return batch is None or not (capturing or batch.has_active_lora)


def install() -> None:
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsFusedMoEMethod
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
    from sglang.srt.layers.quantization.mxfp4_marlin_moe import build_marlin_moe_quant_info
    from sglang.srt.lora.layers import FusedMoEWithLoRA
    from sglang.srt.model_executor.runner import get_is_capture_mode

    from miles_k3.rollout.sglang.hooks.marlin_experts import MarlinSituExperts
    from miles_k3.rollout.sglang.hooks.row_lora import row_hooks

    make, run = FusedMoEWithLoRA.__init__, FusedMoEWithLoRA.forward

    class Packed(CompressedTensorsFusedMoEMethod):
        """The face that the wrapper's constructor asks for; it only gives the weights."""

        def __init__(self) -> None:  # its parent's wants a scheme, which nobody asks here
            self.runner = None

        def get_marlin_quant_info(self, layer: Any) -> Any:
            return build_marlin_moe_quant_info(layer)

    @functools.wraps(make)
    def init(self: Any, base_layer: Any, lora_backend: Any) -> None:
        method = base_layer.quant_method
        packed = isinstance(method, Mxfp4MoEMethod) and method.use_marlin
        if packed:
            refuse_padding(base_layer)
            base_layer.quant_method = Packed()
        try:
            make(self, base_layer, lora_backend)
        finally:
            base_layer.quant_method = self.quant_method = method
        if base_layer.moe_runner_config.activation != "situ":
            return
        self._uses_interleaved_gate_up = False
        if packed:
            self._lora_runner.runner_core = MarlinSituExperts(base_layer.moe_runner_config)

    @functools.wraps(run)
    def forward(self: Any, hidden_states: Any, topk_output: Any, **options: Any) -> Any:
        if runs_base_only(self.lora_backend.batch_info, capturing=get_is_capture_mode()):
            return self.base_layer.forward(hidden_states, topk_output, **options)
        core: Any = getattr(self._lora_runner, "runner_core", None)
        hooks = None
        if ROWS and isinstance(core, MarlinSituExperts):
            hooks = row_hooks(self._get_lora_info(), hidden_states.shape[0])
        if hooks is None:
            return run(self, hidden_states, topk_output, **options)
        dispatcher = self.base_layer.dispatcher
        dispatched = dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
        done = core.run_from_dispatch(dispatched, self._quant_info, self.moe_runner_config, hooks=hooks)
        return dispatcher.combine(combine_input=done)

    FusedMoEWithLoRA.__init__ = init
    FusedMoEWithLoRA.forward = forward
