"""A bench's rows beside the machine's measured ceilings: as a table and as JSON."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What this machine gives, measured: bytes read a second, and FLOPs a second of a large square product."""

    device: str
    bytes_s: float
    flops_s: float

    @classmethod
    def measure(cls, device: torch.device | str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Ceilings:
        """`dtype` is the product's. A CPU gets smaller ones, still far larger than its caches."""
        cuda = torch.device(device).type == "cuda"
        big = torch.randint(0, 1 << 30, (1 << (29 if cuda else 24),), device=device)
        width = 8192 if cuda else 512
        a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
        return cls(
            device=torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads",
            bytes_s=big.numel() * 8e3 / timed([big.max]),
            flops_s=2 * width**3 * 1e3 / timed([partial(torch.mm, a, b)] * 10),
        )

    def floor_ms(self, num_bytes: float, flops: float) -> float:
        return 1e3 * max(num_bytes / self.bytes_s, flops / self.flops_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line: milliseconds are medians of repeats."""

    kernel: str
    shape: str
    ms: float
    floor_ms: float
    peer: str = ""
    peer_ms: float | None = None


def timed(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Median milliseconds of one call; on a GPU the calls are recorded into a CUDA graph that is replayed."""
    for call in calls[:2]:
        call()
    if not torch.cuda.is_available():
        return statistics.median(wall_ms(lambda: [call() for call in calls], repeats)) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return device_ms(graph.replay, repeats) / len(calls)


def device_ms(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call on the GPU, between events."""
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def wall_ms(call: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each call, from an idle device to an idle device."""
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def wait() -> None:
    """Until the GPU, where there is one, is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def collected(found: Iterable[Row], told: Callable[[Row], None]) -> list[Row]:
    """All rows, each `told` as soon as it is measured."""
    rows = []
    for row in found:
        rows.append(row)
        told(row)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table; `of the floor` is the share of the floor's speed."""
    lines = ["| kernel | shape | µs | floor, µs | of the floor | beside it | µs |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        peer = "" if r.peer_ms is None else f"{1e3 * r.peer_ms:,.1f}"
        numbers = f"{1e3 * r.ms:,.1f} | {1e3 * r.floor_ms:,.1f} | {r.floor_ms / r.ms:.0%}"
        lines.append(f"| {r.kernel} | {r.shape} | {numbers} | {r.peer} | {peer} |")
    return "\n".join(lines)


def write(name: str, ceilings: Ceilings, rows: Sequence[Row], folder: Path) -> Path:
    """`<name>.json` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps({**asdict(ceilings), "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    return file
