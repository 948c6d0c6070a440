"""flash-linear-attention's Triton kernels: their import, and the launch configurations that its autotuner is left.

fla is imported at the first use: it takes seconds and needs Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from miles_k3.errors import LaunchError


@cache
def import_fla(module: str) -> Any:
    """A module of fla. Raises LaunchError where fla, or the Triton below it, can't be imported."""
    try:
        return importlib.import_module("fla." + module)
    except ImportError as error:
        raise LaunchError(
            f"KDA's fla kernels need flash-linear-attention, but importing fla.{module} failed ({error}); "
            'install it with `pip install "miles-k3[gpu]"`, or set trainer.kda_kernel: torch'
        ) from error


class Kernel(NamedTuple):
    """A kernel of fla and the launch configuration to leave it: (warps, stages, tile sizes); where there is a second,
    it is for fp32 inputs."""

    module: str
    name: str
    configs: tuple[tuple[int, int, dict[str, int]], ...]

    @property
    def tuner(self) -> Any:
        """Triton's autotuner of it, below its heuristics; None where this version of fla has none."""
        found = getattr(import_fla(self.module), self.name, None)
        while found is not None and not hasattr(found, "configs"):
            found = getattr(found, "fn", None)
        return found


# What the autotuner of fla 0.6.0 found fastest in bf16, or within its noise of that, on an H200 at K3's widths
# (docs/performance.md). The tiles of some exceed the shared memory in fp32, so they have smaller ones for it.
HOPPER = (
    Kernel("modules.norm.l2norm", "l2norm_fwd_kernel", ((4, 3, {"BT": 8}),)),
    Kernel("modules.norm.l2norm", "l2norm_bwd_kernel", ((8, 3, {"BT": 16}),)),
    Kernel("ops.utils.cumsum", "chunk_local_cumsum_vector_kernel", ((2, 3, {"BS": 32}),)),
    Kernel("ops.kda.gate", "kda_gate_chunk_cumsum_vector_kernel", ((2, 3, {"BS": 32}),)),
    Kernel("ops.kda.gate", "kda_gate_bwd_kernel", ((4, 3, {}),)),
    Kernel("ops.kda.chunk_intra", "chunk_kda_fwd_kernel_intra_sub_chunk", ((1, 3, {}),)),
    Kernel("ops.kda.chunk_intra", "chunk_kda_fwd_kernel_inter_solve_fused", ((1, 3, {"BK": 32}),)),
    Kernel("ops.kda.wy_fast", "recompute_w_u_fwd_kda_kernel", ((8, 3, {}), (2, 2, {}))),
    Kernel(
        "ops.common.chunk_delta_h", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        ((4, 2, {"BV": 64}), (4, 2, {"BV": 32})),
    ),
    Kernel(
        "ops.common.chunk_delta_h", "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
        ((4, 2, {"BV": 64}), (2, 2, {"BV": 32})),
    ),
    Kernel("ops.gla.chunk", "chunk_gla_fwd_kernel_o", ((4, 3, {"BK": 64, "BV": 128}), (4, 2, {"BK": 32, "BV": 64}))),
    Kernel("ops.kda.chunk_bwd", "chunk_kda_bwd_kernel_dAv", ((4, 3, {}), (2, 2, {}))),
    Kernel(
        "ops.kda.chunk_bwd", "chunk_kda_bwd_kernel_wy_dqkg_fused",
        ((4, 2, {"BK": 64, "BV": 64}), (2, 2, {"BK": 32, "BV": 64})),
    ),
    Kernel("ops.kda.chunk_intra", "chunk_kda_bwd_kernel_intra", ((1, 3, {}),)),
    Kernel("ops.cp.chunk_fwd", "chunk_cp_fwd_kernel_h", ((4, 2, {}), (2, 1, {}))),
    Kernel("ops.cp.chunk_bwd", "chunk_cp_bwd_kernel_dh", ((4, 2, {}), (2, 1, {}))),
    Kernel("ops.cp.chunk_merge", "chunk_cp_fwd_bwd_kernel_merge", ((4, 2, {"BV": 64}),)),
)  # fmt: skip


@cache
def limit_autotuning() -> Callable[[], None]:
    """On a Hopper GPU, leave each KDA kernel of fla its configuration in `HOPPER`; returns what undoes that.

    Each would otherwise compile and time all of its 6 to 36 configurations at its first call, some again for other
    lengths, and the ranks of one run could settle on different ones. A kernel that doesn't list ours, as in another
    version of fla, keeps its list, and so do all kernels on other GPUs.
    """
    before: list[tuple[Any, list[Any], Any]] = []
    if torch.cuda.get_device_capability()[0] == 9:
        for kernel in HOPPER:
            tuner = kernel.tuner
            found = {_launch(c): c for c in (tuner.configs if tuner else ())}
            kept = [found.get(_key(wanted)) for wanted in kernel.configs]
            if tuner and all(kept):
                before.append((tuner, tuner.configs, tuner.early_config_prune))
                tuner.configs = kept
                if len(kept) > 1:
                    tuner.early_config_prune = _for_dtype

    def undo() -> None:
        for tuner, configs, prune in before:
            tuner.configs, tuner.early_config_prune = configs, prune
        limit_autotuning.cache_clear()

    return undo


def _for_dtype(configs: list[Any], named: dict[str, Any] | None, **others: Any) -> list[Any]:
    """What Triton's autotuner asks before it times anything: one of the two is left, so nothing is compared."""
    arguments = {**(named or {}), **others}
    inputs = arguments["k"] if "k" in arguments else arguments["q"]
    return [configs[1 if inputs.dtype == torch.float32 else 0]]


def _key(wanted: tuple[int, int, dict[str, int]]) -> tuple[Any, ...]:
    warps, stages, blocks = wanted
    return warps, stages, *sorted(blocks.items())


def _launch(config: Any) -> tuple[Any, ...]:
    return _key((config.num_warps, config.num_stages, config.kwargs))
