# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""The router's choice in one kernel: sigmoid, bias, top-k, renormalised weights (spec 2.6, steps 1 to 3).

Shapes: T tokens, H hidden, E experts, K chosen experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from miles_k3.k3.kernels.launch import INTERPRETED, dependent, power_of_two, wait_for_inputs
from miles_k3.k3.ops.latent_moe import RENORM_EPS


def router_logits(x_TH: Tensor, gate_weight_EH: Tensor) -> Tensor:
    """fp32 [T, E]. Products of bfloat16 are exact in fp32, so on a GPU no operand is copied to fp32."""
    if x_TH.is_cuda and x_TH.dtype == gate_weight_EH.dtype == torch.bfloat16:
        return torch.mm(x_TH, gate_weight_EH.t(), out_dtype=torch.float32)
    return x_TH.float() @ gate_weight_EH.float().t()


def choose_experts(logits_TE: Tensor, bias_E: Tensor, *, top_k: int, renormalize: bool, scaling: float,
                   forced_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights fp32 [T, K], experts int64 [T, K], best first) of fp32 logits: `ops.latent_moe.route` after its product.

    Of equal scores the lower expert number comes first (torch.topk leaves that open). `forced_TK` as in `route`.
    """
    num_tokens, num_experts = logits_TE.shape
    weights = torch.empty(num_tokens, top_k, device=logits_TE.device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    if num_tokens:
        _choose[(num_tokens,)](
            logits_TE, bias_E, experts if forced_TK is None else forced_TK, weights, experts, num_experts,
            logits_TE.stride(0), scaling, TOP_K=top_k, K_BLOCK=power_of_two(top_k), BLOCK=power_of_two(num_experts),
            FORCED=forced_TK is not None, RENORMALIZE=renormalize, EPS=RENORM_EPS, EXACT=not INTERPRETED, num_warps=1,
            **dependent(),
        )  # fmt: skip
    return weights, experts


@triton.jit
def _sigmoid(x, EXACT: tl.constexpr):
    """As torch computes it on a GPU, to the last bit: the fast exponential would reorder near ties."""
    if EXACT:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + libdevice.exp(-x))
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _choose(logit_ptr, bias_ptr, forced_ptr, weight_ptr, expert_ptr, num_experts, stride, scaling, TOP_K: tl.constexpr,
            K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, FORCED: tl.constexpr, RENORMALIZE: tl.constexpr,
            EPS: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < num_experts
    logit_ptr += token * stride
    score = _sigmoid(tl.load(logit_ptr + expert, mask=inside, other=0.0), EXACT) + tl.load(
        bias_ptr + expert, mask=inside, other=0.0
    )
    # A float's bits order as integers once negatives flip; a warp finds the largest integer in one instruction.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    LOWEST: tl.constexpr = -(1 << 31)
    key = tl.where(inside, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST)
    k = tl.arange(0, K_BLOCK)
    chosen = tl.zeros([K_BLOCK], tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.min(tl.where(key == tl.max(key, 0), expert, BLOCK), 0)
        chosen = tl.where(k == place, best, chosen)
        key = tl.where(expert == best, LOWEST, key)
    real = k < TOP_K
    if FORCED:
        forced = tl.load(forced_ptr + token * TOP_K + k, mask=real, other=0).to(tl.int32)
        chosen = tl.where(tl.min(forced, 0) >= 0, forced, chosen)
    weight = tl.where(real, _sigmoid(tl.load(logit_ptr + chosen, mask=real, other=0.0), EXACT), 0.0)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + EPS)
    tl.store(weight_ptr + token * TOP_K + k, weight * scaling, mask=real)
    tl.store(expert_ptr + token * TOP_K + k, chosen.to(tl.int64), mask=real)
