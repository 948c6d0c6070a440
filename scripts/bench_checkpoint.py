"""How long a checkpoint keeps the training step waiting: written at once, and by the thread.

The tiny model with an adapter of a large rank, so that masters and moments are what a rank of a large model holds. Runs
as one process, or under torchrun with data-parallel ranks. The last checkpoint is loaded and compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from miles_k3.config import AlgorithmSection, TrainerSection
from miles_k3.k3.config import K3Config
from miles_k3.k3.weights import load_base
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.types import AdapterConfig, Ledger, MicroBatch, MiniBatch, TrainBatch
from miles_k3.world import World, join_world

MODEL = Path(__file__).parents[1] / "assets/tiny-k3"


def harvest(tokens: int, ranks: int, vocab: int) -> TrainBatch:
    """One micro-batch of a single sequence for each rank."""
    generator = torch.Generator().manual_seed(0)
    micros = tuple(
        MicroBatch(
            tokens=torch.randint(0, vocab, (tokens,), generator=generator),
            cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
            targets=torch.randint(0, vocab, (tokens,), generator=generator),
            loss_mask=torch.ones(tokens).index_fill(0, torch.tensor([tokens - 1]), 0.0),
            advantages=torch.full((tokens,), float(1 + i)), rollout_logprobs=torch.full((tokens,), -3.0),
            sequence_ids=torch.tensor([i]),
        )
        for i in range(ranks)
    )  # fmt: skip
    mini = MiniBatch(micro_batches=micros, num_loss_tokens=(tokens - 1) * ranks, num_sequences=ranks)
    return TrainBatch(mini_batches=(mini,), temperature=1.0, ledger=Ledger(generated=0, trained=0, dropped={}))


def build(args: argparse.Namespace, device: str, background: bool) -> MegatronTrainer:
    config, dtype = K3Config.from_folder(MODEL), getattr(torch, args.dtype)
    return MegatronTrainer(
        load_base(MODEL, config, dtype=dtype, device=device), config, adapter=AdapterConfig(rank=args.rank, alpha=32.0),
        section=TrainerSection(lr=1e-4, async_checkpoint=background), algorithm=AlgorithmSection(), total_steps=100,
        seed=0,
    )  # fmt: skip


def measure(args: argparse.Namespace, world: World, device: str, background: bool) -> dict[str, list[float]]:
    """Seconds of each save until the trainer goes on, until the file is on disk, and of the steps after it."""
    trainer = build(args, device, background)
    batch = harvest(args.tokens, world.size, trainer.config.vocab_size)
    trainer.step(batch)
    alone = timed(lambda: trainer.step(batch))
    found: dict[str, list[float]] = {"blocked": [], "on disk": [], "step alone": [alone], "step beside it": []}
    for number in range(args.repeats + 1):
        folder = args.folder / str(number)
        if world.first:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        world.wait()
        begin = time.perf_counter()
        writing = trainer.save(folder)
        blocked, beside = time.perf_counter() - begin, []
        adapter = trainer.export_adapter().sha256 if number == args.repeats else ""
        while writing is not None and world.any(not writing.done()):
            beside.append(timed(lambda: trainer.step(batch)))
        if writing is not None:
            writing.wait()
        if number:  # the first allocates
            found["blocked"].append(blocked)
            found["on disk"].append(time.perf_counter() - begin)
            found["step beside it"] += beside
        if number == args.repeats:
            trainer.load(folder)
            assert trainer.export_adapter().sha256 == adapter
    return found


def timed(work: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are written, and stay")
    args = parser.parse_args()
    world = join_world()
    device = "cpu" if args.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    for background in (False, True):
        found = measure(args, world, device, background)
        if world.first:
            files = sorted((args.folder / "1").glob("*.safetensors"))
            print(json.dumps({
                "async": background, "ranks": world.size, "bytes_a_rank": [file.stat().st_size for file in files],
                **{name: [round(v, 4) for v in values] for name, values in found.items()},
                **{f"median {n}": round(statistics.median(v), 4) for n, v in found.items() if v},
            }))  # fmt: skip


if __name__ == "__main__":
    main()
