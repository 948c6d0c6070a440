"""The engine's contract beside the numbers: refusals, aborts, cancellation, sleep, event loops, shared storage."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from helpers.engines import (
    GREEDY,
    ask,
    assert_idle,
    make_engine,
    random_prompts,
    weights,
)
from helpers.tiny import tiny_base, tiny_config

from miles_k3.errors import EngineError
from miles_k3.k3.naive import NaiveK3
from miles_k3.protocols import Engine
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.types import FinishReason, SamplingParams

PROMPTS = random_prompts(12, seed=21)
ENDLESS = SamplingParams(max_new_tokens=60, seed=1)


class Letters:
    """A tokenizer of 256 tokens: token t is the letter chr(97 + t % 26); 2 is special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + t % 26) for t in token_ids if t != 2 or not skip_special_tokens)


def test_it_is_an_engine() -> None:
    engine: Engine = make_engine()
    assert engine.adapter_version == -1


def test_the_base_is_shared_not_copied() -> None:
    """Every matrix that the model multiplies with lies in the base's memory; what is derived is small."""
    base = tiny_base(tiny_config(), weights())
    before = {t.untyped_storage().data_ptr() for t in _tensors_of(base)}
    engine = EmbeddedEngine(base, base.config, max_sequence_tokens=64, max_running=2)
    model = engine.runner.model
    own = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in _tensors_of([model.weights, *model.attentions, *model.mlps, *model.moes])
    }
    assert before & set(own)
    copied = sum(size for pointer, size in own.items() if pointer not in before)
    # Left over: AttnRes queries, convolution weights and decay rates; no matrix of the model is that small.
    assert copied < 0.05 * base.num_bytes()
    assert {t.data_ptr() for t in (model.weights.embed, model.weights.head)} <= before
    ask(engine, PROMPTS[:1], dataclasses.replace(GREEDY, max_new_tokens=2))
    assert {t.untyped_storage().data_ptr() for t in _tensors_of(base)} == before


def _tensors_of(*roots: object) -> list[torch.Tensor]:
    """All tensors reachable from some objects, without following types and modules."""
    found, seen, todo = [], set(), list(roots)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (type, str, int, float, torch.dtype, torch.device)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif type(item).__module__.startswith("miles_k3") or isinstance(item, (list, tuple, dict)):
            todo += gc.get_referents(item)
    return found


# --- refusals -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tokens", "changes", "message"),
    [
        ([], {}, "prompt is empty"),
        ([5, 256], {}, r"token 256 at position 1; the model's vocabulary is 0\.\.255"),
        ([-1], {}, "token -1 at position 0"),
        ([1] * 30, {}, r"30 tokens and max_new_tokens is 8.*limited to 32; raise task.max_prompt_tokens or lower"),
        ([1] * 20, {}, "needs 7 cache pages and a state, more than the pool.*set rollout.num_pages: 7"),
        ([1], {"temperature": -0.5}, "temperature is -0.5"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"temperature": float("inf")}, "temperature is inf"),
        ([1], {"temperature": 1e-45}, r"temperature is 1e-45; expected 0 \(greedy\) or a finite number from 1e-10 on"),
        ([1], {"top_p": 0.0}, "top_p is 0.0"),
        ([1], {"top_p": 1.5}, "top_p is 1.5"),
        ([1], {"top_k": -1}, "top_k is -1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"seed": 2**63}, "seed is 9223372036854775808; expected a number of 64 bits"),
        ([1], {"seed": -(2**63) - 1}, "seed is -9223372036854775809; expected"),
        ([1], {"stop": ("x",)}, "stop strings need a tokenizer"),
        ([1], {"stop": ("",)}, "a stop string is empty"),
    ],
)
def test_bad_requests(tokens: list[int], changes: dict, message: str) -> None:
    engine = make_engine(max_sequence_tokens=32, num_pages=5, page_size=4, cache_pool="split")
    with pytest.raises(EngineError, match=message):
        ask(engine, [tokens], dataclasses.replace(GREEDY, **changes))
    assert_idle(engine)
    assert len(ask(engine, [[1, 2]])[0].token_ids) == 8


def test_the_coldest_temperature_is_as_good_as_greedy() -> None:
    (greedy,), (cold,) = (
        ask(make_engine(), [[1, 2]], dataclasses.replace(GREEDY, temperature=t)) for t in (0.0, 1e-10)
    )
    assert cold.token_ids == greedy.token_ids
    assert cold.logprobs == (0.0,) * len(cold.token_ids)


def test_every_seed_of_64_bits_draws_its_own() -> None:
    seeds = (-1, 1, -(2**63), 2**63 - 1)
    params = [dataclasses.replace(GREEDY, temperature=5.0, seed=seed) for seed in seeds]
    assert len({ask(make_engine(), [[1, 2]], p)[0].token_ids for p in params}) == len(seeds)


def test_a_version_that_is_not_live() -> None:
    with pytest.raises(EngineError, match="v3 is not live"):
        ask(make_engine(), [[1]], adapter_version=3)


def test_an_id_in_use() -> None:
    engine = make_engine()
    with pytest.raises(EngineError, match="'twice' is in use"):
        ask(engine, [[1], [2]], request_id="twice")
    assert_idle(engine)


def test_another_dtype_than_the_bases() -> None:
    base = tiny_base(tiny_config(), weights())
    with pytest.raises(EngineError, match=r"asked for torch.bfloat16, the base it shares is torch.float32"):
        EmbeddedEngine(base, base.config, max_sequence_tokens=8, dtype=torch.bfloat16)


def test_another_config_than_the_bases() -> None:
    """A config of other eps would be silently ignored: the model computes with its base's."""
    base = tiny_base(tiny_config(), weights())
    with pytest.raises(EngineError, match="another config"):
        EmbeddedEngine(base, tiny_config(mla_latent_norm_eps=1e-6), max_sequence_tokens=8)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_score_refuses_temperatures(temperature: float) -> None:
    with pytest.raises(EngineError, match="temperature"):
        make_engine().score([[1, 2]], temperature=temperature)


def test_score_refuses_bad_tokens() -> None:
    with pytest.raises(EngineError, match="sequence 1 has token 999"):
        make_engine().score([[1, 2], [3, 999]])


# --- stop conditions ------------------------------------------------------------------------------------------------
def test_stop_tokens_end_the_text_before_them() -> None:
    engine = make_engine(tokenizer=Letters())
    (free,) = ask(engine, PROMPTS[:1], SamplingParams(max_new_tokens=20, seed=3))
    stop = free.token_ids[6]
    count = free.token_ids.index(stop) + 1
    (stopped,) = ask(engine, PROMPTS[:1], SamplingParams(max_new_tokens=20, seed=3, stop_token_ids=(stop, 999)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[:count]
    assert stopped.logprobs == pytest.approx(free.logprobs[:count], abs=1e-5)
    assert stopped.text == Letters().decode(list(free.token_ids[: count - 1]))
    assert free.finish_reason is FinishReason.LENGTH


def test_stop_strings_cut_the_text_and_keep_the_tokens() -> None:
    engine = make_engine(tokenizer=Letters())
    (free,) = ask(engine, PROMPTS[:1], SamplingParams(max_new_tokens=20, seed=3))
    stop = free.text[5:8]
    at = free.text.index(stop)
    (stopped,) = ask(engine, PROMPTS[:1], SamplingParams(max_new_tokens=20, seed=3, stop=("never seen", stop)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == free.text[:at]
    assert stopped.token_ids == free.token_ids[: at + 3]


def test_tokens_are_told_as_they_are_sampled() -> None:
    engine = make_engine()
    told: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
    [completion] = ask(
        engine, PROMPTS[:1], on_tokens=lambda tokens, logprobs: told.append((tuple(tokens), tuple(logprobs)))
    )
    assert len(told) > 1
    assert tuple(t for tokens, _ in told for t in tokens) == completion.token_ids
    assert tuple(p for _, logprobs in told for p in logprobs) == completion.logprobs


def test_routed_experts_are_the_oracles() -> None:
    engine = make_engine(prefill_chunk_tokens=7)
    prompts = [p for p in PROMPTS if len(p) > 8][:2]
    answers = ask(engine, prompts, dataclasses.replace(GREEDY, return_routed_experts=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer.token_ids][:-1]])
        expected = _naive_routes(tokens)
        assert answer.routed_experts is not None
        assert answer.routed_experts.dtype == torch.int16
        assert answer.routed_experts.shape == (tokens.shape[1], 7, 2)
        assert torch.equal(answer.routed_experts.long().sort(-1).values, expected)


def _naive_routes(tokens: torch.Tensor) -> torch.Tensor:
    """[T, MoE layers, K], sorted: the top two of sigmoid(logits) + bias that NaiveK3 sees."""
    routes = []

    class Recording(NaiveK3):
        def moe(self, x: torch.Tensor, i: int) -> torch.Tensor:
            name = f"language_model.model.layers.{i}.block_sparse_moe.gate."
            scores = (x @ self.weight(name + "weight").t()).sigmoid() + self.weight(name + "e_score_correction_bias")
            routes.append(scores[0].topk(2).indices.sort(-1).values)
            return super().moe(x, i)

    with torch.no_grad():
        Recording(tiny_config(), weights())(tokens)
    return torch.stack(routes, dim=1)


# --- results ----------------------------------------------------------------------------------------------------------
def test_results_may_enter_autograd() -> None:
    """Inference tensors can't be saved for a backward pass, so none leaves the engine."""
    engine = make_engine()
    (answer,) = ask(engine, PROMPTS[:1], dataclasses.replace(GREEDY, return_routed_experts=True))
    assert answer.routed_experts is not None
    for tensor in (answer.routed_experts, *engine.score(PROMPTS[:2])):
        assert not tensor.is_inference()


def test_stats_count() -> None:
    engine = make_engine()
    ask(engine, PROMPTS)
    stats = engine.stats()
    assert stats["prompt_tokens"] == sum(map(len, PROMPTS))
    assert stats["generated_tokens"] == 8 * len(PROMPTS)
    assert stats["finished_length"] == len(PROMPTS)
    assert stats["prefill_s"] > 0
    assert stats["decode_s"] > 0
