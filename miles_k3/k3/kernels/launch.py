"""What every launch needs: whether kernels are interpreted, and block sizes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
BLACKWELL = 100
_dependent: dict[str, bool] = {}


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Within it decode's kernels start while the ones before them end, and wait for their results by themselves."""
    _dependent.update(PDL=True, launch_pdl=True)
    try:
        yield
    finally:
        _dependent.clear()


def dependent() -> dict[str, bool]:
    """What a launch takes for that."""
    return _dependent


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """A kernel's first line: nothing may be read or written before, for the kernels before it may still run."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def capability() -> int:
    """The generation that kernels are compiled for: 90 is Hopper; 0 in the interpreter."""
    if INTERPRETED:
        return 0
    target: Any = triton.runtime.driver.active.get_current_target()
    return int(target.arch)


@triton.jit
def wait_for_products(some_i32, ASYNCHRONOUS: tl.constexpr):
    """A loop's last line, where it unpacks weights into registers and multiplies from there: Hopper's products read
    them while the program goes on, and Triton 3.6 would unpack the next ones over them (triton-lang/triton#9433).

    `some_i32`: any tile; the wait needs one to hang on. `ASYNCHRONOUS`: products are on the tensor cores.
    """
    if ASYNCHRONOUS and cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
        tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;", "=r,r", [some_i32], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


def check_whole(**tensors: Tensor) -> None:
    """Raises ValueError for a tensor that has gaps between its rows, where a kernel takes none."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} {tuple(tensor.shape)} has strides {tensor.stride()}, and the kernel reads it without gaps: "
                "hand over .contiguous()"
            )


def power_of_two(size: int, *, at_least: int = 1, at_most: int = 1 << 30) -> int:
    """The next power of two from `size` on, within bounds that are powers of two."""
    return min(max(1 << (size - 1).bit_length(), at_least), at_most)


def dividing_block(size: int, largest: int, smallest: int = 16) -> int:
    """The largest power of two up to `largest` that divides `size`, so that no mask is needed; `smallest` if none."""
    block = largest
    while block > smallest and size % block:
        block //= 2
    return block
