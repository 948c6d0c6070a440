"""Routed experts on packed codes, their LoRA, and routing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.kernel_cases.common import Draw, case, near
from torch import Tensor

from miles_k3.k3.kernels import grouped_mxfp4 as grouped
from miles_k3.k3.kernels.attn_res_norm import Write, attn_res_norm
from miles_k3.k3.kernels.fused_experts import fused_experts
from miles_k3.k3.kernels.grouped_mxfp4 import Shape, grouped_mxfp4_linear
from miles_k3.k3.kernels.mla_decode import paged_read
from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts
from miles_k3.k3.kernels.router import choose_experts
from miles_k3.k3.kernels.tiles import Tiles, dispatch
from miles_k3.k3.ops import mxfp4
from miles_k3.k3.ops.latent_moe import RENORM_EPS, Dispatch, grouped_linear_naive, latent_experts
from miles_k3.k3.ops.lora import ExpertLoraTerm
from miles_k3.k3.weights import ExpertBank
from miles_k3.trainer.model import experts as trainer_experts
from miles_k3.trainer.model.experts import Factors

LOADS = {
    "ragged": [3, 0, 17, 1, 21], "empty ends": [0, 5, 0], "one token": [0, 1, 0, 0], "all to one": [0, 40, 0],
    "nothing": [0, 0],
}  # fmt: skip
SMALL = Shape(outputs=32, columns=16, rows=16, stages=2)
TWO_PARTS = replace(SMALL, more_rows=16)
NARROW = replace(SMALL, rows=8, warps=2)


@case
def grouped_mxfp4(device: torch.device, dtype: torch.dtype) -> None:
    """Forward and gradient over ragged loads; widths that divide no block, and scale bytes beyond 128."""
    for i, loads in enumerate(LOADS.values()):
        out, width = ((40, 128), (64, 64))[i % 2]
        draw = Draw(device, dtype, i)
        packed, scale = draw.packed(len(loads), out, width, scales=((100, 140), (120, 125))[i % 2])
        weight = PackedExperts.of(packed, scale)
        ends = torch.tensor(loads, device=device).cumsum(0).int()
        x, grad = draw.normal(sum(loads), width).requires_grad_(), draw.normal(sum(loads), out)
        y = grouped_mxfp4_linear(x, weight, ends)
        (dx,) = torch.autograd.grad(y, x, grad)
        x32 = x.detach().float().requires_grad_()
        expected = grouped_linear_naive(x32, mxfp4.dequantize(packed, scale), ends)
        (expected_dx,) = torch.autograd.grad(expected, x32, grad.float())
        near(y, expected, dtype)
        near(dx, expected_dx, dtype)
        if i == 0:
            for shape in (NARROW, SMALL, TWO_PARTS):
                near(grouped.grouped_mxfp4(x.detach(), weight, ends, shape), expected, dtype)
            for shape in (SMALL, TWO_PARTS):
                near(grouped.grouped_mxfp4_transposed(grad, weight, ends, shape), expected_dx, dtype)


@case
def rows_with_gaps(device: torch.device, dtype: torch.dtype) -> None:
    """Columns of a wider tensor: the same result, or a refusal where the kernel wants them without gaps."""
    draw, ends = Draw(device, dtype, 0), torch.tensor([3, 3, 20], device=device).int()
    weight = PackedExperts.of(*draw.packed(3, 64, 128))
    wide = draw.normal(20, 300)
    x = wide[:, 64:192]
    assert torch.equal(grouped.grouped_mxfp4(x, weight, ends), grouped.grouped_mxfp4(x.contiguous(), weight, ends))
    every_second, one_wide = wide[:, ::2], draw.normal(20, 2, 128)[:, 0]
    packs = PackedExperts.of(*draw.packed(3, 128, 64)), PackedExperts.of(*draw.packed(3, 64, 64))
    chosen, weights = draw.chosen(20, 2, 3), draw.normal(20, 2).float()
    fused = partial(fused_experts, situ_beta=4.0, situ_linear_beta=25.0)
    bank, norm, pages = draw.normal(3, 20, 128), draw.normal(128), draw.integers(0, 2, 2).int()
    for refused in (
        lambda: grouped.grouped_mxfp4(every_second[:, :128], weight, ends),
        lambda: grouped.grouped_mxfp4_transposed(wide[:, :64], weight, ends),
        lambda: fused(wide[:, :64], weights, chosen, *packs),
        lambda: fused(wide[:, :64].contiguous(), weights.t().contiguous().t(), chosen, *packs),
        lambda: attn_res_norm(bank, 1, norm.float(), norm, 1e-5, one_wide, Write.ADD),
        lambda: paged_read(draw.normal(2, 4, 160)[..., :80], draw.normal(2, 16, 80), pages[:, None], pages, 64, 0.1),
    ):
        with pytest.raises(ValueError, match="gaps"):
            refused()


@case
def mxfp4_every_code(device: torch.device, dtype: torch.dtype) -> None:
    """All 256 code bytes under all scale bytes that don't overflow: exact, and NaN for scale 255."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)[None]
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)[None].contiguous()
    rows = slice(40, 251) if dtype == torch.bfloat16 else slice(0, 252)
    for chosen in (slice(40, 129), rows, slice(255, 256)):
        packed, scales = codes[:, chosen].contiguous().to(device), scale[:, chosen].contiguous().to(device)
        ends = torch.tensor([32], dtype=torch.int32, device=device)
        at = torch.arange(0, 512, 16)
        x = torch.zeros(32, 512)
        x[torch.arange(32), at] = 1.0  # each row reads one column, so nothing is summed
        x = x.to(device, dtype)
        expected = mxfp4.dequantize(packed, scales)[0, :, at.to(device)].t()
        y = grouped_mxfp4_linear(x, PackedExperts.of(packed, scales), ends)
        if chosen.start == 255:
            packed.fill_(0x11)  # no zero, which would make NaN of an infinite factor too
            y = grouped_mxfp4_linear(torch.ones_like(x[:2]), PackedExperts.of(packed, scales), ends // 16)
            assert y.isnan().all()
        else:
            assert torch.equal(y.float(), expected), (chosen, (y.float() - expected).abs().max())


@case
def tiles_and_dispatch(device: torch.device, dtype: torch.dtype) -> None:
    """The quick launch sorts as torch does and cuts the tiles that `Tiles.of` cuts."""
    for i, (tokens, top_k, experts, block) in enumerate([(1, 1, 1, 1), (1, 4, 9, 16), (37, 3, 11, 4), (90, 5, 7, 32)]):
        chosen = Draw(device, dtype, i).chosen(tokens, top_k, experts)
        routed, twin = dispatch(chosen, experts, block), Dispatch.of(chosen, experts)
        assert torch.equal(routed.order_M.long(), twin.order_M)
        tiles = Tiles.of(twin.ends_E, chosen.numel(), block)
        found, expected = (
            [row for row in zip(*(x.tolist() for x in (t.expert_G, t.start_G, t.rows_G)), strict=True) if row[2]]
            for t in (routed.tiles, tiles)
        )
        assert found == expected


def expert_term(draw: Draw, experts: int, latent: int, inner: int, rank: int, rows: Tensor | None) -> ExpertLoraTerm:
    return ExpertLoraTerm(
        a1=draw.normal(rank, latent) / 8, b1=draw.normal(experts, inner, rank), a3=draw.normal(rank, latent) / 8,
        b3=draw.normal(experts, inner, rank), a2=draw.normal(experts, rank, inner) / 8, b2=draw.normal(latent, rank),
        scaling=0.7, rows_T1=rows,
    )  # fmt: skip


def fp32_term(term: ExpertLoraTerm) -> ExpertLoraTerm:
    factors = {name: getattr(term, name).float() for name in ("a1", "b1", "a3", "b3", "a2", "b2")}
    return ExpertLoraTerm(**factors, scaling=term.scaling, rows_T1=term.rows_T1)


@case
def fused_experts_and_lora(device: torch.device, dtype: torch.dtype) -> None:
    """No adapter, one, and two versions with tokens of neither; ragged loads; every form of a tile."""
    experts, latent, inner, top_k = 5, 64, 64, 3
    betas = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
    cases = [(9, 0, SMALL), (9, 1, NARROW), (11, 2, TWO_PARTS), (1, 1, NARROW)]
    for i, (tokens, adapters, shape) in enumerate(cases):
        draw = Draw(device, dtype, i)
        w13, w2 = draw.packed(experts, 2 * inner, latent), draw.packed(experts, latent, inner)
        z, chosen = draw.normal(tokens, latent), draw.chosen(tokens, top_k, experts)
        chosen[: tokens // 2] = chosen[0]  # some experts get most rows
        weights = draw.normal(tokens, top_k, dtype=torch.float32).sigmoid()
        which = torch.arange(tokens, device=device)[:, None] % 3
        masks = [None] if adapters == 1 else [(which == a).float() for a in range(adapters)]
        terms = [expert_term(draw, experts, latent, inner, 5, mask) for mask in masks]
        packs = PackedExperts.of(*w13), PackedExperts.of(*w2)
        out = fused_experts(z, weights, chosen, *packs, lora=terms, shape=shape, **betas)
        expected = latent_experts(
            z.float(), weights, chosen, mxfp4.dequantize(*w13), mxfp4.dequantize(*w2),
            lora=[fp32_term(t) for t in terms], **betas,
        )  # fmt: skip
        near(out, expected, dtype)


def stable_route(logits: Tensor, bias: Tensor, top_k: int, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """`route` after its product, with a stable sort: of equal scores the lower expert first."""
    scores = torch.sigmoid(logits)
    chosen = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    if forced is not None:
        chosen = torch.where((forced >= 0).all(-1, keepdim=True), forced, chosen)
    weights = scores.gather(1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + RENORM_EPS), chosen


@case
def router(device: torch.device, dtype: torch.dtype) -> None:
    """Random scores, exact ties, saturated scores, negative sums and replayed experts: the same experts in order."""
    for i, (tokens, experts, top_k) in enumerate([(1, 8, 2), (7, 896, 16), (5, 33, 5)]):
        draw = Draw(device, torch.float32, i)
        logits, bias = 3 * draw.normal(tokens, experts), 0.5 * draw.normal(experts)
        forced = draw.integers(0, experts, tokens, top_k)
        forced[::2, 0] = -1
        tied = draw.integers(-2, 3, tokens, experts).float()
        for scores, shift, replay in (
            (logits, bias, None), (tied, torch.zeros_like(bias), None), (torch.zeros_like(logits), bias - 1, None),
            (200 * logits, torch.zeros_like(bias), None), (logits, bias, forced),
        ):  # fmt: skip
            found = choose_experts(scores, shift, top_k=top_k, renormalize=True, scaling=1.0, forced_TK=replay)
            expected = stable_route(scores, shift, top_k, replay)
            assert torch.equal(found[1], expected[1]), (i, found[1], expected[1])
            near(found[0], expected[0], torch.float32)


@case
def experts_of_the_trainer(device: torch.device, dtype: torch.dtype) -> None:
    """`expert_rows` on packed codes against itself on unpacked weights: the output and every gradient.

    As the layer calls it: the rows and their low products are columns of one tensor, which other rows lie between.
    """
    experts, latent, inner, rank, scaling = 4, 64, 64, 8, 0.7
    draw = Draw(device, dtype, 0)
    w13, w2 = draw.packed(experts, 2 * inner, latent), draw.packed(experts, latent, inner)
    ends = torch.tensor([3, 3, 20, 26], device=device).cumsum(0).int()
    rows = int(ends[-1])
    factors = (
        draw.normal(experts, inner, rank), draw.normal(experts, inner, rank), draw.normal(experts, rank, inner) / 8,
        draw.normal(latent, rank),
    )  # fmt: skip
    wide, weight, grad = (
        draw.normal(rows, latent + 2 * rank),
        draw.normal(rows).float().sigmoid(),
        draw.normal(rows, latent),
    )
    found = []
    for takes in (False, True):
        bank = ExpertBank(*w13, *w2)
        inputs = [t.clone().requires_grad_() for t in (wide, weight, *factors)]
        before, trainer_experts.takes_kernels = trainer_experts.takes_kernels, lambda _, takes=takes: takes
        try:
            x, *low = inputs[0].split([latent, rank, rank], dim=-1)
            lora = Factors(*low, *inputs[2:])
            out = trainer_experts.expert_rows(x, inputs[1], ends, bank, (4.0, 25.0), scaling, lora)
            found.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
        finally:
            trainer_experts.takes_kernels = before
    for plain, fused in zip(*found, strict=True):
        near(fused, plain, dtype)
