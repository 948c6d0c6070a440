"""KDA over packed chunks of prompts, from and to a state, through flash-linear-attention. Inference only, on CUDA.

The plain twin is `ops.kda.kda_gate` with `kda_chunk`.
Shapes: T tokens, B sequences, N heads, K key channels, V value channels.
"""

from __future__ import annotations

from torch import Tensor

from miles_k3.k3.kernels.fla_tuning import import_fla, limit_autotuning


def kda_prefill(q_TNK: Tensor, k_TNK: Tensor, v_TNV: Tensor, f_TNK: Tensor, beta_TN: Tensor, a_log_N: Tensor,
                dt_bias_NK: Tensor, lower_bound: float, cu_seqlens: Tensor, cu_seqlens_host: Tensor,
                state_BNKV: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output [T, N, V] in q's dtype, states fp32 [B, N, K, V] after each sequence).

    Raw q and k, f before the gate, beta after its sigmoid; `cu_seqlens` on the device and on the host.
    """
    limit_autotuning()
    out, state = import_fla("ops.kda").chunk_kda(
        *(x.unsqueeze(0) for x in (q_TNK, k_TNK, v_TNV, f_TNK, beta_TN)), initial_state=state_BNKV,
        output_final_state=True, use_qk_l2norm_in_kernel=True, safe_gate=True, use_gate_in_kernel=True, A_log=a_log_N,
        dt_bias=dt_bias_NK.reshape(-1), lower_bound=lower_bound, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_host,
    )  # fmt: skip
    return out.squeeze(0), state
