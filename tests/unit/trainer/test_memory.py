"""Memory that is given back and taken again, and memory that must not grow."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.batches import micro_batch, mini_batch, random_tokens, train_batch
from helpers.trainers import ADAPTER, CONFIG, adapter_tensors, tiny_trainer
from torch import Tensor

from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.trainer.memory import Sleeper, base_tensors, gradient_buffers, optimizer_tensors
from miles_k3.types import TrainBatch


def batch(seed: int = 0) -> TrainBatch:
    return train_batch(mini_batch(micro_batch(random_tokens((9, 17, 5), seed=seed), seed=seed)))


@pytest.fixture
def _older_objects_set_aside() -> None:
    """What other tests left is not looked through after every step."""
    gc.collect()
    gc.freeze()


def live_bytes() -> int:
    """Bytes of the tensors that Python can reach, each storage once."""
    gc.collect()
    held = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.layout is torch.strided:  # other tests may have left sparse ones
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def test_a_sleeper_empties_and_refills_what_others_refer_to() -> None:
    whole, blank = torch.arange(12.0), torch.ones(5)
    view = whole[3:7]
    sleeper = Sleeper([whole, view, torch.empty(0)], [blank, whole])
    assert sleeper.num_bytes == 12 * 4 + 5 * 4
    assert whole.untyped_storage().nbytes() == blank.untyped_storage().nbytes() == 0
    sleeper.wake()
    assert torch.equal(view, torch.arange(3.0, 7.0))
    assert torch.equal(blank, torch.zeros(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_that_slept_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    awake, sleeper = (tiny_trainer(calm=True, dtype=dtype) for _ in range(2))
    for step in range(3):
        sleeper.sleep(base=True)
        sleeper.sleep()  # once more does nothing
        given = [*base_tensors(sleeper.base), *gradient_buffers(sleeper._chunks)]
        assert all(t.untyped_storage().nbytes() == 0 for t in given)
        exported = sleeper.export_adapter()
        sleeper.wake()
        sleeper.wake()
        assert exported.sha256 == awake.export_adapter().sha256
        a, b = (trainer.step(batch(step)) for trainer in (awake, sleeper))
        assert a == b


def test_sleep_gives_back_all_that_adam_keeps() -> None:
    trainer = tiny_trainer(dtype=torch.bfloat16)
    trainer.step(batch())
    state = optimizer_tensors(trainer._chunks, trainer._optimizer.megatron)
    numbers = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert sum(t.numel() * t.element_size() for t in state) == 12 * numbers  # master and two moments
    trainer.sleep()
    assert all(t.untyped_storage().nbytes() == 0 for t in state)
    trainer.wake()


def trained_and_synced(
    trainer: MegatronTrainer, engine: EmbeddedEngine, steps: int, leak: list[Tensor] | None = None
) -> list[int]:
    """Live bytes after each sync."""
    found = []
    for step in range(steps):
        trainer.step(batch(step))
        update = trainer.export_adapter()
        engine.load_adapter(update)
        if leak is not None:
            leak.extend(update.tensors.values())
        del update
        found.append(live_bytes())
    return found


@pytest.mark.usefixtures("_older_objects_set_aside")
def test_memory_is_at_its_baseline_after_every_sync() -> None:
    trainer = tiny_trainer(calm=True)
    trainer.load_adapter(adapter_tensors())
    engine = EmbeddedEngine(
        trainer.base, CONFIG, tokenizer=None, adapter_config=ADAPTER, max_lora_rank=8, max_running=2, page_size=4,
        num_pages=0, prefill_chunk_tokens=16, max_sequence_tokens=32,
    )  # fmt: skip
    found = trained_and_synced(trainer, engine, 20)
    assert len(set(found[2:])) == 1, found  # Adam's moments and the engine's second slot are made in the first two
    leaked: list[Tensor] = []
    assert len(set(trained_and_synced(trainer, engine, 3, leaked))) == 3
    engine.close()
