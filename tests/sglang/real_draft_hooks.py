"""Cases of `real_hooks` that a DSpark draft beside LoRA needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from bare import bare, outcome

from miles_k3.rollout.sglang.hooks import draft_allowed, draft_logprobs, draft_runner, verify_batch

WIDTH, REQUESTS = 8, 3
IDS, SLOTS = ["b", None, "a"], [2, 0, 1]  # adapters of three requests, and where the pool has them


def _overrides() -> Any:
    """Whether a draft's runner is told to have adapters."""
    from sglang.srt.speculative import draft_worker_common

    model = SimpleNamespace(context_len=64)
    return draft_worker_common.draft_server_args_overrides(model, "triton").get("enable_lora")


def _overrides_stub() -> None:
    from sglang.srt.speculative import draft_worker_common

    draft_worker_common.get_schedule = lambda: SimpleNamespace(disable_chunked_prefix_cache=False)
    draft_worker_common.get_spec = lambda: SimpleNamespace(speculative_draft_load_format=None)


def _manager(backend: Any) -> Any:
    from sglang.srt.lora.lora_manager import LoRAManager

    slots = dict(zip(IDS, SLOTS, strict=True))
    adapter = SimpleNamespace(config=SimpleNamespace(r=4), scaling=2.0)
    return bare(
        LoRAManager, max_loras_per_batch=3, loras={"a": adapter, "b": adapter}, lora_backend=backend,
        memory_pool=SimpleNamespace(uid_to_buffer_id=slots, get_buffer_id=slots.get),
    )  # fmt: skip


def _batch(layout: Any = None) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    tokens = torch.arange(REQUESTS * WIDTH)
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=REQUESTS, input_ids=tokens, lora_ids=IDS,
        extend_seq_lens=None, extend_seq_lens_cpu=None, extend_num_tokens=None, return_logprob=False,
        spec_info=DFlashVerifyInput(tokens, tokens, WIDTH, ragged_verify_layout=layout),
    )  # fmt: skip


def _verify() -> Any:
    """The segments of a batch under verification, without a captured graph and for one, by SGLang's Triton backend; and
    what its plain backend computes of them, beside a loop over the tokens."""
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
    from sglang.srt.lora.backend.triton_backend import TritonLoRABackend

    cpu = torch.device("cpu")
    backend = TritonLoRABackend(3, cpu)
    backend.is_moe_lora = True
    manager, batch = _manager(backend), _batch()
    manager.prepare_lora_batch(batch)
    info = backend.batch_info
    found: dict[str, Any] = {}
    found["eager"] = [t.tolist() for t in (info.seg_lens, info.seg_indptr, info.moe_lora_info.token_lora_mapping)]
    backend.init_cuda_graph_batch_info(4, WIDTH)
    backend.moe_cg_buffers = {
        "adapter_enabled": torch.zeros(3, dtype=torch.int32),
        "token_lora_mapping": torch.full((4 * WIDTH,), -1, dtype=torch.int32),
    }
    manager.max_bs_in_cuda_graph = 4
    manager.prepare_lora_batch(batch)
    info = backend.batch_info
    assert info is backend.cuda_graph_batch_info
    found["graph"] = [t.tolist() for t in (info.seg_indptr, info.weight_indices, info.moe_lora_info.token_lora_mapping)]
    plain = TorchNativeLoRABackend(3, cpu)
    _manager(plain).prepare_lora_batch(batch)
    found["apart"] = _apart(plain)
    found["left"] = batch.extend_seq_lens_cpu
    found["ragged"] = outcome(lambda: _manager(plain).prepare_lora_batch(_batch("ragged")))
    return found


def _verify_stub() -> None:
    """The graph's buffers on the CPU."""
    from sglang.srt.lora.backend import triton_backend

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def device(self, _: Any) -> Any:
            return torch.device("cpu")

    triton_backend.torch = Torch()


def _apart(backend: Any) -> float:
    """The largest difference of a LoRA product of the prepared batch to one of each token by itself."""
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(s, generator=generator) for s in ((REQUESTS * WIDTH, 16), (3, 4, 16), (3, 6, 4)))
    low = backend.run_lora_a_sgemm(x, a)
    found = backend.run_lora_b_sgemm(low, b, torch.tensor([0, 6]), torch.zeros(REQUESTS * WIDTH, 6))
    expected = torch.zeros_like(found)
    for request, slot in enumerate(SLOTS):
        for row in range(request * WIDTH, (request + 1) * WIDTH):
            if slot:
                expected[row] = 2.0 * (b[slot] @ (a[slot] @ x[row]))
    return round((found - expected).abs().max().item(), 4)


def _logprobs() -> Any:
    """Of two requests that verified three tokens each, at different temperatures, and what a prompt's batch says."""
    from sglang.srt.managers import scheduler
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    tokens, warmth = torch.tensor([4, 1, 0, 2, 2, 3]), torch.tensor([[1.0], [0.5]])
    result = SimpleNamespace(
        accept_lens=torch.tensor([3, 1]), next_token_ids=tokens, speculative_num_draft_tokens=3,
        logits_output=SimpleNamespace(next_token_logits=logits, next_token_logprobs=None),
    )  # fmt: skip
    batch = SimpleNamespace(
        return_logprob=True, seq_lens=torch.tensor([7, 9]), is_extend_in_batch=False, top_logprobs_nums=None,
        token_ids_logprobs=None, sampling_info=SimpleNamespace(is_all_greedy=False, temperatures=warmth), result=result,
        forward_mode=SimpleNamespace(is_extend=lambda: False),
    )  # fmt: skip
    worker = bare(DSparkWorkerV2, _target_worker=None, _verify_planner=_Deaf(), _observers=_Deaf())
    worker.forward_batch_generation(batch)
    found = result.logits_output.next_token_logprobs
    expected = (logits / warmth.repeat_interleave(3, 0)).log_softmax(-1).gather(1, tokens[:, None]).view(2, 3)
    batch.forward_mode = SimpleNamespace(is_extend=lambda: True)
    saw = worker.forward_batch_generation(batch).saw
    request = SimpleNamespace(return_logprob=True, return_hidden_states=False)
    return {
        "request": scheduler.validate_dflash_request(request, True), "shape": list(found.shape),
        "apart": round((found - expected).abs().max().item(), 6), "prompt saw": saw, "left": batch.return_logprob,
    }  # fmt: skip


class _Deaf:
    def __getattr__(self, _: str) -> Callable[[], None]:
        return lambda: None


def _logprobs_stub() -> None:
    """In the place of the forwards: what a verify hands back, and what a prompt's forward would see."""
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

    def prefill(self: Any, batch: Any, on_publish: Any) -> Any:
        return SimpleNamespace(saw=batch.return_logprob, accept_lens=None)

    DSparkWorkerV2._forward_decode = lambda self, batch, *_: batch.result
    DSparkWorkerV2._forward_prefill = prefill


def _check() -> Any:
    """SGLang's own check of LoRA's arguments beside a draft: passed with its algorithm in place; refused where requests
    verify different numbers of tokens, where acceptance is supposed, and with another kind of draft."""
    from sglang.srt.server_args import ServerArgs

    options = bare(
        ServerArgs, max_loras_per_batch=3, lora_paths=[], enable_lora=True, enable_lora_overlap_loading=False,
        speculative_algorithm="DSPARK", lora_target_modules={"o_proj"}, max_lora_rank=4, max_loaded_loras=None,
        max_lora_chunk_size=16, lora_use_virtual_experts=False, lora_drain_wait_threshold=0.0,
    )  # fmt: skip
    options.check_lora_server_args()
    found = [options.speculative_algorithm]
    for name, value in (("SGLANG_RAGGED_VERIFY_MODE", "compact"), ("SGLANG_SIMULATE_ACC_LEN", "2.5")):
        os.environ[name] = value
        found.append(outcome(options.check_lora_server_args).partition(",")[0].partition(": a ")[0])
        del os.environ[name]
    object.__setattr__(options, "speculative_algorithm", "EAGLE")
    return [*found, outcome(options.check_lora_server_args).partition(" is")[0]]


DRAFT_CASES: dict[str, tuple[Any, Callable[[], Any], Callable[[], None] | None]] = {
    "draft_runner": (draft_runner, _overrides, _overrides_stub),
    "verify_batch": (verify_batch, _verify, _verify_stub),
    "draft_logprobs": (draft_logprobs, _logprobs, _logprobs_stub),
    "draft_allowed": (draft_allowed, _check, None),
}
