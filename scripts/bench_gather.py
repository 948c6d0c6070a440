"""How an export reaches two ranks: in buckets, whole or as each one's shard, beside gathering it whole and cloning it.

    python scripts/bench_gather.py [--model assets/k3-4layer] [--rank 4] [--repeats 5]

Two processes on the CPU, gloo over loopback. Of the routed experts each rank owns half; everything else lies on both.
All ways end with the hash of what each rank holds. Prints a markdown table: seconds, and what a rank's resident memory
grew by at most, beside the bytes that it gets.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from miles_k3.adapters.layout import AdapterTensor, adapter_layout
from miles_k3.adapters.update import make_update, update_bytes
from miles_k3.k3.config import K3Config
from miles_k3.trainer.adapter_export import export
from miles_k3.trainer.adapter_shards import Piece
from miles_k3.trainer.distributed import Axis
from miles_k3.trainer.lora_rules import Split
from miles_k3.types import AdapterConfig, AdapterUpdate
from miles_k3.world import World

MIB, RANKS = 1 << 20, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[1] / "assets" / "k3-4layer")
    parser.add_argument("--rank", type=int, default=4, help="of the adapter")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    context = get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, store.port, options, answers)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for line in answers.get():
        print(line)
    for process in processes:
        process.join()


def _rank(rank: int, port: int, options: argparse.Namespace, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    world, config = World(rank=rank, size=RANKS), AdapterConfig(rank=options.rank, alpha=8.0)
    model = K3Config.from_folder(options.model)
    layout = adapter_layout(model, config)
    pieces = {name: _piece(tensor, rank) for name, tensor in layout.items()}
    half = model.num_experts // RANKS
    ways: dict[str, Callable[[], AdapterUpdate]] = {
        "gathered whole, cloned": lambda: make_update(0, config, _gathered(pieces, layout)),
        "in buckets, whole": lambda: export(pieces, layout, world, version=0, config=config, experts=None),
        "in buckets, each rank's shard": partial(
            export, pieces, layout, world, version=0, config=config, experts=range(rank * half, (rank + 1) * half)
        ),
    }  # fmt: skip
    rows = {name: _measured(way, options.repeats) for name, way in ways.items()}
    if rank == 0:
        heads = "way", "seconds, median (fastest, slowest)", "a rank gets, MiB", "and needs beside it, MiB"
        lines = [*(f"{name} | {row}" for name, row in rows.items())]
        answers.put([f"| {line} |" for line in (" | ".join(heads), "---|---|---|---", *lines)])
    dist.barrier()
    dist.destroy_process_group()


def _piece(tensor: AdapterTensor, rank: int) -> Piece:
    if not tensor.per_expert:
        values = torch.ones(tensor.shape, dtype=torch.bfloat16)
        return Piece(values, Split(None, Axis()), owned=rank == 0)
    values = torch.ones((tensor.shape[0] // RANKS, *tensor.shape[1:]), dtype=torch.bfloat16)
    return Piece(values, Split(0, Axis(rank, RANKS)), owned=True)


def _gathered(pieces: Mapping[str, Piece], layout: Mapping[str, AdapterTensor]) -> dict[str, Tensor]:
    """Each owner's parts as one broadcast, into whole tensors on every rank."""
    everyone: list[dict[str, Any]] = [{}] * RANKS
    owned = {name: (p.start, tuple(p.tensor.shape)) for name, p in pieces.items() if p.owned}
    dist.all_gather_object(everyone, owned)
    whole = {name: torch.empty(tensor.shape, dtype=torch.bfloat16) for name, tensor in layout.items()}
    for source, parts in enumerate(everyone):
        sizes = [torch.Size(shape).numel() for _, shape in parts.values()]
        flat = torch.empty(sum(sizes), dtype=torch.bfloat16)
        if source == dist.get_rank():
            torch.cat([pieces[name].tensor.reshape(-1) for name in parts], out=flat)
        dist.broadcast(flat, src=source)
        for (name, (start, shape)), values in zip(parts.items(), flat.split(sizes), strict=True):
            whole[name][start : start + shape[0]].copy_(values.view(shape))
    return whole


def _measured(way: Callable[[], AdapterUpdate], repeats: int) -> str:
    way()
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        way()
        seconds.append(time.perf_counter() - start)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    held = update_bytes(way())
    beside = _status("VmHWM") - before - held
    times = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}, {max(seconds):.2f})"
    return f"{times} | {held / MIB:.0f} | {beside / MIB:.0f}"


def _status(field: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
