"""Planned and allocated bytes of one rank of several; a pool of ranks imports it by this module's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

from helpers.allocations import allocations
from helpers.planned import fullest_batch

from miles_k3.assemble import DTYPES, Model, make_trainer
from miles_k3.k3.weights import load_base
from miles_k3.plan import phases
from miles_k3.plan.planner import read_config
from miles_k3.recipe import load_recipe
from miles_k3.trainer import adapter_exchange
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.trainer.memory import optimizer_tensors

BUCKET = 96 << 10  # far below the tiny adapter, as 64 MiB are below a real one: full buckets are what is planned
Compared = dict[str, tuple[int, int]]  # item -> (planned, allocated)


def compared(rank: int, size: int, overrides: Sequence[str], micro_batches: int) -> Compared:
    """Of a trainer over the tiny model's resident base, in its second step."""
    recipe = load_recipe("tiny-cpu", list(overrides)).recipe
    config = read_config(recipe)
    base = load_base(recipe.model.path, config, dtype=DTYPES[recipe.model.dtype])
    with allocations() as started:
        trainer = make_trainer(recipe, Model(config=config, base=base, tokenizer=None))
    assert isinstance(trainer, MegatronTrainer)
    batch = fullest_batch(recipe, config, micro_batches=micro_batches)
    trainer.step(batch)
    with allocations() as second:
        trainer.step(batch)
    with patch.object(adapter_exchange, "BUCKET_BYTES", BUCKET), patch.object(phases, "EXPORT_BUCKET_BYTES", BUCKET):
        export = least_peak(trainer.export_adapter)
        facts = phases.rank_facts(recipe, config, size, trainer.ranks.pp.rank, cuda=False, fla=False)
    cut = facts.base - base.num_bytes()
    return {
        "factors and gradients": (facts.adapter + facts.gradients + cut, started.kept),
        "moments": (facts.optimizer, _held_by_the_optimizer(trainer)),
        "activations": (facts.activations, second.peak),
        "export": (facts.export, export),
    }


def least_peak(action: Callable[[], object], times: int = 3) -> int:
    """Of several runs: a buffer that gloo's thread frees late adds to a peak, and nothing takes away from one."""
    peaks = []
    for _ in range(times):
        with allocations() as found:
            action()
        peaks.append(found.peak)
    return min(peaks)


def _held_by_the_optimizer(trainer: MegatronTrainer) -> int:
    held = optimizer_tensors(trainer._chunks, trainer._optimizer.megatron)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
