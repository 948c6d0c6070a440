"""MLA's output gate under LoRA.

SGLang applies it in a closure over o_proj's forward. A LoRA wrapper around o_proj computes the base product by itself
and never calls that forward, so with LoRA switched on the gate is gone, whatever the adapter. Here the wrapper gates
its input first.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

_OWNER = "miles_k3_gated_by"  # on o_proj: a weak reference to its attention, which has one to o_proj already


def take_gate(attention: Any) -> torch.Tensor:
    """What the attention left for o_proj to multiply by, before the sigmoid: [tokens, heads * v_head_dim].

    Raises RuntimeError when there is none: the product would silently be an ungated one.
    """
    inputs, made = attention._gate_hidden_states, attention._gate_precomputed
    attention._gate_hidden_states = attention._gate_precomputed = None
    if made is not None:
        gate, stream = made
        torch.cuda.current_stream().wait_stream(stream)
        return gate
    if inputs is None:
        raise RuntimeError("o_proj of an MLA layer was called without its attention: there is nothing to gate it with")
    return attention.g_proj(inputs)[0]


def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), by SGLang's kernel where it covers the shapes."""
    if x.is_cuda:
        from sglang.kernels.ops.kimi_k3 import mla_output_gate

        if mla_output_gate.covered(x, gate):
            return mla_output_gate.kimi_k3_mla_output_gate(x, gate)
    return x * torch.sigmoid(gate)


def install() -> None:
    from sglang.srt.lora.layers import RowParallelLinearWithLoRA
    from sglang.srt.models.kimi_k3 import KimiK3MLAAttention

    make, run = KimiK3MLAAttention.__init__, RowParallelLinearWithLoRA.forward

    @functools.wraps(make)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        if self.use_output_gate:
            setattr(self.o_proj, _OWNER, weakref.ref(self))

    @functools.wraps(run)
    def forward(self: Any, input_: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        owner = getattr(self.base_layer, _OWNER, None)
        if owner is not None:
            input_ = gated(input_, take_gate(owner()))
        return run(self, input_, *arguments, **options)

    KimiK3MLAAttention.__init__ = init
    RowParallelLinearWithLoRA.forward = forward
