"""KDA's delta rule through flash-linear-attention's Triton kernels, on CUDA, also over context-parallel ranks.

The plain twins are `kda_core.delta_rule` and `k3.ops.kda.kda_chunk`. fla is imported at the first use: it takes seconds
and needs Triton. K3's decays lie in (-5, 0), which is what fla's `safe_gate` asks for.
Shape legend: T tokens, N heads, K key channels, V value channels, B sequences.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from miles_k3.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@cache
def _fla(module: str) -> Any:
    """A module of fla. Raises LaunchError where fla, or the Triton below it, can't be imported."""
    try:
        return importlib.import_module("fla." + module)
    except ImportError as error:
        raise LaunchError(
            f"KDA's fla kernels need flash-linear-attention, but importing fla.{module} failed ({error}); "
            'install it with `pip install "miles-k3[gpu]"`, or set trainer.kda_kernel: torch'
        ) from error


def fla_context(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, group: ProcessGroup, conv_width: int) -> Any:
    """fla's context of one stream for `fla_delta_rule(cp=)`: this rank of `group` holds its part of the whole stream,
    [r T / cp, (r + 1) T / cp) in stream order.

    `cu_seqlens` int [B+1] of the whole stream, on the device and on the host. fla wants T divisible by the ranks.
    """
    return _fla("ops.cp").build_cp_context(
        cu_seqlens, group=group, conv1d_kernel_size=conv_width, cu_seqlens_cpu=cu_seqlens_cpu
    )


def fla_delta_rule(
    q_TNK: Tensor, k_TNK: Tensor, v_TNV: Tensor, g_TNK: Tensor, beta_TN: Tensor, cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None = None, cp: Any = None,
) -> Tensor:  # fmt: skip
    """The gated delta rule from a zero state over a packed stream, fp32 [T, N, V], as `kda_core.delta_rule`.

    Raw q and k (normalised in the kernel), log decay g fp32 in (-5, 0), sigmoided beta. `cu_seqlens` int [B+1] on the
    device; its host copy saves a wait. With `cp` from `fla_context`, T are this rank's tokens of the stream, and the
    context's boundaries count instead. Products are tf32 or bf16, as q's dtype says.
    """
    return _chunk_kda((q_TNK, k_TNK, v_TNV, g_TNK, beta_TN), cu_seqlens, cu_seqlens_cpu, cp)


def fla_gated_delta_rule(
    q_TNK: Tensor, k_TNK: Tensor, v_TNV: Tensor, f_TNK: Tensor, a_log_N: Tensor, dt_bias_NK: Tensor,
    lower_bound: float, beta_TN: Tensor, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None, cp: Any = None,
) -> Tensor:  # fmt: skip
    """`fla_delta_rule` of the gate `lower_bound * sigmoid(exp(A_log) * (f + dt_bias))`, computed inside.

    The layer keeps f in its own dtype, instead of g and its running sums in fp32. A_log and dt_bias are frozen.
    """
    gate = {"use_gate_in_kernel": True, "A_log": a_log_N, "dt_bias": dt_bias_NK.reshape(-1), "lower_bound": lower_bound}
    return _chunk_kda((q_TNK, k_TNK, v_TNV, f_TNK, beta_TN), cu_seqlens, cu_seqlens_cpu, cp, **gate)


def _chunk_kda(
    inputs: tuple[Tensor, ...], cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, cp: Any, **gate: Any
) -> Tensor:
    if inputs[0].device.type != "cuda":
        raise LaunchError(
            f"KDA's fla kernels run on CUDA, but the model is on {inputs[0].device}; set trainer.kda_kernel: torch"
        )
    limit_autotuning()
    own = {} if cp is not None else {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
    out, _ = _fla("ops.kda").chunk_kda(
        *(x.unsqueeze(0) for x in inputs), use_qk_l2norm_in_kernel=True, safe_gate=True, cp_context=cp, **own, **gate
    )
    return out.squeeze(0).float()


class Kernel(NamedTuple):
    """A kernel of fla and the launch configuration to leave it: (warps, stages, tile sizes); where there is a second,
    it is for fp32 inputs."""

    module: str
    name: str
    configs: tuple[tuple[int, int, dict[str, int]], ...]

    @property
    def tuner(self) -> Any:
        """Triton's autotuner of it, below its heuristics; None where this version of fla has none."""
        found = getattr(_fla(self.module), self.name, None)
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
