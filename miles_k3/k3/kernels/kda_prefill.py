"""KDA over packed chunks of prompts, from and to a state, through flash-linear-attention. Inference only, on CUDA.

The plain twin is `ops.kda.kda_gate` with `kda_chunk`.
Shapes: T tokens, B sequences, N heads, K key channels, V value channels, C pieces.
"""

from __future__ import annotations

from torch import Tensor

from miles_k3.k3.kernels.fla_tuning import import_fla, limit_autotuning
from miles_k3.k3.ops.packed import PREFILL_CHUNK


def kda_prefill(q_TNK: Tensor, k_TNK: Tensor, v_TNV: Tensor, f_TNK: Tensor, beta_TN: Tensor, a_log_N: Tensor,
                dt_bias_NK: Tensor, lower_bound: float, cu_seqlens: Tensor, pieces_C2: Tensor,
                state_BNKV: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output [T, N, V] in q's dtype, states fp32 [B, N, K, V] after each sequence). The host waits for nothing.

    Raw q and k, f before the gate, beta after its sigmoid; `pieces_C2` is `Packed.pieces(PREFILL_CHUNK)`.
    """
    limit_autotuning()
    # Not fla's public chunk_kda: it makes the pieces itself, on the host, and waits for their copy to the device.
    norm = import_fla("modules.norm.l2norm").l2norm_fwd
    q, k, v, f, beta = (x.contiguous().unsqueeze(0) for x in (q_TNK, k_TNK, v_TNV, f_TNK, beta_TN))
    out, state, *_ = import_fla("ops.kda.chunk_fwd").chunk_kda_fwd(
        q=norm(q)[0], k=norm(k)[0], v=v, g=f, beta=beta, scale=q.shape[-1] ** -0.5, initial_state=state_BNKV,
        output_final_state=True, cu_seqlens=cu_seqlens, chunk_indices=pieces_C2, chunk_size=PREFILL_CHUNK,
        safe_gate=True, lower_bound=lower_bound, use_gate_in_kernel=True, A_log=a_log_N,
        dt_bias=dt_bias_NK.reshape(-1),
    )  # fmt: skip
    return out.squeeze(0).type_as(q_TNK), state
