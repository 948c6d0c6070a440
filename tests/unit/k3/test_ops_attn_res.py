"""AttnRes against fla's naive form: values and gradients to every row and both weights.

Tolerance: fp32 on both sides, sums over 40 channels of scores up to about 10, so 1e-5 of a value near 1 to 10.
"""

from __future__ import annotations

import pytest
import torch
from helpers.fla_oracle import naive_attnres
from torch import Tensor

from miles_k3.k3.ops.attn_res import attn_res, attn_res_naive

T, H = 9, 40
FORMS = pytest.mark.parametrize("form", [attn_res, attn_res_naive])


def draw(rows: int, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows of very different sizes, as prefix and bank have; norm and projection weights."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(rows, generator=rng))
    values = [torch.randn(T, H, generator=rng) * size for size in sizes]
    return values, 1 + 0.3 * torch.randn(H, generator=rng), 0.5 * torch.randn(1, H, generator=rng)


@FORMS
@pytest.mark.parametrize("rows", [2, 3, 9])
def test_values_and_gradients_match_fla(form, rows):
    """fla: q = projection, rms_weight = norm weight, scale 1 (spec 2.2)."""
    values, norm, proj = draw(rows)
    leaves = [t.requires_grad_() for t in (*values, norm, proj)]
    actual = form(values[-1], values[:-1], norm, proj)
    expected = naive_attnres(proj[0], values, norm, rms_eps=1e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    probe = torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((y * probe).sum(), leaves) for y in (actual, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@FORMS
def test_the_order_of_the_rows_does_not_matter(form):
    values, norm, proj = draw(4)
    shuffled = [values[i] for i in (2, 0, 3, 1)]
    expected = form(values[-1], values[:-1], norm, proj)
    torch.testing.assert_close(form(shuffled[-1], shuffled[:-1], norm, proj), expected, rtol=1e-5, atol=1e-5)


@FORMS
def test_equal_scores_give_the_mean_of_the_raw_rows(form):
    values, norm, _ = draw(5)
    mix = form(values[-1], values[:-1], norm, torch.zeros(1, H))
    torch.testing.assert_close(mix, torch.stack(values).mean(0), rtol=1e-5, atol=1e-6)


def test_an_empty_bank_gives_the_prefix():
    values, norm, proj = draw(1)
    assert torch.equal(attn_res(values[0], [], norm, proj), values[0])


@FORMS
def test_a_zero_row_is_harmless(form):
    """rsqrt(0 + eps) is finite; the row scores 0 and adds nothing."""
    values, norm, proj = draw(3)
    values[1] = torch.zeros(T, H, requires_grad=True)
    mix = form(values[-1], values[:-1], norm, proj)
    torch.testing.assert_close(mix, naive_attnres(proj[0], values, norm, rms_eps=1e-5), rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(mix.sum(), values[1])
    assert torch.isfinite(grad).all()


@FORMS
def test_large_scores_do_not_overflow(form):
    values, norm, proj = draw(3)
    mix = form(values[-1], values[:-1], norm, 1000 * proj)
    assert torch.isfinite(mix).all()
    torch.testing.assert_close(mix, naive_attnres(1000 * proj[0], values, norm, rms_eps=1e-5), rtol=1e-3, atol=1e-3)


@FORMS
def test_bf16_rows_are_mixed_in_fp32_and_rounded_once(form):
    """At most one bf16 rounding (2^-8 relative) from the fp32 mix of the same rows; most values agree to the bit."""
    values, norm, proj = draw(6)
    low = [v.bfloat16() for v in values]
    mix = form(low[-1], low[:-1], norm.bfloat16(), proj.bfloat16())
    assert mix.dtype == torch.bfloat16
    exact = naive_attnres(proj.bfloat16()[0], [v.float() for v in low], norm.bfloat16(), rms_eps=1e-5)
    torch.testing.assert_close(mix.float(), exact, rtol=2**-8, atol=1e-4)
    assert (mix == exact.bfloat16()).float().mean() > 0.99
