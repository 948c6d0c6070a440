"""What must hold of the MXFP4 codec for any weights: against a scalar twin, and against itself."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from miles_k3.k3.ops.mxfp4 import LEVELS, dequantize, quantize

FLOATS = st.one_of(
    st.floats(-8, 8, width=32),
    st.floats(-(2.0**-120), 2.0**-120, width=32),
    st.floats(-(2.0**127), 2.0**127, width=32),
    st.sampled_from(
        [s * v * 2.0**k for s in (1, -1) for v in (0.0, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 6.0) for k in (-3, 0)]
    ),
)
GROUP = st.lists(FLOATS, min_size=32, max_size=32)


def scalar_twin(group: list[float]) -> tuple[int, list[float]]:
    """(scale byte, values) of one group by the sentence of the specification, with Python's exact arithmetic."""
    largest = max(abs(x) for x in group)
    exponent = 0 if largest == 0 else -127
    while largest > 6.0 * 2.0**exponent:
        exponent += 1
    values = []
    for x in group:
        magnitude = abs(x) / 2.0**exponent
        # min takes the first of equals, and the levels rise: a tie goes to the lower one
        level = min(LEVELS, key=lambda v: abs(v - magnitude))
        values.append(math.copysign(level * 2.0**exponent, x))
    return exponent + 127, values


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) and torch.equal(torch.signbit(a), torch.signbit(b))


@given(GROUP)
@settings(max_examples=300, deadline=None)
def test_as_the_scalar_twin(group):
    packed, scale = quantize(torch.tensor(group))
    byte, values = scalar_twin(group)
    assert scale.item() == byte
    assert same(dequantize(packed, scale), torch.tensor(values))


@given(GROUP)
@settings(max_examples=100, deadline=None)
def test_what_came_back_stays(group):
    first = quantize(torch.tensor(group))
    second = quantize(dequantize(*first))
    assert same(dequantize(*second), dequantize(*first))
    third = quantize(dequantize(*second))
    assert all(torch.equal(a, b) for a, b in zip(second, third, strict=True))


@given(st.binary(min_size=32, max_size=32), st.tuples(st.integers(0, 252), st.integers(0, 252)))
@settings(max_examples=200, deadline=None)
def test_any_stored_group_comes_back_with_its_values(codes, scales):
    packed = torch.frombuffer(bytearray(codes), dtype=torch.uint8).view(1, 32)
    scale = torch.tensor(scales, dtype=torch.uint8).view(1, 2)
    values = dequantize(packed, scale)
    assert same(dequantize(*quantize(values)), values)
    half = dequantize(packed, scale, torch.bfloat16)
    assert same(half.float(), values)
    assert same(dequantize(*quantize(half), torch.bfloat16), half)


@given(GROUP, st.integers(-20, 20))
@settings(max_examples=100, deadline=None)
def test_scaling_by_a_power_of_two_moves_the_scale_byte_only(group, power):
    weight = torch.tensor([max(-(2.0**60), min(2.0**60, x)) for x in group])
    weight = torch.where(weight.abs() < 2.0**-60, 0.0, weight)
    packed, scale = quantize(weight)
    moved, byte = quantize(weight * 2.0**power)
    assert torch.equal(moved, packed)
    assert byte.item() == scale.item() + (power if weight.any() else 0)


@given(st.lists(GROUP, min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_groups_do_not_see_each_other(groups):
    row = torch.tensor(groups).flatten()
    packed, scale = quantize(row)
    alone = [quantize(torch.tensor(g)) for g in groups]
    assert torch.equal(packed, torch.cat([p for p, _ in alone]))
    assert torch.equal(scale, torch.cat([s for _, s in alone]))


@given(GROUP)
@settings(max_examples=100, deadline=None)
def test_flipping_signs_flips_signs(group):
    weight = torch.tensor(group)
    packed, scale = quantize(weight)
    flipped, same_scale = quantize(-weight)
    assert torch.equal(flipped, packed ^ 0x88)
    assert torch.equal(same_scale, scale)
