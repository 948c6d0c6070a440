"""The short convolution against torch's conv1d and SiLU, packed, with and without windows of earlier tokens.

Tolerance: four products in fp32, 1e-6 is ten roundings.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from miles_k3.k3.ops.packed import Packed
from miles_k3.k3.ops.short_conv import next_window, push_window, short_conv, short_conv_naive, short_conv_step

D, W = 6, 4
LENGTHS = (1, 2, 3, 4, 5, 17)
FORMS = pytest.mark.parametrize("form", [short_conv, short_conv_naive])


def draw(lengths=LENGTHS, width: int = W) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(sum(lengths), D, generator=rng)
    weight = torch.randn(D, 1, width, generator=rng)
    return x, weight, torch.randn(len(lengths), width - 1, D, generator=rng)


def oracle(x: Tensor, weight: Tensor, lengths, window: Tensor | None = None) -> Tensor:
    """conv1d of each sequence behind its window (zeros without one); the last tap meets the current token."""
    out = []
    for b, part in enumerate(x.split(list(lengths))):
        past = torch.zeros(weight.shape[-1] - 1, D) if window is None else window[b]
        out.append(F.silu(F.conv1d(torch.cat([past, part]).T[None], weight, groups=D)[0].T))
    return torch.cat(out)


@FORMS
@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("with_window", [False, True])
def test_values_and_gradients_match_conv1d(form, width, with_window):
    leaves = [t.requires_grad_() for t in draw(width=width)[: 2 + with_window]]
    actual = form(leaves[0], leaves[1], Packed.from_lengths(LENGTHS), *leaves[2:])
    expected = oracle(leaves[0], leaves[1], LENGTHS, *leaves[2:])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((y * probe).sum(), leaves) for y in (actual, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@FORMS
def test_last_tap_is_the_current_token(form):
    """An impulse comes back as the taps in reverse: index 3 now, index 0 three tokens later."""
    x = torch.zeros(6, D)
    x[1] = 1.0
    taps = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(D, 1, W)
    y = form(x, taps, Packed.from_lengths((6,)))
    torch.testing.assert_close(y[:, 0], F.silu(torch.tensor([0.0, 0.4, 0.3, 0.2, 0.1, 0.0])))


@FORMS
def test_a_neighbour_never_shows(form):
    x, weight, _ = draw()
    packed = Packed.from_lengths(LENGTHS)
    before = form(x, weight, packed)
    start, end = packed.cu_seqlens[3].item(), packed.cu_seqlens[4].item()
    poisoned = torch.full_like(x, torch.nan)
    poisoned[start:end] = x[start:end]
    assert torch.equal(form(poisoned, weight, packed)[start:end], before[start:end])


@FORMS
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 10])
def test_windows_carry_a_cut_sequence(form, cut):
    """Convolving [0, cut) and then the rest from `next_window` equals the uncut sequence, also cuts below W - 1."""
    x, weight, window = draw((13, 12))
    whole = form(x, weight, Packed.from_lengths((13, 12)), window)
    first, second = x.split([13, 12])
    heads = torch.cat([first[:cut], second[:cut]])
    tails = torch.cat([first[cut:], second[cut:]])
    head_packed, tail_packed = Packed.from_lengths((cut, cut)), Packed.from_lengths((13 - cut, 12 - cut))
    carried = next_window(heads, head_packed, W, window)
    tail = form(tails, weight, tail_packed, carried)
    torch.testing.assert_close(tail[: 13 - cut], whole[cut:13], rtol=0, atol=1e-6)
    torch.testing.assert_close(tail[13 - cut :], whole[13 + cut :], rtol=0, atol=1e-6)
    after = next_window(tails, tail_packed, W, carried)
    assert torch.equal(after, torch.stack([first[-3:], second[-3:]]))


@pytest.mark.parametrize("with_window", [False, True])
def test_next_window_is_the_last_raw_inputs(with_window):
    """Left-filled from the old window, or with zeros, when the sequence is shorter than the window."""
    x, _, window = draw()
    past = window if with_window else torch.zeros_like(window)
    rows = [torch.cat([past[b], part])[-(W - 1) :] for b, part in enumerate(x.split(list(LENGTHS)))]
    actual = next_window(x, Packed.from_lengths(LENGTHS), W, window if with_window else None)
    assert torch.equal(actual, torch.stack(rows))


def test_steps_equal_the_whole_sequence():
    x, weight, _ = draw((8, 8))
    whole = short_conv(x, weight, Packed.from_lengths((8, 8))).view(2, 8, D)
    window = torch.zeros(2, W - 1, D)
    for t in range(8):
        token = x.view(2, 8, D)[:, t]
        torch.testing.assert_close(short_conv_step(token, weight, window), whole[:, t], rtol=0, atol=1e-6)
        before = window.clone()
        window, old = push_window(token, window), window
        assert torch.equal(old, before)
    assert torch.equal(window, x.view(2, 8, D)[:, -3:])


@FORMS
def test_bf16_is_summed_in_fp32(form):
    """Rounded once, at the end."""
    x, weight, window = draw()
    low = x.bfloat16()
    y = form(low, weight, Packed.from_lengths(LENGTHS), window)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, form(low.float(), weight, Packed.from_lengths(LENGTHS), window).bfloat16())
