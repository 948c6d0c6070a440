"""The same engine on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.engines import (
    adapter_update,
    answer_logits,
    ask,
    assert_greedy,
    assert_idle,
    make_engine,
    oracle,
    poison_before_steps,
    random_prompts,
    tokens_of,
)
from helpers.speculating import book_of, speculating_engine

from miles_k3.errors import EngineError
from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.engine_costs import measure_engine
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.types import SamplingParams

PROMPTS = [p for p in random_prompts(12, seed=41) for _ in range(2)]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("adapted", [False, True])
def test_greedy_equals_the_oracle(adapted: bool) -> None:
    engine, update = make_engine(device="cuda", prefill_chunk_tokens=50, max_running=10), None
    if adapted:
        update = adapter_update(0)
        engine.load_adapter(update)
    answers = ask(engine, PROMPTS)
    assert_greedy(answer_logits(oracle(adapter=update), PROMPTS, tokens_of(answers)), answers, tolerance=1e-3)
    assert_idle(engine)


def test_draws_and_versions_equal_the_cpus() -> None:
    params = [
        SamplingParams(
            max_new_tokens=6, seed=i, top_k=30 * (i % 2), top_p=(1.0, 0.9)[i % 2], return_routed_experts=True
        )
        for i in range(len(PROMPTS))
    ]
    answers = []
    for device in ("cpu", "cuda"):
        engine = make_engine(device=device, prefill_chunk_tokens=50, max_running=10)
        engine.load_adapter(adapter_update(0))
        answers.append(ask(engine, PROMPTS, params) + ask(engine, PROMPTS, params, adapter_version=-1))
        engine.sleep()
        engine.wake()
    assert tokens_of(answers[0]) == tokens_of(answers[1])
    for on_cpu, on_gpu in zip(*answers, strict=True):
        assert on_gpu.logprobs == pytest.approx(on_cpu.logprobs, abs=1e-3)
        assert on_gpu.routed_experts is not None
        assert not on_gpu.routed_experts.is_cuda


def test_the_host_waits_for_sampled_tokens_only() -> None:
    """Through events: nothing else may synchronize. In BF16: torch's grouped product loops on the host in fp32."""
    engine = make_engine(device="cuda", dtype=torch.bfloat16, prefix_cache="radix", cache_min_tokens=1)
    ask(engine, PROMPTS, SamplingParams(max_new_tokens=4))
    torch.cuda.set_sync_debug_mode("error")
    try:
        answers = ask(engine, random_prompts(8, seed=42), SamplingParams(max_new_tokens=4))
        answers += ask(engine, PROMPTS, SamplingParams(max_new_tokens=4))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(a.token_ids) == 4 for a in answers)


@pytest.mark.parametrize("policy", ["radix", "paged"])
@pytest.mark.parametrize("pool", ["unified", "split"])
def test_warm_overlapped_answers_equal_the_cpus(policy: str, pool: str) -> None:
    """Prefixes, retraction and moving blocks on the device, with NaN in all free memory."""
    params = [SamplingParams(max_new_tokens=5 + i % 7, seed=i, stop_token_ids=(3, 5, 7)) for i in range(len(PROMPTS))]
    options: dict[str, Any] = {
        "page_size": 8, "prefill_chunk_tokens": 40, "max_running": 7, "num_pages": 40, "cache_min_tokens": 1,
        "reserve_tokens": 2, "top_k": 8, "track_interval": 8,
    }  # fmt: skip
    expected = ask(make_engine(top_k=8, share_prompts=False), PROMPTS, params)
    engine = make_engine(device="cuda", prefix_cache=policy, cache_pool=pool, **options)
    poison_before_steps(engine)
    for _ in range(2):
        answers = ask(engine, PROMPTS, params)
        assert tokens_of(answers) == tokens_of(expected)
        for on_gpu, on_cpu in zip(answers, expected, strict=True):
            assert on_gpu.logprobs == pytest.approx(on_cpu.logprobs, abs=1e-3)
        assert_idle(engine)
    assert engine.stats()["cached_prompt_tokens"] > 0 or policy == "paged"  # whose few states are evicted here
    assert engine.stats()["discarded_tokens"] > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("every", [1, 3, 1000])
def test_speculation_gives_plain_answers(every: int) -> None:
    params = [SamplingParams(max_new_tokens=14, seed=i, temperature=float(i % 2)) for i in range(len(PROMPTS))]
    plain = ask(make_engine(device="cuda", top_k=8), PROMPTS, params)
    engine = speculating_engine(
        book_of(PROMPTS, params, plain), every=every, device="cuda", top_k=8, max_running=10, prefix_cache="radix",
        cache_min_tokens=1, page_size=8, track_interval=8,
    )  # fmt: skip
    answers = ask(engine, PROMPTS, params)
    assert tokens_of(answers) == tokens_of(plain)
    for answer, other in zip(answers, plain, strict=True):
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert_idle(engine)
    assert engine.stats()["verify_steps"] > 0


@pytest.mark.timeout(300)
def test_a_random_draft_on_the_device() -> None:
    """The draft's own kernels, its context in the pages, and the costs that trim goes by."""
    params = [SamplingParams(max_new_tokens=9, seed=i, temperature=float(i % 2)) for i in range(len(PROMPTS))]
    plain = ask(make_engine(device="cuda", top_k=8), PROMPTS, params)
    engine = speculating_engine(None, device="cuda", top_k=8, max_running=10, how={"mode": PlanMode.TRIM})
    assert engine.speculator is not None
    engine.speculator.planner.profile = measure_engine(engine)
    assert tokens_of(ask(engine, PROMPTS, params)) == tokens_of(plain)
    engine.speculator.planner.profile = None
    assert tokens_of(ask(engine, PROMPTS, params)) == tokens_of(plain)
    assert engine.stats()["drafted_tokens"] > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_recorded_speculation_is_that_of_launched_kernels(accept: str) -> None:
    """Verifies that draft in the replay, tiers and padding rows, requests that come and go, the base beside a version,
    NaN in all free memory: answers, and what requests hold after each step."""
    from helpers.fused_graphs import compare

    found = compare("cuda", 9, 9, AcceptMode(accept), max_running=5, prefill_chunk_tokens=24)
    for name in ("launched", "recorded"):
        assert found[name]["tokens"] == found[name]["routes"] == 0, found
        assert found[name]["logprobs"] < 1e-3, found
    assert found["held"] < 1e-3, found
    assert found["wrong states"] == 0, found
    assert found["drafted"] > found["accepted"] > 20, found
    assert found["graphs"] > 2, found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("trim", [False, True])
def test_fifty_recorded_steps_need_nothing_new(trim: bool) -> None:
    """No graph, no kernel, no memory, and no wait of the host but for the step's own numbers."""
    from helpers.fused_engines import make, update_of
    from helpers.fused_graphs import FIFTY, fifty_steps, short_draft

    engine = make("fused", device="cuda", speculative=short_draft(), **FIFTY)
    found = fifty_steps(engine, lambda version: update_of(version, engine.config), trim=trim)
    assert (found["graphs"], found["kernels"], found["verifies"]) == (0, 0, 50), found
    assert found["bytes"] < 1 << 20, found


@pytest.mark.timeout(300)  # Triton compiles some hundred kernels
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graphs"])
def test_kernels_equal_the_plain_forward(recorded: bool) -> None:
    """fp32 on packed experts: the base, an adapter, versions side by side, NaN in all free memory, overlapped steps."""
    from helpers.fused_engines import differences, make, run

    plain = run(make("plain", device="cuda", prefill_chunk_tokens=24), 9, 6)
    fused = run(make("fused", device="cuda", prefill_chunk_tokens=24, cuda_graphs=recorded), 9, 6)
    found = differences(plain, fused)
    assert found["tokens"] == found["routes"] == 0, found
    assert found["logprobs"] < 1e-3, found


@pytest.mark.timeout(300)
def test_recorded_steps_follow_a_swap_and_a_sleep() -> None:
    """A new adapter in a slot that graphs read, and caches at new addresses after sleep."""
    from helpers.fused_engines import make, update_of

    prompts, params = random_prompts(3, low=4, high=12, seed=8), SamplingParams(max_new_tokens=5, seed=1)
    answers = []
    for kernels in ("plain", "fused"):
        engine = make(kernels, device="cuda")
        found = []
        for version in range(4):
            engine.load_adapter(update_of(version, engine.config))
            found += ask(engine, prompts, params)
            if version == 1:
                engine.sleep()
                engine.wake()
        answers.append(tokens_of(found))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_experts_that_the_host_multiplies_are_not_recorded(dtype: torch.dtype) -> None:
    """torch's grouped_mm of unpacked experts: in fp32 it loops on the host, which no graph holds."""
    engine = make_engine(device="cuda", dtype=dtype)
    ask(engine, PROMPTS[:3])
    assert (engine.runner.graphs is not None) is (dtype is torch.bfloat16)
    if dtype is torch.float32:
        with pytest.raises(EngineError, match=r"expert by expert in float32; leave it null"):
            make_engine(device="cuda", cuda_graphs=True)
