"""KDA's delta rule through flash-linear-attention's Triton kernels, on CUDA, also over context-parallel ranks.

The plain twins are `kda_core.delta_rule` and `k3.ops.kda.kda_chunk`. K3's decays lie in (-5, 0), which is what fla's
`safe_gate` asks for.
Shape legend: T tokens, N heads, K key channels, V value channels, B sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from miles_k3.errors import LaunchError
from miles_k3.k3.kernels.fla_tuning import import_fla, limit_autotuning

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def fla_context(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, group: ProcessGroup, conv_width: int) -> Any:
    """fla's context of one stream for `fla_delta_rule(cp=)`: this rank of `group` holds its part of the whole stream,
    [r T / cp, (r + 1) T / cp) in stream order.

    `cu_seqlens` int [B+1] of the whole stream, on the device and on the host. fla wants T divisible by the ranks.
    """
    return import_fla("ops.cp").build_cp_context(
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
    out, _ = import_fla("ops.kda").chunk_kda(
        *(x.unsqueeze(0) for x in inputs), use_qk_l2norm_in_kernel=True, safe_gate=True, cp_context=cp, **own, **gate
    )
    return out.squeeze(0).float()
