"""Device memory of trainer and engine over many steps, and what sleeping gives back."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from helpers.batches import micro_batch, mini_batch, random_tokens, train_batch
from helpers.engines import ask, random_prompts
from helpers.fused_engines import make as make_fused
from helpers.tiny import tiny_base
from helpers.trainers import CONFIG, weights

from miles_k3.config import AlgorithmSection, TrainerSection
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.fused.graphs.recording import Recorder
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.types import AdapterConfig, SamplingParams, TrainBatch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def batch(seed: int) -> TrainBatch:
    return train_batch(mini_batch(micro_batch(random_tokens((9, 64, 33), seed=seed), seed=seed)))


def make(rank: int, **section: Any) -> MegatronTrainer:
    base = tiny_base(CONFIG, weights(True), torch.bfloat16, "bf16", "cuda")
    return MegatronTrainer(
        base, CONFIG, adapter=AdapterConfig(rank=rank, alpha=2.0 * rank), total_steps=100, seed=0,
        section=TrainerSection(lr=1e-3, kda_kernel="torch", **section), algorithm=AlgorithmSection(),
    )  # fmt: skip


def allocated() -> int:
    gc.collect()  # what an earlier test's objects held in cycles doesn't count
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("section", [{}, {"recompute": "full"}], ids=["kept", "recomputed"])
def test_memory_returns_to_its_baseline_after_every_sync(section: dict[str, Any]) -> None:
    trainer = make(8, **section)
    engine = EmbeddedEngine(
        trainer.base, CONFIG, tokenizer=None, max_lora_rank=8, max_running=4, max_sequence_tokens=64, page_size=4
    )
    found = []
    for step in range(20):
        trainer.step(batch(step))
        engine.load_adapter(trainer.export_adapter())
        found.append(allocated())
    assert len(set(found[2:])) == 1, found  # Adam's moments and the engine's second slot are made in the first two
    engine.close()


def test_sleep_gives_the_memory_back_and_takes_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(256)
    trainer.step(batch(0))
    numbers = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    before, started = allocated(), time.perf_counter()
    trainer.sleep()
    slept, asleep = time.perf_counter(), allocated()
    trainer.wake()
    woke, after = time.perf_counter(), allocated()
    assert before - asleep >= 16 * numbers  # fp32 gradient, master and two moments
    assert after == before
    with capsys.disabled():
        print(
            f"\nsleep {(before - asleep) / 2**20:.0f} MiB of {numbers / 1e6:.1f} M trained numbers: "
            f"{slept - started:.3f} s, wake {woke - slept:.3f} s; awake {before / 2**20:.0f} MiB, asleep "
            f"{asleep / 2**20:.0f} MiB"
        )
    with_base = allocated()
    trainer.sleep(base=True)
    assert with_base - allocated() >= 16 * numbers + trainer.base.num_bytes()
    trainer.wake()
    trainer.step(batch(1))


def test_recorded_steps_share_their_memory() -> None:
    """Each needs 256 MiB while it runs and leaves a number: ten of them hold what one does."""
    recorder = Recorder()

    def step() -> tuple[torch.Tensor]:
        return (torch.ones(64 << 20, device="cuda").sum(),)

    held, expected = [], float(64 << 20)
    recorded = []
    for _ in range(10):
        recorded.append(recorder.record(step))
        held.append(torch.cuda.memory_reserved())
    assert held[-1] - held[0] < 64 << 20, held
    for one in recorded:
        one.replay()
        assert one.left[0].item() == expected


@pytest.mark.timeout(300)  # Triton compiles some hundred kernels
def test_an_engine_that_records_again_after_each_sleep_holds_no_more() -> None:
    """cuBLAS keeps 32 MiB for each stream that it ever ran on."""
    engine = make_fused("fused", device="cuda", max_running=24)
    prompts, held, graphs = random_prompts(24, low=4, high=12, seed=3), [], []
    for _ in range(4):
        ask(engine, prompts, SamplingParams(max_new_tokens=4))
        assert engine.runner.graphs is not None
        graphs.append(engine.runner.graphs.num_recorded)
        engine.sleep()
        held.append(allocated())
        engine.wake()
    assert graphs == sorted(set(graphs)), "each time anew"
    assert held[-1] - held[0] < 1 << 20, held
