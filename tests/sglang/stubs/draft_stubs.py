"""What a DSpark draft beside K3 needs on a CPU, as far as its runner's making goes."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch


def allow_a_cpu(module: Any) -> None:
    """DSpark's arguments are judged as they would be on a GPU."""
    judge = module._handle_dspark

    def judged(server_args: Any) -> None:
        device, server_args.device = server_args.device, "cuda"
        try:
            judge(server_args)
        finally:
            server_args.device = device

    module._handle_dspark = judged


def rotate_natively(module: Any) -> None:
    """A CPU without AMX is sent to a kernel of vLLM's otherwise."""
    make = module.RotaryEmbedding.__init__

    def made(self: Any, *arguments: Any, **options: Any) -> None:
        kept, module._is_cpu = module._is_cpu, True
        try:
            make(self, *arguments, **options)
        finally:
            module._is_cpu = kept

    module.RotaryEmbedding.__init__ = made


def copy_nothing_ahead(module: Any) -> None:
    """A copy of nothing, by which a Triton kernel is compiled before it is needed."""
    module.MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None


def told(scheduler: Any) -> dict[str, Any]:
    """Of a scheduler with a draft: what the draft's runner holds and has no part in, and the segments of a batch with
    each loaded adapter and the base that the target is about to verify."""
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    runner, target = scheduler.draft_worker.draft_model_runner, scheduler.tp_worker.model_runner
    wrapped = [sum(isinstance(m, BaseLayerWithLoRA) for m in model.modules()) for model in (runner.model, target.model)]
    own = (p for n, p in runner.model.named_parameters() if not n.startswith(("embed_tokens.", "lm_head.")))
    cache, pool = target.req_to_token_pool.mamba_pool.mamba_cache, runner.token_to_kv_pool
    return {
        "pool": getattr(runner, "lora_manager", None) is not None, "wrapped": wrapped,
        "weights": _bytes(p for p in own if p.ndim > 1),
        "kv": _bytes([*pool.k_buffer, *pool.v_buffer]),
        "replay": _bytes([cache.intermediate_ssm, *cache.intermediate_conv_window]),
        "verify": _segments(scheduler, target),
    }  # fmt: skip


def _segments(scheduler: Any, target: Any) -> dict[str, Any]:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    ids = [None, *target.lora_manager.loras]
    width, lengths = scheduler.draft_worker.verify_num_draft_tokens, torch.arange(5, 5 + len(ids))
    tokens = torch.zeros(len(ids) * width, dtype=torch.int64)
    requests = [SimpleNamespace(lora_id=name, rid=str(i), token_type_ids=None) for i, name in enumerate(ids)]
    batch: Any = ScheduleBatch(
        reqs=requests, device="cpu",
        forward_mode=ForwardMode.TARGET_VERIFY, input_ids=tokens, seq_lens=lengths, seq_lens_cpu=lengths,
        out_cache_loc=tokens, req_pool_indices=torch.arange(len(ids)), spec_algorithm=target.spec_algorithm,
        spec_info=DFlashVerifyInput(tokens, tokens, width), model_config=target.model_config,
    )  # fmt: skip
    made = ForwardBatch.init_new(
        batch, target, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
    )
    info, pool = target.lora_manager.lora_backend.batch_info, target.lora_manager.memory_pool
    return {
        "slots": [pool.get_buffer_id(name) for name in ids], "lengths": info.seg_lens.tolist(),
        "of_tokens": info.moe_lora_info.token_lora_mapping.tolist(), "left": made.extend_seq_lens_cpu,
    }  # fmt: skip


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their numbers, each tensor once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


PATCHES = {
    "sglang.srt.arg_groups.speculative_hook": allow_a_cpu,
    "sglang.srt.layers.rotary_embedding.base": rotate_natively,
    "sglang.srt.mem_cache.memory_pool": copy_nothing_ahead,
}
