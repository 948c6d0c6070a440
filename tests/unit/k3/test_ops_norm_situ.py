"""RMSNorm's cast order, the L2 norm's eps, SiTU's two clips."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from miles_k3.k3.ops.norm import l2_norm, rms_norm
from miles_k3.k3.ops.situ import situ


def test_rms_norm_matches_torch_in_fp32_with_gradients():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(7, 24, generator=rng, requires_grad=True)
    weight = (1 + 0.3 * torch.randn(24, generator=rng)).requires_grad_()
    ours, theirs = rms_norm(x, weight, 1e-5), F.rms_norm(x, (24,), weight, 1e-5)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad((y**2).sum(), (x, weight)) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_rms_norm_casts_first_and_multiplies_by_the_weight_after():
    """Bit for bit: the normalised value is rounded to bf16, then the product is rounded again."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(64, 96, generator=rng).bfloat16()
    weight = (1 + 0.3 * torch.randn(96, generator=rng)).bfloat16()
    x32 = x.float()
    unit = x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + 1e-5)
    expected = (unit.bfloat16().float() * weight.float()).bfloat16()
    weight_first = (unit * weight.float()).bfloat16()
    assert not torch.equal(expected, weight_first), "the draw must tell the two orders apart"
    actual = rms_norm(x, weight, 1e-5)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected)


def test_rms_norm_eps_is_inside_the_root():
    x = torch.full((1, 4), 1e-3)
    torch.testing.assert_close(rms_norm(x, torch.ones(4), 1e-5), x / math.sqrt(1e-6 + 1e-5))
    assert torch.equal(rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-5), torch.zeros(1, 4))


def test_rms_norm_keeps_a_large_bf16_row_finite():
    """Squares are taken in fp32: 1e30 squared would overflow bf16 only at 1e38, but fp16-like shortcuts earlier."""
    x = torch.full((1, 8), 1e15, dtype=torch.bfloat16)
    torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-5), torch.ones(1, 8, dtype=torch.bfloat16))


def test_l2_norm_sums_and_has_its_eps_inside_the_root():
    x = torch.tensor([[3.0, 4.0], [1e-3, 0.0], [0.0, 0.0]], requires_grad=True)
    y = l2_norm(x)
    expected = torch.tensor([[0.6, 0.8], [math.sqrt(0.5), 0.0], [0.0, 0.0]])
    torch.testing.assert_close(y, expected)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.isfinite(grad).all()
    torch.testing.assert_close(grad[2], torch.full((2,), 1e3))


def test_l2_norm_of_bf16_is_fp32():
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert l2_norm(x).dtype == torch.float32
    assert torch.equal(l2_norm(x), l2_norm(x.float()))


# Spec 7.3, 14: both branches saturate, and the sigmoid sees the gate before the tanh.
@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (100.0, 100.0, 4 * 25 * math.tanh(4)),  # 99.93
        (100.0, -100.0, -4 * 25 * math.tanh(4)),
        (-100.0, 100.0, 0.0),
        (4.0, 25.0, 4 * math.tanh(1) / (1 + math.exp(-4)) * 25 * math.tanh(1)),
        (0.01, 0.02, 0.01 / (1 + math.exp(-0.01)) * 0.02),  # SiLU(g) * u
        (0.0, 7.0, 0.0),
        (3.0, 0.0, 0.0),
    ],
)
def test_situ_values(gate, up, expected):
    actual = situ(torch.tensor(gate), torch.tensor(up), 4.0, 25.0).item()
    assert actual == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_situ_is_silu_times_up_for_small_inputs_only():
    rng = torch.Generator().manual_seed(3)
    gate, up = torch.randn(2, 100, generator=rng)
    torch.testing.assert_close(situ(gate, up, 1e4, 1e4), F.silu(gate) * up, rtol=1e-4, atol=1e-5)
    assert (situ(8 * gate, up, 4.0, 25.0) - F.silu(8 * gate) * up).abs().max() > 1


def test_situ_uses_the_given_betas():
    gate, up = torch.tensor([50.0]), torch.tensor([500.0])
    torch.testing.assert_close(situ(gate, up, 3.0, 10.0), torch.tensor([30.0]))


def test_situ_gradients_and_bf16():
    rng = torch.Generator().manual_seed(4)
    gate, up = (t.requires_grad_() for t in 6 * torch.randn(2, 40, dtype=torch.float64, generator=rng))
    b, lb = 4.0, 25.0
    ours = situ(gate, up, b, lb)
    theirs = b * torch.tanh(gate / b) * torch.sigmoid(gate) * lb * torch.tanh(up / lb)
    for x, y in zip(*(torch.autograd.grad(t.sum(), (gate, up)) for t in (ours, theirs)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)  # ours is computed in fp32
    low = situ(gate.bfloat16(), up.bfloat16(), b, lb)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, situ(gate.bfloat16().float(), up.bfloat16().float(), b, lb).bfloat16())
