"""The shares of the report, beside sums written out number by number, and on deltas whose loss is known."""

import math

import pytest
import torch

from miles_k3.export.rounding import Losses, bf16_loss, mxfp4_loss
from miles_k3.k3.ops import mxfp4

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grid(*shape, seed=0):
    """Weights that MXFP4 holds."""
    return mxfp4.dequantize(*mxfp4.quantize(seeded(*shape, seed=seed)))


def by_hand(base, delta, stored, half_step):
    sums = dict.fromkeys(("energy", "below", "error", "along"), 0.0)
    for w, d, v, half in zip(*(t.flatten().tolist() for t in (base, delta, stored, half_step)), strict=True):
        sums["energy"] += d * d
        sums["below"] += d * d if abs(d) < half else 0.0
        sums["error"] += (v - w - d) ** 2
        sums["along"] += (v - w) * d
    return sums


@pytest.mark.parametrize("scale", [1e-4, 3e-3, 0.1])
def test_bf16(scale):
    base, delta = seeded(5, 64).to(torch.bfloat16).float(), scale * seeded(5, 64, seed=1)
    base[0, :3] = 0.0
    stored = (base + delta).to(torch.bfloat16).float()
    half = torch.tensor([[0.0 if w == 0 else 2.0 ** (math.floor(math.log2(abs(w))) - 8) for w in row] for row in base])
    loss = bf16_loss(base, delta, stored)
    for name, value in by_hand(base, delta, stored, half).items():
        assert getattr(loss, name) == pytest.approx(value, rel=1e-5, abs=1e-12), name
    lost = (delta.abs() < half * 0.999) & (base != 0)
    outwards = base * delta > 0  # inwards of a power of two the steps are half as long
    assert torch.equal(stored[lost & outwards], base[lost & outwards]), "what is below half a step vanishes"
    assert loss.changed == int((stored != base).sum())


@pytest.mark.parametrize("scale", [1e-3, 0.05, 0.4])
def test_mxfp4(scale):
    base, delta = grid(6, 96), scale * seeded(6, 96, seed=1)
    base[1, 32:64] = 0.0
    packed, exponent = mxfp4.quantize(base + delta, least_error=True)
    half = torch.zeros_like(base)
    _, own = mxfp4.quantize(base)
    for r in range(6):
        for c in range(96):
            unit = 2.0 ** (int(own[r, c // 32]) - 127)
            level = LEVELS.index(abs(float(base[r, c])) / unit)
            outwards = level == 0 or float(base[r, c] * delta[r, c]) >= 0
            half[r, c] = (
                unit * (LEVELS[level + 1] - LEVELS[level] if outwards else LEVELS[level] - LEVELS[level - 1]) / 2
            )
    half[1, 32:64] = 0.0  # an empty group takes the delta's own scale
    loss = mxfp4_loss(base, delta, packed, exponent)
    for name, value in by_hand(base, delta, mxfp4.dequantize(packed, exponent), half).items():
        assert getattr(loss, name) == pytest.approx(value, rel=1e-5, abs=1e-12), name
    assert (loss.groups, loss.rescaled) == (18, int((exponent != own).sum()))


def test_a_delta_of_whole_steps_is_kept_and_a_tiny_one_is_lost():
    base = torch.full((1, 32), 4.0)
    base[0, 0] = 6.0
    delta = torch.where(base == 4.0, 2.0, 0.0)
    kept = mxfp4_loss(base, delta, *mxfp4.quantize(base + delta)).shares()
    assert (kept["below_half_step"], kept["error"], kept["kept"]) == (0.0, 0.0, 1.0)
    lost = mxfp4_loss(base, delta / 100, *mxfp4.quantize(base + delta / 100)).shares()
    assert (lost["below_half_step"], lost["error"], lost["kept"]) == (1.0, 1.0, 0.0)


def test_least_error_never_loses_more_than_the_whole_delta():
    """The published scale doubles where a group's largest code grows a little; half of it is then nearer."""
    base, delta = grid(64, 256), 0.002 * seeded(64, 256, seed=1)
    published = mxfp4_loss(base, delta, *mxfp4.quantize(base + delta)).shares()
    least = mxfp4_loss(base, delta, *mxfp4.quantize(base + delta, least_error=True)).shares()
    assert published["error"] > 20
    assert least["error"] <= 1.0


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_least_error_takes_the_better_of_the_two_scales(magnitude):
    weight = magnitude * seeded(32, 128)
    (usual, usual_scale), (found, scale) = (mxfp4.quantize(weight, least_error=x) for x in (False, True))
    shift = usual_scale.int() - scale.int()
    assert set(shift.unique().tolist()) <= {0, 1}

    def error(packed, scale):
        apart = (mxfp4.dequantize(packed, scale) - weight).double() / magnitude
        return apart.square().unflatten(-1, (-1, 32)).sum(-1)

    assert (error(found, scale) <= error(usual, usual_scale)).all()
    assert (error(found, scale) < error(usual, usual_scale))[shift == 1].all()


def test_least_error_leaves_what_was_mxfp4_as_it_was():
    weight = grid(16, 128)
    for one, other in zip(mxfp4.quantize(weight), mxfp4.quantize(weight, least_error=True), strict=True):
        assert torch.equal(one, other)


def test_losses_add_up_by_kind_and_survive_json():
    losses = Losses()
    losses.note("kda", bf16_loss(torch.ones(4), torch.ones(4), 2 * torch.ones(4)))
    first = losses.take()
    assert not losses
    losses.note("kda", bf16_loss(torch.ones(4), torch.ones(4), torch.ones(4)))
    losses.note("mla", bf16_loss(torch.ones(2), torch.ones(2), 2 * torch.ones(2)))
    merged = Losses.merged([first, losses.take()])
    assert merged["kda"].shares()["kept"] == 0.5
    assert merged.total().shares()["kept"] == 0.6
    assert merged.total().numbers == 10
