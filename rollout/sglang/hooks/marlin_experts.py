"""The routed experts of a batch with adapters: Marlin's two products, SiTU between them, LoRA behind each.

Shapes: T tokens, K experts a token, Z latent width, I an expert's width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# (rows in, rows out, by how many experts each row in is taken, whether rows out are weighted)
Product = Callable[[Tensor, Tensor, int, bool], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The two products of a layer's experts, for the experts that the tokens chose, and what comes between."""

    first: Product  # latent -> gate | up
    second: Product  # activated -> latent, times the router's weight
    activate: Callable[[Tensor, Tensor], None]  # gate | up [T*K, 2I] into [T*K, I]
    total: Callable[[Tensor], Tensor]  # [T, K, Z] summed over K in fp32
    width: int


def run_experts(z_TZ: Tensor, weights_TK: Tensor, chosen_TK: Tensor, experts: Experts, hooks: Any) -> Tensor:
    """sum over K of weight * W2 SiTU(W13 z), with what `hooks` add before the activation and before the sum: [T, Z]."""
    num_tokens, latent = z_TZ.shape
    k, width = chosen_TK.shape[1], experts.width
    gate_up = experts.first(z_TZ, z_TZ.new_empty(num_tokens * k, 2 * width), k, False)
    if hooks.after_gate_up:
        hooks.after_gate_up(z_TZ, gate_up.view(num_tokens, k, 2 * width), weights_TK, chosen_TK)
    activated = z_TZ.new_empty(num_tokens * k, width)
    experts.activate(gate_up, activated)
    # Rows of experts on other ranks are left alone by Marlin, so they must be 0 from the start.
    down = experts.second(activated, z_TZ.new_zeros(num_tokens * k, latent), 1, True).view(num_tokens, k, latent)
    if hooks.after_down:
        hooks.after_down(activated, down, weights_TK, chosen_TK)
    return experts.total(down)  # no routed scaling: K3 normalises what comes out


class MarlinSituExperts:
    """What SGLang's MoeRunner calls as its core. Needs compute capability 9."""

    def __init__(self, config: Any) -> None:
        if config.activation != "situ" or config.gemm1_alpha is None or config.gemm1_clamp_limit is None:
            raise ValueError(
                f"experts with activation {config.activation!r}, betas {config.gemm1_alpha} and "
                f"{config.gemm1_clamp_limit} came to a runner that knows SiTU with two betas only"
            )
        self._config = config

    def run_from_dispatch(self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None) -> Any:
        """The experts' sum for a dispatched batch. Raises RuntimeError without `hooks`: the batch has adapters."""
        from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import situ_and_mul
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        if hooks is None:
            raise RuntimeError("MarlinSituExperts was called without LoRA hooks; the base layer serves such batches")
        z, routes = dispatch_output.hidden_states.contiguous(), dispatch_output.topk_output
        weights, chosen = routes.topk_weights.contiguous(), routes.topk_ids.contiguous()  # as every kernel reads them
        beta, linear_beta = self._config.gemm1_alpha, self._config.gemm1_clamp_limit
        marlin = _Marlin(z, weights, chosen, quant_info)
        experts = Experts(
            first=marlin.first, second=marlin.second, total=_total, width=marlin.width,
            activate=lambda gate_up, out: situ_and_mul(out, gate_up, beta, linear_beta),
        )  # fmt: skip
        return StandardCombineInput(hidden_states=run_experts(z, weights, chosen, experts, hooks))


class _Marlin:
    """Marlin's products over one batch's routes; both share the rows' order by expert and the work space."""

    def __init__(self, z: Tensor, weights: Tensor, chosen: Tensor, packed: Any) -> None:
        from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace

        self._packed, self._weights = packed, weights
        self.width = packed.w2_qweight.shape[1] * 16
        self._ep = packed.expert_map is not None
        count = packed.w13_qweight.shape[0]
        self._block = rows_per_block(chosen.numel(), count)
        self._order = _order_rows(chosen, self._block, packed.global_num_experts if self._ep else count, self._ep)
        # Not shared between calls: captured graphs would wait on each other's locks in it.
        self._workspace = marlin_make_workspace(z.device, max_blocks_per_sm=4)

    def first(self, rows: Tensor, out: Tensor, top_k: int, weighted: bool) -> Tensor:
        return self._product("w13", rows, out, top_k, weighted)

    def second(self, rows: Tensor, out: Tensor, top_k: int, weighted: bool) -> Tensor:
        return self._product("w2", rows, out, top_k, weighted)

    def _product(self, which: str, rows: Tensor, out: Tensor, top_k: int, weighted: bool) -> Tensor:
        from sglang.kernels.ops.moe.moe_wna16_marlin import moe_wna16_marlin_gemm
        from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import get_scalar_type

        bias, qweight, scales, whole_scale, zeros, group, order = (
            getattr(self._packed, f"{which}_{part}")
            for part in ("bias", "qweight", "scales", "global_scale", "qzeros", "g_idx", "g_idx_sort_indices")
        )
        kind = get_scalar_type(self._packed.weight_bits, zeros is not None, scales, whole_scale)
        return moe_wna16_marlin_gemm(
            rows, out, qweight, bias, scales, whole_scale, zeros, group, order, self._workspace, *self._order,
            self._weights, moe_block_size=self._block, top_k=top_k, mul_topk_weights=weighted, is_ep=self._ep,
            b_q_type=kind, size_m=rows.shape[0], size_n=out.shape[1], size_k=rows.shape[1],
            is_k_full=self._packed.is_k_full, use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False,
        )  # fmt: skip


def _total(down_TKZ: Tensor) -> Tensor:
    """By the kernel that SGLang sums the base's experts with."""
    from sglang.kernels.ops.moe.moe_topk_sum import moe_topk_sum

    return moe_topk_sum(down_TKZ, down_TKZ.new_empty(down_TKZ.shape[0], down_TKZ.shape[2]))


def rows_per_block(rows: int, experts: int) -> int:
    """Marlin's tile height: the lowest at which tiles are on average not full."""
    return next((block for block in (8, 16, 32, 48) if rows / experts / block < 0.9), 64)


def _order_rows(chosen: Tensor, block: int, experts: int, ep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by expert, padded to whole tiles: their numbers, each tile's expert, and how many there are."""
    if chosen.shape[0] == 1 and chosen.shape[1] <= 32 and chosen.dtype == torch.int32 and not ep:
        from sglang.kernels.ops.moe.moe_align_single_token import moe_align_single_token

        return moe_align_single_token(chosen, block)
    from sglang.srt.layers.moe.fused_moe_triton import moe_align_block_size

    return moe_align_block_size(chosen, block, experts)
