"""`miles-k3 bench train`: the trainer's forward, step and adapter export at a recipe's widths, beside the floor.

Weights are random and so are the tokens; lengths and layout are the recipe's. The floor counts products with weights:
2 FLOPs a number and token forward, as many again for the gradient of the input, and 6 a number of the adapter. What
`trainer.recompute` computes twice is not in it: it costs time to save memory. One process, one rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch

from miles_k3.adapters.update import update_bytes
from miles_k3.assemble import DTYPES, Model, adapter_config, longest_sequence, make_trainer, model_config
from miles_k3.bench.engine import Work
from miles_k3.bench.measures import Ceilings, Row, collected, wall_ms
from miles_k3.config import Recipe
from miles_k3.errors import LaunchError
from miles_k3.k3.random_weights import random_base
from miles_k3.launch import pick_device, refuse_launch
from miles_k3.parallel import token_multiple
from miles_k3.plan.phases import full_micro_batch
from miles_k3.types import Ledger, MicroBatch, MiniBatch, TrainBatch
from miles_k3.world import ALONE


def random_batch(lengths: Sequence[int], micro_batches: int, vocab: int, seed: int = 0) -> TrainBatch:
    """One optimizer step over equal micro-batches of random tokens, all of them trained on."""
    micros = [_micro_batch(lengths, vocab, seed + n, first_id=n * len(lengths)) for n in range(micro_batches)]
    trained = sum(int(micro.loss_mask.sum()) for micro in micros)
    mini = MiniBatch(
        micro_batches=tuple(micros), num_loss_tokens=trained, num_sequences=micro_batches * len(lengths)
    )  # fmt: skip
    return TrainBatch(mini_batches=(mini,), temperature=1.0, ledger=Ledger(generated=0, trained=0))


def _micro_batch(lengths: Sequence[int], vocab: int, seed: int, first_id: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.randint(0, vocab, (int(ends[-1]),), generator=generator)
    targets, mask = tokens.roll(-1), torch.ones(len(tokens))
    targets[ends[1:] - 1] = 0
    mask[ends[1:] - 1] = 0.0
    advantages = torch.randn(len(lengths), generator=generator).repeat_interleave(torch.tensor(lengths))
    return MicroBatch(
        tokens=tokens, cu_seqlens=ends.int(), targets=targets, loss_mask=mask, advantages=advantages * mask,
        rollout_logprobs=torch.rand(len(tokens), generator=generator).mul(-8.0) * mask,
        sequence_ids=first_id + torch.arange(len(lengths)),
    )  # fmt: skip


def forward_flops(work: Work, top_k: int, tokens: int) -> tuple[float, float]:
    """(of the frozen weights, of the adapter) in one forward over so many tokens."""
    frozen = work.dense + work.num_moe * top_k * work.per_expert
    adapter = work.lora_dense + work.num_moe * top_k * work.lora_expert
    return 2.0 * tokens * frozen, 2.0 * tokens * adapter


def bench_train(
    recipe: Recipe, model: Model, ceilings: Ceilings, lengths: Sequence[int], micro_batches: int, repeats: int
) -> Iterator[Row]:
    """Scoring without gradients, one optimizer step over micro-batches of sequences of `lengths`, and the adapter as
    the engine gets it."""
    assert model.base is not None, "a trainer computes with the base"
    config, trainer = model.config, make_trainer(recipe, model)
    batch, tokens = random_batch(lengths, micro_batches, config.vocab_size), micro_batches * sum(lengths)
    frozen, adapter = forward_flops(Work.of(config, adapter_config(recipe)), config.num_experts_per_token, tokens)
    sequences = [
        micro.tokens[a:b].tolist()
        for micro in batch.mini_batches[0].micro_batches
        for a, b in pairwise(micro.cu_seqlens.tolist())
    ]
    cuda = model.base.device.type == "cuda"
    shape = f"{tokens} tokens in {len(sequences)} sequences, {micro_batches} micro-batches"

    def row(kernel: str, call: Callable[[], object], floor_ms: float, shape: str) -> Row:
        call()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        ms = statistics.median(wall_ms(call, repeats))
        held = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most" if cuda else ""
        return Row(kernel=kernel, shape=shape + held, ms=ms, floor_ms=floor_ms)

    yield row("scoring", partial(trainer.score, sequences), ceilings.floor_ms(0, frozen + adapter), shape)
    step = f"{shape}, recompute {recipe.trainer.recompute}"
    yield row("training step", partial(trainer.step, batch), ceilings.floor_ms(0, 2 * frozen + 3 * adapter), step)
    num_bytes = update_bytes(trainer.export_adapter())
    floor = ceilings.floor_ms(2 * num_bytes, 0)
    yield row("adapter export", trainer.export_adapter, floor, f"{num_bytes / 1e9:.3f} GB, rank {recipe.lora.rank}")


def run(recipe: Recipe, tokens: int | None = None, repeats: int = 5, told: Callable[[Row], None] = lambda _: None
        ) -> tuple[Ceilings, list[Row]]:  # fmt: skip
    """Rows of one rank, `told` as they come; `tokens` of a step, in whole micro-batches where they fill one.

    Raises LaunchError for a recipe that needs several ranks, or a device that isn't there.
    """
    config = model_config(recipe)
    parallel = recipe.trainer.parallel
    if (ranks := parallel.tp * parallel.pp * parallel.cp * parallel.ep) > 1:
        raise LaunchError(
            f"miles-k3 bench train measures one rank; the recipe's trainer.parallel takes more (tp {parallel.tp}, pp "
            f"{parallel.pp}, cp {parallel.cp}, ep {parallel.ep}: {ranks}); set them to 1, or take another recipe"
        )
    refuse_launch(recipe, config, ALONE, training=True)
    device, dtype = pick_device(recipe.model.device, 0), DTYPES[recipe.model.dtype]
    limit = recipe.trainer.micro_batch_tokens
    tokens = tokens or limit
    longest, unit = min(longest_sequence(recipe, config), tokens), token_multiple(parallel)
    micro_batches = max(1, tokens // limit)
    lengths = full_micro_batch(longest, min(tokens, limit), unit)
    base = random_base(config, dtype=dtype, device=device, base_dtype=recipe.model.base_dtype, seed=recipe.run.seed)
    ceilings = Ceilings.measure(device, dtype)
    model = Model(config=config, base=base, tokenizer=None)
    return ceilings, collected(bench_train(recipe, model, ceilings, lengths, micro_batches, repeats), told)
