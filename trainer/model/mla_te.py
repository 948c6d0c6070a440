"""MLA's core attention through TransformerEngine, where it is installed: its own context parallelism, thd format.

Chosen by `trainer.mla_attention: transformer_engine`. Each rank keeps its own keys and values and passes them round;
TransformerEngine expects the tokens in our zigzag order and sequence lengths that are multiples of 2 * cp.
Shape legend: L tokens of this rank, N heads of this rank, Q query channels, V value channels.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from miles_k3.errors import LaunchError
from miles_k3.k3.config import K3Config
from miles_k3.trainer.mcore import TransformerConfig
from miles_k3.trainer.model.context import TokenLayout


def te_problem(device: torch.device | str) -> str | None:
    """Why TransformerEngine's attention can't run here; None when it can."""
    if find_spec("transformer_engine") is None:
        return (
            "trainer.mla_attention is transformer_engine, but TransformerEngine is not installed; install it with "
            '`pip install "miles-k3[gpu]"`, or set trainer.mla_attention: torch'
        )
    if torch.device(device).type != "cuda":
        return (
            f"trainer.mla_attention is transformer_engine, but the model is on {device} and TransformerEngine computes "
            "on CUDA; set trainer.mla_attention: torch"
        )
    return None


class TeAttention(nn.Module):
    """Causal attention within each packed sequence, over context-parallel ranks. Raises LaunchError without TE."""

    def __init__(self, config: TransformerConfig, k3: K3Config, layer: int, device: torch.device | str) -> None:
        super().__init__()
        if (problem := te_problem(device)) is not None:
            raise LaunchError(problem)
        from megatron.core.extensions.transformer_engine import TEDotProductAttention
        from megatron.core.transformer.enums import AttnMaskType

        self.core = TEDotProductAttention(
            config, layer + 1, AttnMaskType.padding_causal, "self", attention_dropout=0.0,
            softmax_scale=k3.qk_head_dim**-0.5, k_channels=k3.qk_head_dim, v_channels=k3.v_head_dim, cp_comm_type="p2p",
        )  # fmt: skip

    def forward(self, q_LNQ: Tensor, k_LNQ: Tensor, v_LNV: Tensor, layout: TokenLayout) -> Tensor:
        """[L, N, V]."""
        from megatron.core.transformer.enums import AttnMaskType

        q, k, v = (x.contiguous() for x in (q_LNQ, k_LNQ, v_LNV))
        mask, packed = AttnMaskType.padding_causal, _packed(layout, q.device)
        out = self.core(q, k, v, None, attn_mask_type=mask, packed_seq_params=packed)
        return out.view(*v_LNV.shape)


def _packed(layout: TokenLayout, device: torch.device) -> Any:
    """The whole stream's boundaries: TransformerEngine takes each rank's part of them itself."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor(layout.cu_seqlens, dtype=torch.int32, device=device)
    longest = max(layout.lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip
