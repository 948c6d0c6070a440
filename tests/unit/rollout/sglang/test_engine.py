"""SglangEngine's contract over a stand-in for SGLang: versions, refusals, answers, stop strings, sleep, ends."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sglang_stand_in import CONFIG, StandIn
from helpers.tiny import tiny_adapter

from miles_k3.adapters.update import make_update
from miles_k3.errors import AdapterError, EngineError
from miles_k3.protocols import Engine
from miles_k3.ray.remote_engine import RemoteEngine
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.rollout.sglang.process import SglangProcess
from miles_k3.types import AdapterConfig, AdapterUpdate, FinishReason, SamplingParams

ADAPTER = AdapterConfig(rank=4, alpha=8.0)
PARAMS = SamplingParams(max_new_tokens=6)


class Letters:
    """Token t is the letter chr(97 + t % 26)."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + t % 26) for t in token_ids)


def engine_over(backend: StandIn, **changes: Any) -> SglangEngine:
    options = {"tokenizer": Letters(), "adapter_config": None, "max_lora_rank": 8, "max_sequence_tokens": 32, **changes}
    return SglangEngine(backend, CONFIG, **options)


def an_update(version: int, config: AdapterConfig = ADAPTER) -> AdapterUpdate:
    return make_update(version, config, tiny_adapter(CONFIG, config))


def ask(engine: SglangEngine, params: SamplingParams = PARAMS, **options: Any) -> Any:
    return asyncio.run(engine.generate([5, 6, 7], params, **options))


def test_it_is_an_engine() -> None:
    engine: Engine = engine_over(StandIn())
    assert engine.adapter_version == -1


def test_an_answer() -> None:
    backend = StandIn()
    engine = engine_over(backend)
    engine.load_adapter(an_update(3))
    answer = ask(engine)
    assert answer.token_ids == (0, 1, 2, 3, 4, 5)
    assert answer.logprobs == (-0.5,) * 6
    assert (answer.text, answer.finish_reason, answer.adapter_version) == ("abcdef", FinishReason.LENGTH, 3)
    told = next(t for t in backend.told if t[0] == "generate")
    assert told[1] == "policy@3"
    assert told[2]["ignore_eos"], "without stop tokens nothing but the limit ends it"
    assert ask(engine, adapter_version=-1).adapter_version == -1
    assert backend.told[-1][1] is None


def test_versions_follow_one_another_and_the_last_but_one_goes() -> None:
    backend = StandIn()
    engine = engine_over(backend)
    for version in range(3):
        engine.load_adapter(an_update(version))
    assert [t[:2] for t in backend.told] == [
        ("load", "policy@0"), ("load", "policy@1"), ("unload", "policy@0"), ("load", "policy@2"),
    ]  # fmt: skip
    assert ask(engine, adapter_version=1).adapter_version == 1
    with pytest.raises(EngineError, match="v0 is not live; live are the base \\(-1\\), v1, v2"):
        ask(engine, adapter_version=0)


def test_a_load_never_waits_for_requests() -> None:
    backend = StandIn()
    engine = engine_over(backend)
    engine.load_adapter(an_update(0))

    async def run() -> None:
        backend.held = asyncio.Event()
        first = asyncio.ensure_future(engine.generate([1], PARAMS))
        await asyncio.sleep(0)
        engine.load_adapter(an_update(1))
        with pytest.raises(AdapterError, match="v2 has to wait: v0 is in use by 1 requests"):
            engine.load_adapter(an_update(2))
        assert engine.adapter_version == 1
        backend.held.set()
        assert (await first).adapter_version == 0
        engine.load_adapter(an_update(2))

    asyncio.run(run())
    assert engine.adapter_version == 2


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda: an_update(5), "expected to be v1"),
        (lambda: an_update(1, AdapterConfig(rank=16, alpha=1.0)), "set rollout.max_lora_rank: 16"),
        (lambda: dataclasses.replace(an_update(1), sha256="0" * 64), "sha256"),
        (lambda: make_update(1, ADAPTER, dict(list(an_update(1).tensors.items())[:-1])), "lacks 1 of"),
        (lambda: an_update(1, AdapterConfig(rank=2, alpha=1.0)), r"rank=2.*rank=4"),
    ],
    ids=["skipped", "rank", "hash", "incomplete", "another"],
)
def test_a_refused_update_never_reaches_sglang(update: Callable[[], AdapterUpdate], message: str) -> None:
    backend = StandIn()
    engine = engine_over(backend, adapter_config=ADAPTER)
    engine.load_adapter(an_update(0))
    told = list(backend.told)
    with pytest.raises(AdapterError, match=message):
        engine.load_adapter(update())
    assert backend.told == told
    assert engine.adapter_version == 0


@pytest.mark.parametrize(
    ("tokens", "changes", "message"),
    [
        ([], {}, "prompt is empty"),
        ([256], {}, r"token 256 at position 0; the model's vocabulary is 0\.\.255"),
        ([1] * 30, {}, "30 tokens and max_new_tokens is 6.*limited to 32"),
        ([1], {"temperature": -1.0}, "temperature is -1"),
        ([1], {"top_p": 0.5}, "log-probabilities leave both out"),
        ([1], {"top_k": 3}, "log-probabilities leave both out"),
        ([1], {"stop": ("",)}, "a stop string is empty"),
        ([1], {"seed": 2**63}, "seed is 9223372036854775808"),
        ([1], {"return_routed_experts": True}, "set algorithm.routing_replay: true"),
    ],
)
def test_bad_requests(tokens: list[int], changes: dict[str, Any], message: str) -> None:
    backend = StandIn()
    engine = engine_over(backend)
    with pytest.raises(EngineError, match=message):
        asyncio.run(engine.generate(tokens, dataclasses.replace(PARAMS, **changes)))
    assert backend.told == []
    assert engine.stats()["running"] == 0


def test_an_id_in_use() -> None:
    backend = StandIn()
    engine = engine_over(backend)

    async def run() -> None:
        backend.held = asyncio.Event()
        first = asyncio.ensure_future(engine.generate([1], PARAMS, request_id="twice"))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="'twice' is in use"):
            await engine.generate([2], PARAMS, request_id="twice")
        backend.held.set()
        await first

    asyncio.run(run())


def test_a_stop_string_ends_the_answer_where_it_is_complete() -> None:
    backend = StandIn()
    engine = engine_over(backend)
    heard: list[int] = []
    answer = ask(engine, dataclasses.replace(PARAMS, stop=("cd",)), request_id="r",
                 on_tokens=lambda tokens, _: heard.extend(tokens))  # fmt: skip
    assert answer.text == "ab"
    assert answer.token_ids == (0, 1, 2, 3)
    assert len(answer.logprobs) == 4
    assert answer.finish_reason is FinishReason.STOP
    assert backend.aborted == {"r"}
    assert tuple(heard) == answer.token_ids


def test_a_stop_token_is_kept_and_not_in_the_text() -> None:
    answer = ask(engine_over(StandIn()), dataclasses.replace(PARAMS, stop_token_ids=(5,)))
    assert (answer.token_ids[-1], answer.text) == (5, "abcde")


def test_routed_experts_are_those_of_the_moe_layers() -> None:
    engine = engine_over(StandIn(), routed_experts=True)
    answer = ask(engine, dataclasses.replace(PARAMS, return_routed_experts=True))
    assert answer.routed_experts.shape == (3 + 6 - 1, len(CONFIG.moe_layers), 2)
    assert answer.routed_experts.dtype == torch.int16
    assert answer.routed_experts[0, :, 0].tolist() == list(CONFIG.moe_layers)


def test_numbers_that_are_not_finite_are_an_error() -> None:
    backend = StandIn()
    backend.logprob = float("nan")
    answer = ask(engine_over(backend))
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.error is not None


def test_scores_are_aligned_and_at_temperature_one() -> None:
    backend = StandIn()
    engine = engine_over(backend)
    engine.load_adapter(an_update(0))
    scores = engine.score([[1, 2, 3], [4]])
    assert [s.tolist() for s in scores] == [[-1.0, -1.0], []]
    assert backend.told[-1] == ("score", "policy@0")
    with pytest.raises(EngineError, match="temperature 1 only"):
        engine.score([[1, 2]], temperature=0.7)


def test_sleep_and_wake() -> None:
    backend = StandIn()
    with pytest.raises(EngineError, match=r"set rollout.sleep_while_training: true"):
        engine_over(backend).sleep()
    engine = engine_over(backend, memory_saver=True)
    engine.sleep()
    with pytest.raises(EngineError, match="while the engine sleeps"):
        ask(engine)
    engine.wake()
    engine.wake()
    assert backend.told == [("release", "kv_cache", "weights"), ("resume", "weights", "kv_cache")]
    assert ask(engine).finish_reason is FinishReason.LENGTH


def test_closed_stays_closed() -> None:
    engine = engine_over(StandIn(), memory_saver=True)
    engine.close()
    for verb in (lambda: ask(engine), engine.wake, lambda: engine.load_adapter(an_update(0))):
        with pytest.raises(EngineError, match="closed"):
            verb()


def test_sglangs_end_in_the_midst_of_a_request_is_nobodys_affair() -> None:
    """Another is started with the newest adapter, and the request is issued again."""
    backends: list[StandIn] = []

    def start() -> SglangProcess:
        backends.append(StandIn())
        backends[-1].gone = False
        return SglangProcess(lambda: engine_over(backends[-1]))

    remote = RemoteEngine(start, name="SGLang", restarts=2, timeout_s=30.0).ready()
    remote.load_adapter(an_update(0))
    backends[0].gone = True
    answer = asyncio.run(remote.generate([1, 2], PARAMS))
    assert answer.adapter_version == 0
    assert answer.finish_reason is FinishReason.LENGTH
    assert len(backends) == 2
    assert ("load", "policy@0", 0) in backends[1].told
    assert ("close",) in backends[0].told
    assert remote.stats()["restarts"] == 1
