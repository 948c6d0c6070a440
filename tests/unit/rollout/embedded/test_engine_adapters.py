"""Adapters in the engine: applied once, by version, for the right tokens, or not at all."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from helpers.engines import (
    ADAPTER,
    GREEDY,
    adapter_update,
    answer_logits,
    ask,
    assert_greedy,
    assert_idle,
    make_engine,
    oracle,
    random_prompts,
    tokens_of,
)
from helpers.tiny import tiny_adapter, tiny_config

from miles_k3.adapters.update import make_update
from miles_k3.errors import AdapterError, EngineError
from miles_k3.rollout.embedded.lora import StepAdapters
from miles_k3.types import AdapterConfig, Completion

PROMPTS = random_prompts(16, seed=3)


def test_answers_and_logprobs_under_an_adapter() -> None:
    """alpha / r is 3 here: applied twice, never, or as alpha, the oracle's logits would be far away."""
    engine, update = make_engine(), adapter_update(0)
    engine.load_adapter(update)
    answers = ask(engine, PROMPTS)
    assert {a.adapter_version for a in answers} == {0}
    assert_greedy(answer_logits(oracle(adapter=update), PROMPTS, tokens_of(answers)), answers)


def test_the_oracle_sees_the_adapter() -> None:
    """The check above must be able to fail: the base's answers, and those at another scale, don't pass it."""
    engine, update = make_engine(), adapter_update(0)
    wrong = dataclasses.replace(update, config=dataclasses.replace(ADAPTER, alpha=2 * ADAPTER.alpha))
    logits = answer_logits(oracle(adapter=update), PROMPTS, tokens_of(ask(engine, PROMPTS)))
    with pytest.raises(AssertionError):
        assert_greedy(logits, ask(engine, PROMPTS))
    engine.load_adapter(make_update(0, wrong.config, wrong.tensors))
    answers = ask(engine, PROMPTS)
    with pytest.raises(AssertionError):
        assert_greedy(answer_logits(oracle(adapter=update), PROMPTS, tokens_of(answers)), answers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b_zero_is_the_base_bit_for_bit(dtype: torch.dtype) -> None:
    engine = make_engine(dtype=dtype)
    base, scored = ask(engine, PROMPTS), engine.score(PROMPTS)
    tensors = tiny_adapter(tiny_config(), ADAPTER)
    zeroed = {name: t.zero_() if "lora_B" in name else t for name, t in tensors.items()}
    engine.load_adapter(make_update(0, ADAPTER, zeroed))
    adapted = ask(engine, PROMPTS)
    assert [(a.token_ids, a.logprobs) for a in adapted] == [(b.token_ids, b.logprobs) for b in base]
    for with_adapter, without in zip(engine.score(PROMPTS), scored, strict=True):
        assert torch.equal(with_adapter, without)


def test_every_target_moves_the_logits() -> None:
    """Each module's factors, alone, change the scores: no target is silently left out."""
    tensors = tiny_adapter(tiny_config(), ADAPTER, scale=0.2)
    engine = make_engine(calm=True)
    sequence = [PROMPTS[0] + PROMPTS[1]]
    before = engine.score(sequence)[0]
    modules = sorted({name.rsplit(".lora_", 1)[0] for name in tensors})
    chosen = {m.split("layers.")[1].split(".", 1)[1]: m for m in modules}  # one layer of each kind of module
    for version, module in enumerate(chosen.values()):
        kept = {
            name: t.clone() if name.startswith(module + ".") or "lora_A" in name else torch.zeros_like(t)
            for name, t in tensors.items()
        }
        engine.load_adapter(make_update(version, ADAPTER, kept))
        assert (engine.score(sequence)[0] - before).abs().max() > 1e-4, module


def test_ranks_below_the_slots_and_separate_gate_up_factors() -> None:
    config = AdapterConfig(rank=3, alpha=6.0, share_gate_up_a=False)
    engine, update = make_engine(), adapter_update(0, config=config)
    engine.load_adapter(update)
    answers = ask(engine, PROMPTS[:6])
    assert_greedy(answer_logits(oracle(adapter=update), PROMPTS[:6], tokens_of(answers)), answers)


def test_two_versions_and_the_base_in_one_batch() -> None:
    """Prompts and decoding steps that mix versions give what each version gives alone."""
    engine = make_engine()
    updates = [adapter_update(v, scale=0.08) for v in (0, 1)]
    for update in updates:
        engine.load_adapter(update)
    versions = [(-1, 0, 1)[i % 3] for i in range(len(PROMPTS))]

    async def run() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(p, GREEDY, adapter_version=v) for p, v in zip(PROMPTS, versions, strict=True))
        )

    mixed = asyncio.run(run())
    assert [a.adapter_version for a in mixed] == versions
    for version in (-1, 0, 1):
        members = [i for i, v in enumerate(versions) if v == version]
        prompts, answers = [PROMPTS[i] for i in members], [mixed[i] for i in members]
        model = oracle(adapter=updates[version] if version >= 0 else None)
        assert_greedy(answer_logits(model, prompts, tokens_of(answers)), answers)
        assert tokens_of(ask(engine, prompts, adapter_version=version)) == tokens_of(answers)
    assert_idle(engine)


def test_mixed_rows_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above must be able to fail: one version for the whole batch doesn't pass it."""
    original = StepAdapters.of
    monkeypatch.setattr(
        StepAdapters, "of", lambda store, versions, *rest: original(store, [versions[0]] * len(versions), *rest)
    )
    with pytest.raises(AssertionError):
        test_two_versions_and_the_base_in_one_batch()


# --- swaps ----------------------------------------------------------------------------------------------------------
def test_requests_in_flight_finish_on_their_version() -> None:
    engine = make_engine()
    old, new = adapter_update(0, scale=0.08), adapter_update(1, scale=0.08)
    engine.load_adapter(old)
    long = dataclasses.replace(GREEDY, max_new_tokens=12)

    async def run() -> tuple[list[Completion], list[Completion]]:
        first = [asyncio.ensure_future(engine.generate(p, long)) for p in PROMPTS[:4]]
        while engine.stats()["generated_tokens"] < 8:
            await asyncio.sleep(0)
        engine.load_adapter(new)
        assert engine.adapter_version == 1
        second = await asyncio.gather(*(engine.generate(p, long) for p in PROMPTS[:4]))
        return await asyncio.gather(*first), list(second)

    first, second = asyncio.run(run())
    for update, answers in ((old, first), (new, second)):
        assert {a.adapter_version for a in answers} == {update.version}
        assert_greedy(answer_logits(oracle(adapter=update), PROMPTS[:4], tokens_of(answers)), answers)
    assert first[0].logprobs != pytest.approx(second[0].logprobs, abs=1e-3)


def test_more_slots_keep_more_versions_live() -> None:
    engine = make_engine(adapter_slots=3)
    for version in range(3):
        engine.load_adapter(adapter_update(version))
    answers = {v: ask(engine, PROMPTS[:1], adapter_version=v)[0] for v in range(3)}
    assert [a.adapter_version for a in answers.values()] == [0, 1, 2]
    assert len({a.logprobs for a in answers.values()}) == 3


def test_a_load_that_would_overwrite_a_version_in_use_is_refused_until_it_is_drained() -> None:
    engine = make_engine()
    engine.load_adapter(adapter_update(0))
    engine.load_adapter(adapter_update(1))

    async def run() -> None:
        pending = asyncio.ensure_future(engine.generate(PROMPTS[0], GREEDY, adapter_version=0))
        await asyncio.sleep(0)
        with pytest.raises(AdapterError, match="v2 has to wait"):
            engine.load_adapter(adapter_update(2))
        assert engine.adapter_version == 1
        assert (await pending).adapter_version == 0
        engine.load_adapter(adapter_update(2))

    asyncio.run(run())
    assert engine.adapter_version == 2
    with pytest.raises(EngineError, match="v0 is not live; live are the base"):
        ask(engine, PROMPTS[:1], adapter_version=0)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda: adapter_update(5), "expected to be v1"),
        (lambda: adapter_update(0), "expected to be v1"),
        (lambda: adapter_update(1, config=AdapterConfig(rank=16, alpha=1.0)), "set rollout.max_lora_rank: 16"),
        (lambda: dataclasses.replace(adapter_update(1), sha256="0" * 64), "sha256"),
        (
            lambda: make_update(1, ADAPTER, dict(list(adapter_update(1).tensors.items())[:-1])),
            "lacks 1 of",
        ),
    ],
    ids=["skipped", "repeated", "rank", "hash", "incomplete"],
)
def test_a_refused_update_changes_nothing(update, message: str) -> None:
    engine = make_engine()
    engine.load_adapter(adapter_update(0))
    before = engine.score(PROMPTS[:2])
    with pytest.raises(AdapterError, match=message):
        engine.load_adapter(update())
    assert engine.adapter_version == 0
    for now, then in zip(engine.score(PROMPTS[:2]), before, strict=True):
        assert torch.equal(now, then)


def test_another_shape_than_the_recipes_is_refused() -> None:
    engine = make_engine(adapter_config=ADAPTER)
    with pytest.raises(AdapterError, match=r"rank=2.*rank=4"):
        engine.load_adapter(adapter_update(0, config=AdapterConfig(rank=2, alpha=1.0)))
    engine.load_adapter(adapter_update(0))


def test_a_resumed_run_starts_at_its_version() -> None:
    engine = make_engine()
    assert engine.adapter_version == -1
    engine.load_adapter(adapter_update(7))
    assert ask(engine, PROMPTS[:1])[0].adapter_version == 7
