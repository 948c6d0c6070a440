"""Time and memory of merged exports at K3's own widths: two layers, some experts, random weights.

    python scripts/bench_export.py --out /tmp/bench-export [--experts 16] [--repeat 3]

Anonymous memory (heap) is sampled; pages of mapped files are the kernel's to drop. Writes and removes `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from miles_k3.adapters.layout import adapter_layout, gate_up_pairs
from miles_k3.adapters.peft_io import save_peft
from miles_k3.adapters.update import make_update
from miles_k3.export.merged import export_merged
from miles_k3.export.origin import open_origin
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import DType, Param, text_params
from miles_k3.k3.safetensors_io import TORCH_DTYPE, write_checkpoint
from miles_k3.types import AdapterConfig

ASSETS = Path(__file__).resolve().parents[1] / "assets"
TARGETS: tuple[Literal["bf16", "mxfp4"], ...] = ("bf16", "mxfp4")


def wide_config(experts: int) -> K3Config:
    """A dense KDA layer and a MoE MLA layer of the published widths, with a small vocabulary and no vision."""
    published = K3Config.from_folder(ASSETS / "kimi-k3")
    return dataclasses.replace(
        published, num_hidden_layers=2, mla_layers=(1,), num_experts=experts, num_experts_per_token=min(experts, 8),
        vocab_size=8192, bos_token_id=1, eos_token_id=2, pad_token_id=0, vision=None,
    )  # fmt: skip


def draw(p: Param, config: K3Config) -> Tensor:
    if p.is_scale:
        return torch.randint(118, 122, p.shape, dtype=torch.uint8)
    if p.dtype is DType.U8:
        return torch.randint(0, 256, p.shape, dtype=torch.uint8)
    tensor = torch.randn(p.shape, dtype=torch.bfloat16).mul_(0.02).to(TORCH_DTYPE[p.dtype])
    if p.name.endswith("A_log"):
        tensor[config.kda_num_heads :] = 0
    return tensor


def write_case(folder: Path, config: K3Config, rank: int) -> None:
    texts = {"config.json": json.dumps(config.to_json())}
    write_checkpoint(folder / "base", list(text_params(config)), lambda p: draw(p, config), extra_files=texts)
    shape = AdapterConfig(rank=rank, alpha=float(rank))
    layout = adapter_layout(config, shape)
    tensors = {n: torch.randn(t.shape, dtype=torch.bfloat16).mul_(0.003) for n, t in layout.items()}
    for gate, up in gate_up_pairs(layout):
        tensors[up] = tensors[gate].clone()
    save_peft(folder / "adapter", make_update(0, shape, tensors), str(folder / "base"))


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Growth of anonymous memory in bytes, sampled."""

    def anonymous() -> int:
        return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

    start, peak, stop = anonymous(), [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], anonymous() - start)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = wide_config(arguments.experts)
    arguments.out.mkdir(parents=True)
    try:
        write_case(arguments.out, config, arguments.rank)
        for target in TARGETS:
            runs = [export_once(arguments.out, target) for _ in range(arguments.repeat)]
            seconds, size, memory = ([run[i] for run in runs] for i in range(3))
            print(
                f"{target}: {size[0] / 1e9:.2f} GB, median {statistics.median(seconds):.1f} s ({min(seconds):.1f} to "
                f"{max(seconds):.1f}), {size[0] / statistics.median(seconds) / 1e6:.0f} MB/s, peak anonymous memory "
                f"{max(memory) / 1e6:.0f} MB"
            )
    finally:
        shutil.rmtree(arguments.out)


def export_once(folder: Path, target: Literal["bf16", "mxfp4"]) -> tuple[float, int, int]:
    """(seconds, bytes, peak memory) of one export, which is removed again."""
    out = folder / target
    with peak_memory() as peak:
        start = time.perf_counter()
        with open_origin(folder / "adapter") as origin:
            export_merged(origin, out, target, shard_bytes=10**9, told=lambda line: None)
        seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in out.iterdir())
    shutil.rmtree(out)
    return seconds, size, peak[0]


if __name__ == "__main__":
    main()
