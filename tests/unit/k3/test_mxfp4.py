"""The MXFP4 codec against hand-made bytes, ml-dtypes and compressed-tensors (spec 3.1, trap 17)."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy, QuantizationType
from torch import Tensor

from miles_k3.k3.ops import mxfp4
from miles_k3.k3.ops.mxfp4 import LEVELS, THRESHOLDS, dequantize, pack_codes, quantize, unpack_codes

SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(
        num_bits=4,
        type=QuantizationType.FLOAT,
        group_size=32,
        strategy=QuantizationStrategy.GROUP,
        symmetric=True,
        scale_dtype=torch.uint8,
    ),
)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def u8(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def every_byte_and_scale() -> tuple[Tensor, Tensor]:
    """packed [256, 256] with all bytes in each row; scale [256, 16]: row s has scale byte s."""
    packed = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    return packed, torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, 16).contiguous()


def every_group() -> tuple[Tensor, Tensor, Tensor]:
    """Groups that stand for all: for each scale byte and each largest code, every code up to it with both signs.

    A code's new value depends on the group's scale only, and the scale on the largest code only. Left out are the
    groups whose values exceed float32. Gives packed [G, 16], scale [G, 1] and the largest code of each [G].
    """
    groups, scales, tops = [], [], []
    for scale in range(255):
        for top in range(8):
            if LEVELS[top] * 2.0 ** (scale - 127) < 2.0**128:
                codes = [*range(top + 1), *(8 + c for c in range(top + 1))]
                groups.append((codes * 32)[:32])
                scales.append(scale)
                tops.append(top)
    codes = torch.tensor(groups, dtype=torch.uint8)
    return pack_codes(codes), torch.tensor(scales, dtype=torch.uint8).view(-1, 1), torch.tensor(tops)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Equal numbers, equal signs of zero, NaN where the other has NaN."""
    same = (a == b) & (torch.signbit(a) == torch.signbit(b)) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and a.shape == b.shape and bool(same.all())


class TestDecode:
    def test_low_nibble_comes_first(self):
        packed = torch.zeros(1, 16, dtype=torch.uint8)
        packed[0, 0] = 0x21
        assert dequantize(packed, u8(127).view(1, 1))[0, :3].tolist() == [0.5, 1.0, 0.0]

    def test_levels_and_sign(self):
        codes = torch.arange(16, dtype=torch.uint8).repeat(2).view(1, 32)
        values = dequantize(pack_codes(codes), u8(128).view(1, 1))[0, :16]
        assert values.tolist() == [2 * v for v in (*LEVELS, *(-v for v in LEVELS))]
        assert math.copysign(1, values[8].item()) == -1

    def test_one_scale_for_32_inputs(self):
        packed = torch.full((1, 48), 0x22, dtype=torch.uint8)
        values = dequantize(packed, u8(126, 127, 130).view(1, 3))[0]
        assert values.tolist() == [0.5] * 32 + [1.0] * 32 + [8.0] * 32

    @pytest.mark.parametrize("device", ["cpu", CUDA])
    def test_all_bytes_and_scales_as_ml_dtypes(self, device):
        packed, scale = every_byte_and_scale()
        codes = unpack_codes(packed).numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        factor = scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32).repeat(32, axis=1)
        with np.errstate(over="ignore"):
            expected = torch.from_numpy(codes * factor)
        expected[255] = torch.nan  # E8M0's NaN
        assert bits_equal(dequantize(packed.to(device), scale.to(device)).cpu(), expected)

    @pytest.mark.parametrize("device", ["cpu", CUDA])
    def test_bfloat16_holds_the_same_values(self, device):
        packed, scale = every_byte_and_scale()
        half = dequantize(packed.to(device), scale.to(device), torch.bfloat16).cpu()
        assert half.dtype == torch.bfloat16
        assert bits_equal(half.float(), dequantize(packed, scale))

    def test_double_holds_the_same_values_and_float16_rounds_them(self):
        packed, scale = every_byte_and_scale()
        packed, scale = packed[90:140], scale[90:140]
        assert bits_equal(dequantize(packed, scale, torch.float64).float(), dequantize(packed, scale))
        assert bits_equal(dequantize(packed, scale, torch.float16), dequantize(packed, scale).half())

    def test_as_compressed_tensors(self):
        """Every byte with every scale; its arithmetic knows no NaN scale."""
        packed, scale = every_byte_and_scale()
        packed, scale = packed[:255], scale[:255]
        theirs = MXFP4PackedCompressor.decompress({"weight_packed": packed, "weight_scale": scale}, SCHEME)["weight"]
        assert theirs.dtype == torch.bfloat16
        assert bits_equal(theirs, dequantize(packed, scale, torch.bfloat16))

    def test_codes_as_compressed_tensors(self):
        packed, _ = every_byte_and_scale()
        theirs = unpack_fp4_from_uint8(packed, 256, 512, torch.float32)
        ours = dequantize(packed, torch.full((256, 16), 127, dtype=torch.uint8))
        assert bits_equal(ours, theirs)
        assert torch.equal(pack_codes(unpack_codes(packed)), packed)

    def test_leading_dimensions_and_views(self):
        packed = torch.randint(0, 256, (3, 5, 64), dtype=torch.uint8)
        scale = torch.randint(100, 140, (3, 5, 4), dtype=torch.uint8)
        whole = dequantize(packed, scale)
        assert whole.shape == (3, 5, 128)
        assert torch.equal(whole[1], dequantize(packed[1], scale[1]))
        assert torch.equal(whole.transpose(0, 1), dequantize(packed.transpose(0, 1), scale.transpose(0, 1)))
        assert torch.equal(whole[0, 0], dequantize(packed[0, 0], scale[0, 0]))

    def test_pieces_make_the_whole(self, monkeypatch):
        packed, scale = every_byte_and_scale()
        whole = dequantize(packed, scale)
        for numbers in (1, 512, 512 * 100, 512 * 256):
            monkeypatch.setattr(mxfp4, "_CHUNK", numbers)
            assert bits_equal(dequantize(packed, scale), whole)

    @pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
    def test_nothing_in_nothing_out(self, shape):
        rows, cols = shape
        out = dequantize(torch.empty(rows, cols, dtype=torch.uint8), torch.empty(rows, cols // 16, dtype=torch.uint8))
        assert out.shape == (rows, cols * 2)

    def test_values_made_under_inference_mode_serve_training_afterwards(self):
        mxfp4._pairs.cache_clear()
        mxfp4._powers.cache_clear()
        packed, scale = quantize(torch.randn(8, 32))
        with torch.inference_mode():
            dequantize(packed, scale)
        x = torch.randn(4, 32, requires_grad=True)
        (x @ dequantize(packed, scale).t()).sum().backward()
        assert x.grad is not None

    @pytest.mark.parametrize(
        ("packed", "scale"),
        [
            ((4, 16), (4, 2)),
            ((4, 32), (4, 1)),
            ((4, 16), (5, 1)),
            ((4, 16), (4, 1, 1)),
            ((2, 4, 16), (4, 1)),
            ((4, 32), (4, 4)),  # one scale per 16, as NVFP4 has
        ],
    )
    def test_shapes_that_do_not_belong_together(self, packed, scale):
        with pytest.raises(ValueError, match="don't match"):
            dequantize(torch.zeros(packed, dtype=torch.uint8), torch.zeros(scale, dtype=torch.uint8))

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.float8_e8m0fnu])
    def test_other_dtypes_are_refused(self, dtype):
        good = torch.zeros(4, 16, dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"torch\.uint8"):
            dequantize(good, torch.zeros(4, 1).to(dtype))
        with pytest.raises(ValueError, match=r"torch\.uint8"):
            dequantize(good.to(torch.int8), torch.zeros(4, 1, dtype=torch.uint8))


class TestEncode:
    @pytest.mark.parametrize("device", ["cpu", CUDA])
    def test_every_group_comes_back_with_its_values(self, device):
        packed, scale, _ = every_group()
        values = dequantize(packed, scale)
        assert values.isfinite().all()
        again = [t.cpu() for t in quantize(values.to(device))]
        assert bits_equal(dequantize(again[0], again[1]), values)

    def test_the_second_round_trip_is_byte_stable(self):
        packed, scale, _ = every_group()
        first = quantize(dequantize(packed, scale))
        second = quantize(dequantize(*first))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_from_bfloat16_as_from_float32(self):
        packed, scale, _ = every_group()
        a, b = quantize(dequantize(packed, scale)), quantize(dequantize(packed, scale, torch.bfloat16))
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    def test_how_far_the_scale_moves(self):
        """Largest magnitude 4 or 6 keeps the scale, 3 or 2 halves it, 1.5 or 1 quarters it, 0.5 takes an eighth."""
        packed, scale, top = every_group()
        _, again = quantize(dequantize(packed, scale))
        lower = torch.tensor([0, 3, 2, 2, 1, 1, 0, 0])[top]
        expected = torch.where(top == 0, 127, (scale[:, 0].int() - lower).clamp(min=0))
        assert torch.equal(again[:, 0].int(), expected.int())

    def test_all_zero_groups(self):
        """Failure 72: no 0/0; scale byte 127, whatever the sign of the zeros, and zeros again."""
        weight = torch.zeros(2, 64)
        weight[0, :32] = -0.0
        weight[1, 32] = 3.0
        packed, scale = quantize(weight)
        assert scale.tolist() == [[127, 127], [127, 126]]
        values = dequantize(packed, scale)
        assert bits_equal(values, weight)

    @pytest.mark.parametrize(("low", "high", "threshold"), list(zip(LEVELS[:-1], LEVELS[1:], THRESHOLDS, strict=True)))
    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_ties_go_down_and_just_above_goes_up(self, low, high, threshold, sign):
        weight = torch.zeros(1, 32)
        weight[0, 0] = 6.0  # fixes the scale at 1
        weight[0, 1] = sign * threshold
        weight[0, 2] = torch.nextafter(weight[0, 1], torch.tensor(sign * 9.0))
        weight[0, 3] = torch.nextafter(weight[0, 1], torch.tensor(0.0))
        packed, scale = quantize(weight)
        assert scale.item() == 127
        assert dequantize(packed, scale)[0, 1:4].tolist() == [sign * low, sign * high, sign * low]

    @pytest.mark.parametrize("power", range(-140, 126, 7))
    def test_the_scale_is_the_exact_ceiling(self, power):
        """ceil(log2(amax / 6)) at 6 * 2^k and at its neighbours, where a float logarithm goes wrong."""
        edge = torch.tensor(6.0 * 2.0**power)
        for amax, expected in ((edge, power), (torch.nextafter(edge, torch.tensor(math.inf)), power + 1)):
            weight = torch.zeros(32)
            weight[5] = amax
            assert quantize(weight)[1].item() == max(expected, -127) + 127

    def test_codes_as_ml_dtypes_away_from_ties(self):
        weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 0.02
        packed, scale = quantize(weight)
        scaled = weight / torch.exp2(scale.float() - 127)
        theirs = scaled.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
        assert torch.equal(unpack_codes(packed), torch.from_numpy(theirs))

    def test_bytes_as_compressed_tensors_packs_them(self):
        """Given our scales, its own compressor writes our bytes (it sends ties to even, and there are none here)."""
        weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) * 0.02
        packed, scale = quantize(weight)
        theirs = MXFP4PackedCompressor.compress(
            {"weight": weight, "weight_scale": torch.exp2(scale.float() - 127)}, SCHEME
        )
        assert torch.equal(theirs["weight_packed"], packed)
        assert torch.equal(theirs["weight_scale"], scale)
        values = dequantize(packed, torch.full_like(scale, 127))
        assert torch.equal(pack_fp4_to_uint8(values), packed)

    def test_the_extremes(self):
        tiny, largest = torch.zeros(32), torch.zeros(32)
        tiny[0], tiny[1] = 2.0**-149, -(2.0**-130)
        packed, scale = quantize(tiny)
        assert scale.item() == 0
        assert dequantize(packed, scale).abs().max() == 0  # below a quarter of 2^-127
        tiny[2] = 0.3 * 2.0**-127
        assert dequantize(*quantize(tiny))[2] == 2.0**-128
        largest[0] = mxfp4.LARGEST
        packed, scale = quantize(largest)
        assert scale.item() == 253
        assert dequantize(packed, scale)[0] == 3.0 * 2.0**126

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.0e38, -3.4e38])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_mxfp4_has_no_code_for_is_refused(self, bad, dtype):
        weight = torch.randn(4, 64).to(dtype)
        weight[2, 40] = bad
        with pytest.raises(ValueError, match="NaN, infinity or a magnitude above"):
            quantize(weight)

    @pytest.mark.parametrize("shape", [(), (31,), (4, 48), (4, 1)])
    def test_widths_that_are_no_multiple_of_32(self, shape):
        with pytest.raises(ValueError, match="multiple of 32"):
            quantize(torch.zeros(shape))

    def test_shapes(self):
        packed, scale = quantize(torch.randn(3, 5, 96))
        assert (packed.shape, scale.shape) == ((3, 5, 48), (3, 5, 3))
        assert (packed.dtype, scale.dtype) == (torch.uint8, torch.uint8)
        packed, scale = quantize(torch.empty(0, 64))
        assert (packed.shape, scale.shape) == ((0, 32), (0, 2))

    def test_a_training_weight_needs_no_detaching(self):
        packed, _ = quantize(torch.randn(2, 32, requires_grad=True))
        assert not packed.requires_grad
