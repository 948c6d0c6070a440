# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""MXFP4 codes to numbers inside a kernel, and the order of inputs that makes it cheap.

Weights stay as in the checkpoint (`ops/mxfp4.py`). A kernel reads them as 16-bit columns of four codes: column c holds
inputs 4c..4c+3, lowest bits first. Unpacking gives four tiles, one a nibble. Side by side, 16 columns of each, they are
the weight with its inputs in *nibble order*: of each 64 inputs, those with remainder 0 by 4 come first, then 1, 2, 3.
Activations are put into that order instead of the weights into theirs: no bit ever moves between columns, each tile is
already what a matrix instruction's registers want, and two columns in one register are unpacked together.

Shapes: M rows, D inputs, C = D/4 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.config import MXFP4_GROUP
from miles_k3.k3.kernels.launch import dependent, wait_for_inputs

NIBBLE_BLOCK = 64  # inputs
LARGEST_NARROW = 128  # scale byte up to which 2^126 fits into the scale's own bfloat16
# A code's sign, exponent and mantissa bits moved to bfloat16's give the value times 2^-126, zero and 0.5 included.
# Nibble p of two columns at once; $4 holds both columns, $5 both scales.
_NIBBLE = (
    "shl.b32 a, $4, 6; and.b32 a, a, 0x01C001C0; shl.b32 b, $4, 12; lop3.b32 a, b, 0x80008000, a, 0xEA;",
    "shl.b32 a, $4, 2; and.b32 a, a, 0x01C001C0; shl.b32 b, $4, 8; lop3.b32 a, b, 0x80008000, a, 0xEA;",
    "shr.b32 a, $4, 2; and.b32 a, a, 0x01C001C0; shl.b32 b, $4, 4; lop3.b32 a, b, 0x80008000, a, 0xEA;",
    "shr.b32 a, $4, 6; and.b32 a, a, 0x01C001C0; lop3.b32 a, $4, 0x80008000, a, 0xEA;",
)
_UNSHIFT = "mov.b32 b, 0x7E807E80; mul.bf16x2 a, a, b;"  # times 2^126


def _assembly(wide: bool) -> str:
    lines = (f"{bits} {_UNSHIFT if wide else ''} mul.bf16x2 ${p}, a, $5;" for p, bits in enumerate(_NIBBLE))
    return "{ .reg .b32 a, b; " + " ".join(lines) + " }"


_NARROW_ASM = tl.constexpr(_assembly(wide=False))
_WIDE_ASM = tl.constexpr(_assembly(wide=True))


@triton.jit
def _nibble(codes, scale, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    bits = codes.to(tl.uint32) >> SHIFT
    value = (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True)
    return (value * 8.507059173023462e37 * scale).to(DTYPE)  # 2^126


@triton.jit
def unpack(codes, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
           ASSEMBLY: tl.constexpr):  # fmt: skip
    """codes u16 [ROWS, COLUMNS] and scale u8 [ROWS, COLUMNS/8] -> the four planes' weights [ROWS, COLUMNS] in DTYPE.

    WIDE: some scale byte is above `LARGEST_NARROW`. ASSEMBLY: bfloat16, two columns at a time.
    """
    if ASSEMBLY:
        byte = scale.to(tl.uint16)
        if WIDE:
            byte = tl.where(scale == 0, 0x0040, tl.where(scale == 255, 0x7FC0, byte << 7)).to(tl.uint16)
        else:
            byte = (byte + 126) << 7
        factor = byte.to(tl.bfloat16, bitcast=True)
        factor = tl.broadcast_to(factor[:, :, None], [ROWS, COLUMNS // 8, 8]).reshape(ROWS, COLUMNS)
        return tl.inline_asm_elementwise(
            _WIDE_ASM if WIDE else _NARROW_ASM, "=r,=r,=r,=r,r,r", [codes, factor],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    wide = scale.to(tl.uint32)
    wide = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23)).to(tl.uint32)
    factor = wide.to(tl.float32, bitcast=True)
    factor = tl.broadcast_to(factor[:, :, None], [ROWS, COLUMNS // 8, 8]).reshape(ROWS, COLUMNS)
    return (
        _nibble(codes, factor, 0, DTYPE), _nibble(codes, factor, 4, DTYPE),
        _nibble(codes, factor, 8, DTYPE), _nibble(codes, factor, 12, DTYPE),
    )  # fmt: skip


@triton.jit
def nibble_source(place):
    """The input that stands at `place` in nibble order."""
    return (place // 64) * 64 + (place % 16) * 4 + (place % 64) // 16


@triton.jit
def side_by_side(w0, w1, w2, w3, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Four tiles [ROWS, COLUMNS] as one [ROWS, 4 * COLUMNS] in nibble order; registers only get other names."""
    natural = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(ROWS, COLUMNS // 16, 16, 4)
    return natural.permute(0, 1, 3, 2).reshape(ROWS, 4 * COLUMNS)


@triton.jit
def _reorder(x_ptr, out_ptr, size, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    wait_for_inputs(PDL)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    ok = first + place < size
    source = first + nibble_source(place)
    x = tl.load(x_ptr + source // WIDTH * row_stride + source % WIDTH, mask=ok)
    tl.store(out_ptr + first + place, x, mask=ok)


def nibble_order(x_MD: Tensor) -> Tensor:
    """A copy of [M, D] with the inputs in nibble order; D is a multiple of 64. Rows may be strided.

    Raises ValueError where a row itself has gaps.
    """
    if x_MD.stride(1) != 1:
        raise ValueError(f"x {tuple(x_MD.shape)} has strides {x_MD.stride()}: expected rows without gaps")
    out, block = torch.empty(x_MD.shape, dtype=x_MD.dtype, device=x_MD.device), 2048
    _reorder[(triton.cdiv(x_MD.numel(), block),)](
        x_MD, out, x_MD.numel(), x_MD.stride(0), WIDTH=x_MD.shape[1], BLOCK=block, num_warps=4, **dependent()
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """One projection of a layer's experts as the kernels take it: [E, out, in]. `codes` u16 and `scale` are views."""

    codes_EOC: Tensor
    scale_EOG: Tensor
    wide: bool

    @classmethod
    def of(cls, packed_EOB: Tensor, scale_EOG: Tensor) -> PackedExperts:
        """packed u8 [E, out, in/2], scale u8 [E, out, in/32]. Waits for the device once; make it when weights load.

        Raises ValueError on tensors that don't belong together or are not contiguous, and on a width that is no
        multiple of 64.
        """
        if packed_EOB.dtype != torch.uint8 or scale_EOG.dtype != torch.uint8:
            raise ValueError(f"packed is {packed_EOB.dtype} and scale {scale_EOG.dtype}; both must be torch.uint8")
        groups = (*packed_EOB.shape[:-1], packed_EOB.shape[-1] * 2 // MXFP4_GROUP)
        if packed_EOB.ndim != 3 or tuple(scale_EOG.shape) != groups or packed_EOB.shape[-1] % (MXFP4_GROUP // 2):
            raise ValueError(
                f"packed {tuple(packed_EOB.shape)} and scale {tuple(scale_EOG.shape)} don't match: expected "
                f"[experts, out, in/2] and [experts, out, in/{MXFP4_GROUP}]"
            )
        if packed_EOB.shape[-1] % (NIBBLE_BLOCK // 2):
            raise ValueError(f"{packed_EOB.shape[-1] * 2} inputs; the kernels take multiples of {NIBBLE_BLOCK}")
        if not (packed_EOB.is_contiguous() and scale_EOG.is_contiguous()):
            raise ValueError("packed and scale must be contiguous: kernels read whole rows")
        return cls(packed_EOB.view(torch.uint16), scale_EOG, bool((scale_EOG > LARGEST_NARROW).any()))

    @property
    def num_experts(self) -> int:
        return self.codes_EOC.shape[0]

    @property
    def out_width(self) -> int:
        return self.codes_EOC.shape[1]

    @property
    def in_width(self) -> int:
        return self.codes_EOC.shape[2] * 4
