"""Each hook on SGLang's own classes: what they do without it, then with it. Run as a process of its own; prints JSON.

    python tests/sglang/real_hooks.py      in SGLang's environment, with the stubs first on PYTHONPATH

What is around a class stands in for the real thing; the class itself, and the method that is hooked, are SGLang's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from bare import bare, outcome
from real_draft_hooks import DRAFT_CASES

from miles_k3.rollout.sglang.hooks import (
    config_aliases,
    direct_swap,
    expert_capture,
    expert_lora,
    graph_buffers,
    hidden_dims,
    moe_front,
    output_gate,
    reduce_fusion,
    report,
)


def _aliases() -> Any:
    from sglang.srt.configs.kimi_linear import KimiLinearConfig

    config = KimiLinearConfig(num_experts_per_token=16, num_shared_experts=2)
    return [config.num_experts_per_tok, config.n_shared_experts]


def _dims() -> Any:
    from sglang.srt.lora.utils import get_hidden_dim
    from sglang.srt.models.kimi_k3 import KimiK3ForConditionalGeneration

    text = SimpleNamespace(
        hidden_size=7168, moe_intermediate_size=3072, intermediate_size=33792, first_k_dense_replace=1,
        moe_layer_freq=1, num_shared_experts=2, n_shared_experts=2, num_attention_heads=96, v_head_dim=128,
        qk_nope_head_dim=128, qk_rope_head_dim=64, q_lora_rank=1536, kv_lora_rank=512, vocab_size=100, head_dim=256,
        routed_expert_hidden_size=3584,
        linear_attn_config={"full_attn_layers": [4], "num_heads": 64, "head_dim": 128},
    )  # fmt: skip
    model = bare(KimiK3ForConditionalGeneration, config=SimpleNamespace(text_config=text))
    return [list(get_hidden_dim(name, text, model, 1)) for name in ("gate_up_proj_moe", "down_proj_moe", "o_proj")]


def _gate() -> Any:
    """o_proj under LoRA of an attention whose gate is 0 before the sigmoid: half of the input should come through."""
    from sglang.srt.lora.layers import RowParallelLinearWithLoRA
    from sglang.srt.models.kimi_k3 import KimiK3MLAAttention

    o_proj = SimpleNamespace(
        input_is_parallel=True, tp_rank=0, tp_size=1, skip_bias_add=False, bias=None, reduce_results=False,
        use_dp_attention_reduce=False, quant_method=SimpleNamespace(apply=lambda layer, x, bias=None: x),
    )  # fmt: skip
    attention = bare(KimiK3MLAAttention)
    KimiK3MLAAttention.__init__(attention, o_proj)
    wrapper = bare(
        RowParallelLinearWithLoRA, base_layer=o_proj, set_lora=False, lora_backend=SimpleNamespace(batch_info=None)
    )
    attention._gate_hidden_states = torch.zeros(1, 2)
    return RowParallelLinearWithLoRA.forward(wrapper, torch.ones(1, 2))[0].tolist()


def _gate_stub() -> None:
    """In the place of the attention's long constructor; the hook wraps whatever is there."""
    from sglang.srt.models.kimi_k3 import KimiK3MLAAttention

    def init(self: Any, o_proj: Any) -> None:
        for name, value in {
            "use_output_gate": True, "o_proj": o_proj, "_gate_precomputed": None, "g_proj": lambda h: (h, None)
        }.items():  # fmt: skip
            object.__setattr__(self, name, value)

    KimiK3MLAAttention.__init__ = init


def _front() -> Any:
    """Whether the MoE's front was merged, with LoRA on the shared experts."""
    from sglang.srt.models.kimi_k3 import KimiK3MoE

    part = lambda rows: SimpleNamespace(weight=torch.nn.Parameter(torch.zeros(rows, 8, dtype=torch.bfloat16)))  # noqa: E731
    moe = bare(
        KimiK3MoE, use_latent_moe=True, shared_experts=SimpleNamespace(gate_up_proj=part(4)), gate=part(2),
        routed_expert_down_proj=part(3), _front_w=None,
    )  # fmt: skip
    KimiK3MoE._merge_front_weights(moe)
    return moe._front_w is not None


def _front_stub() -> None:
    import sglang.srt.runtime_context as context
    from sglang.srt.models import kimi_k3

    lora = SimpleNamespace(enable_lora=True, lora_target_modules={"gate_up_proj", "down_proj"})
    context.get_server_args = lambda: lora
    kimi_k3.get_moe_a2a_backend = lambda: SimpleNamespace(is_none=lambda: True)


def _fusion() -> Any:
    """Whether o_proj of a decoder layer is told to write into the buffer of the fused all-reduce."""
    from sglang.srt.layers import k3_ar_fusion

    return k3_ar_fusion.enabled()


def _fusion_stub() -> None:
    """A machine on which the probe finds what it looks for."""
    import sglang.srt.runtime_context as context
    from sglang.srt.layers import k3_ar_fusion

    context.get_server_args = lambda: SimpleNamespace(enable_lora=True, lora_target_modules={"o_proj"})
    k3_ar_fusion._get_state = lambda: "a Blackwell machine with multicast"


def _experts() -> Any:
    """The LoRA wrapper over packed MXFP4 experts with SiTU: its runner, and whether it takes gates and ups as woven."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    method = bare(Mxfp4MoEMethod, use_marlin=True, hidden_pad=0)
    layer = torch.nn.Module()
    for name, value in {
        "quant_method": method, "num_experts": 2,
        "dispatcher": SimpleNamespace(
            local_expert_mapping=None, num_experts=2, dispatch=lambda **given: given,
            combine=lambda combine_input: combine_input,
        ),
        "num_local_experts": 2, "should_fuse_routed_scaling_factor_in_topk": False, "moe_tp_size": 1,
        "moe_tp_rank": 0, "intermediate_size_per_partition": 128, "hidden_size": 256, "w13_weight": torch.zeros(1),
        "w2_weight": torch.zeros(1), "w13_weight_scale": torch.zeros(1), "w2_weight_scale": torch.zeros(1),
        "moe_runner_config": MoeRunnerConfig(activation="situ", gemm1_alpha=4.0, gemm1_clamp_limit=25.0),
    }.items():  # fmt: skip
        setattr(layer, name, value)
    layer.forward = lambda hidden_states, topk_output: "the base"
    backend = SimpleNamespace(is_moe_lora=False, batch_info=None)
    wrapper = FusedMoEWithLoRA(layer, backend)
    kept = layer.quant_method is method and wrapper.quant_method is method
    core = wrapper._lora_runner.runner_core
    wrapper.set_lora_info(*(torch.zeros(s) for s in ((2, 1, 8, 256), (2, 2, 256, 4), (2, 2, 4, 128), (2, 1, 256, 4))))
    core.run_from_dispatch = lambda dispatched, packed, config, hooks: type(hooks).__name__
    paths = []
    for active in (None, False, True):
        routes = SimpleNamespace(seg_indptr=0, req_to_lora=0, adapter_enabled=0, token_lora_mapping=torch.zeros(3))
        backend.batch_info = None if active is None else SimpleNamespace(
            has_active_lora=active, lora_ranks=torch.tensor([0, 4]), moe_lora_info=routes
        )  # fmt: skip
        paths.append(wrapper.forward(torch.zeros(3, 256), None))
    return [type(core).__name__, wrapper._uses_interleaved_gate_up, kept, paths]


def _experts_stub() -> None:
    import sglang.srt.layers.moe.utils as utils
    from sglang.srt.layers.moe import MoeRunnerBackend

    utils.get_moe_runner_backend = lambda: MoeRunnerBackend.MARLIN


def _buffers() -> Any:
    """Of three requests that verify eight tokens each; without the hook, the error on packed experts."""
    from sglang.srt.lora.backend.base_backend import BaseLoRABackend

    experts = SimpleNamespace(top_k=2, num_experts=4, intermediate_size_per_partition=128, hidden_size=256)
    packed = SimpleNamespace(w13_qweight=torch.zeros(4, 16, 512), w2_qweight=torch.zeros(4, 8, 512))
    backend = bare(BaseLoRABackend)
    BaseLoRABackend.init_cuda_graph_moe_buffers(
        backend, 3, 2, torch.bfloat16, SimpleNamespace(base_layer=experts, _quant_info=packed)
    )
    return [list(backend.moe_cg_buffers[f"intermediate_cache{i}"].shape) for i in (1, 2, 3)]


def _buffers_stub() -> None:
    import sglang.srt.runtime_context as context

    context.get_server_args = lambda: SimpleNamespace(speculative_algorithm="DSPARK", speculative_num_draft_tokens=8)


def _capture() -> Any:
    from sglang.srt.models.kimi_k3 import KimiK3MoE

    moe = bare(KimiK3MoE)
    KimiK3MoE.__init__(moe, 7)
    return moe.topk.layer_id


def _capture_stub() -> None:
    from sglang.srt.models.kimi_k3 import KimiK3MoE

    def init(self: Any, layer_idx: int) -> None:
        object.__setattr__(self, "layer_idx", layer_idx)
        object.__setattr__(self, "topk", SimpleNamespace(layer_id=None))

    KimiK3MoE.__init__ = init


def _swap() -> Any:
    """A layer's packed experts put into a slot of the real pool: copies that it took, and a sum over what is there."""
    from sglang.srt.lora import mem_pool
    from sglang.srt.lora.layers import FusedMoEWithLoRA
    from sglang.srt.lora.mem_pool import LoRAMemoryPool

    experts, rank, held, latent, width, slots = 4, 2, 3, 8, 6, 2
    prefix = "model.layers.0.mlp.experts."
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "gate_up_proj.lora_A": (1, 2 * rank, latent), "gate_up_proj.lora_B": (experts, 2 * width, rank),
        "down_proj.lora_A": (experts, rank, width), "down_proj.lora_B": (1, latent, rank),
    }  # fmt: skip
    weights = {f"{prefix}{n}.weight": torch.randn(s, generator=draw).bfloat16() for n, s in shapes.items()}
    full = lambda *shape: [torch.full((slots, *shape), float("nan"), dtype=torch.bfloat16)]  # noqa: E731
    pool = bare(
        LoRAMemoryPool, target_modules={"gate_up_proj", "down_proj"}, strict_loading=True, num_layer=1, tp_rank=0,
        A_buffer={"gate_up_proj_moe": full(1, 2 * held, latent), "down_proj_moe": full(experts, held, width)},
        B_buffer={"gate_up_proj_moe": full(experts, 2 * width, held), "down_proj_moe": full(1, latent, held)},
        max_lora_rank=held, experts_shared_outer_loras=True, base_model=SimpleNamespace(), pin_memory_available=False,
        moe_use_local_expert_ids=False, enable_lora_overlap_loading=False, lora_added_tokens_size=0,
        embedding_A_buffer={}, embedding_B_buffer={}, lm_head_A_buffer={}, lm_head_B_buffer={},
        new_embeddings_buffer={},
    )  # fmt: skip
    base = SimpleNamespace(
        is_shared_fused_moe=False, moe_tp_rank=0, moe_tp_size=1, intermediate_size_per_partition=width,
        moe_runner_config=SimpleNamespace(is_gated=True),
    )  # fmt: skip
    wrapper = bare(FusedMoEWithLoRA, base_layer=base, tp_size=1, _uses_interleaved_gate_up=False)
    layer = SimpleNamespace(weights=dict(weights), pinned_weights={})
    adapter = SimpleNamespace(
        config=SimpleNamespace(r=rank), layers=[layer], embedding_layers={}, added_tokens_embeddings={}, scaling=2.0
    )
    copies, copy = [0], mem_pool.copy_weight_into_buffer

    def counted(view: torch.Tensor, weight: torch.Tensor) -> None:
        copies[0] += 1
        copy(view, weight)

    mem_pool.copy_weight_into_buffer = counted

    def load() -> None:
        LoRAMemoryPool.load_lora_weight_to_buffer(pool, "id", 1, adapter, [{prefix[:-1]: wrapper}], None, None)

    load()
    mem_pool.copy_weight_into_buffer = copy
    slot = torch.cat([b[0][1].float().flatten() for b in (*pool.A_buffer.values(), *pool.B_buffer.values())])
    checksum, kept = (slot * torch.arange(1, slot.numel() + 1)).sum().item(), len(layer.weights)
    return [copies[0], checksum, kept, outcome(load)]


def _told() -> Any:
    from sglang.srt.managers.scheduler import Scheduler

    return Scheduler.get_internal_state(bare(Scheduler), None).internal_state.get(report.KEY)


def _told_stub() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.get_internal_state = lambda self, request: SimpleNamespace(internal_state={})


CASES: dict[str, tuple[Any, Callable[[], Any], Callable[[], None] | None]] = {
    "config_aliases": (config_aliases, _aliases, None),
    "hidden_dims": (hidden_dims, _dims, None),
    "output_gate": (output_gate, _gate, _gate_stub),
    "moe_front": (moe_front, _front, _front_stub),
    "reduce_fusion": (reduce_fusion, _fusion, _fusion_stub),
    "expert_lora": (expert_lora, _experts, _experts_stub),
    "graph_buffers": (graph_buffers, _buffers, _buffers_stub),
    "expert_capture": (expert_capture, _capture, _capture_stub),
    "direct_swap": (direct_swap, _swap, None),
    "report": (report, _told, _told_stub),
    **DRAFT_CASES,
}


def main() -> None:
    found = {}
    for name, (hook, work, stub) in CASES.items():
        if stub is not None:
            stub()
        without = outcome(work)
        hook.install()
        found[name] = [without, outcome(work)]
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
