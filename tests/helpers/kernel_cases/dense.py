"""Dense products and their LoRA."""

from __future__ import annotations

import torch
from helpers.kernel_cases.common import Draw, case, near

from miles_k3.k3.kernels.dense_lora import segmented_lora_, situ_with_lora
from miles_k3.k3.kernels.skinny import MOST_ROWS, Product, products_
from miles_k3.k3.ops.lora import LoraTerm, lora_delta
from miles_k3.k3.ops.situ import situ


@case
def segmented_lora(device: torch.device, dtype: torch.dtype) -> None:
    """Tokens of two adapters and of none, in any order; strided rows; an input width that divides no block."""
    for seed, (tokens, width, out, rank) in enumerate([(1, 40, 24, 4), (70, 200, 100, 5), (16, 1030, 64, 16)]):
        draw = Draw(device, dtype, seed)
        x, y = draw.normal(tokens, 2 * width)[:, :width], draw.normal(tokens, out + 3)[:, :out]
        factors = [(draw.normal(rank, width) / width**0.5, draw.normal(out, rank)) for _ in range(2)]
        slot = draw.integers(-1, 2, tokens, dtype=torch.int32)
        terms = [
            LoraTerm(a.float(), b.float(), s, (slot == i).float()[:, None])
            for i, ((a, b), s) in enumerate(zip(factors, (0.5, 2.0), strict=True))
        ]
        delta = lora_delta(x.float(), terms)
        assert delta is not None
        expected, before = y.float() + delta, y.clone()
        assert segmented_lora_(y, x, slot, factors, (0.5, 2.0)) is y
        near(y, expected, dtype)
        assert torch.equal(y[slot < 0], before[slot < 0])


@case
def skinny_products(device: torch.device, dtype: torch.dtype) -> None:
    """One row, a few, the most and more: weights of all sizes in one launch, strided outputs, fp32 ones, added ones."""
    for seed, (rows, inputs) in enumerate([(1, 40), (1, 2048), (3, 200), (MOST_ROWS, 64), (MOST_ROWS + 1, 96)]):
        draw = Draw(device, dtype, seed)
        x = draw.normal(rows, inputs + 5)[:, :inputs]
        weights = [draw.normal(width, inputs) / inputs**0.5 for width in (70, 1, 129)]
        side = torch.full((rows, 80), float("nan"), device=device, dtype=dtype)
        before = draw.normal(rows, 129)
        products = [
            Product(weights[0], side[:, 3:73]),
            Product(weights[1], torch.empty(rows, 1, device=device)),
            Product(weights[2], before.clone(), add=True),
        ]
        products_(x, products)
        for p, old in zip(products, (0.0, 0.0, before.float()), strict=True):
            near(p.out_TO, old + x.float() @ p.weight_OI.float().t(), dtype)
        assert side[:, :3].isnan().all()
        assert side[:, 73:].isnan().all()


@case
def situ_lora(device: torch.device, dtype: torch.dtype) -> None:
    """Without an adapter; gate and up with one A and with two; tokens of two adapters and of none."""
    width, rank, betas = 72, 5, (4.0, 25.0)
    for seed, (tokens, shared) in enumerate([(1, True), (21, False), (70, True)]):
        draw = Draw(device, dtype, seed)
        h, slot = 3 * draw.normal(tokens, 2 * width), draw.integers(-1, 2, tokens, dtype=torch.int32)
        near(situ_with_lora(h, betas), situ(h[:, :width].float(), h[:, width:].float(), *betas), dtype)
        lows = [draw.normal(2, tokens, rank).float() for _ in range(1 if shared else 2)]
        bs = [[draw.normal(width, rank) for _ in range(2)] for _ in range(2)]
        halves = []
        for half, low, factors in zip(h.float().chunk(2, dim=1), (lows[0], lows[-1]), bs, strict=True):
            total = half
            for s, scaling in enumerate((0.5, 2.0)):
                mine = (slot == s)[:, None].float()
                total = total + mine * scaling * (low[s].to(dtype).float() @ factors[s].float().t())
            halves.append(total)
        out = situ_with_lora(h, betas, lows[0], None if shared else lows[1], slot, bs[0], bs[1], (0.5, 2.0))
        near(out, situ(halves[0], halves[1], *betas), dtype)
