"""KDA's delta rule at K3's widths on one GPU: fla's kernels with and without their autotuning, and the torch form.

Prints a table and writes --out as JSON. Start it with an empty TRITON_CACHE_DIR to see a first call's real price.
Shape legend: T tokens, N heads, K = V channels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_k3.k3.kernels.fla_tuning import HOPPER, import_fla
from miles_k3.k3.ops.packed import Packed
from miles_k3.trainer.model import kda_fla
from miles_k3.trainer.model.kda_core import KdaMaps, delta_rule

HEADS, DIM = 96, 128


def draw(tokens: int) -> tuple[tuple[int, ...], list[Tensor]]:
    """Four sequences of unequal lengths, and random inputs that require gradients."""
    lengths = (tokens // 2 - 7, tokens // 4, tokens // 8 + 3)
    lengths = (*lengths, tokens - sum(lengths))
    shape = tokens, HEADS, DIM
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g = torch.rand(shape, device="cuda").mul_(-5.0)
    return lengths, [x.requires_grad_() for x in (q, k, v, g, torch.rand(shape[:2], device="cuda"))]


def fla_tuned(inputs: list[Tensor], packed: Packed, host: Tensor) -> Tensor:
    """fla as it comes: every kernel tunes itself."""
    out, _ = import_fla("ops.kda").chunk_kda(
        *(x.unsqueeze(0) for x in inputs), use_qk_l2norm_in_kernel=True, safe_gate=True, cu_seqlens=packed.cu_seqlens,
        cu_seqlens_cpu=host,
    )  # fmt: skip
    return out.squeeze(0).float()


def form_of(name: str, lengths: tuple[int, ...], inputs: list[Tensor]) -> Callable[[], Tensor]:
    packed = Packed.from_lengths(lengths, "cuda")
    if name == "torch":
        maps = KdaMaps.of(Packed.from_lengths(lengths), HEADS, 4).to("cuda")
        return partial(delta_rule, *inputs, maps)
    host = packed.cu_seqlens.cpu()
    if name == "fla":
        return partial(kda_fla.fla_delta_rule, *inputs, packed.cu_seqlens, host)
    return partial(fla_tuned, inputs, packed, host)


def seconds(action: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def forward_backward(form: Callable[[], Tensor], inputs: list[Tensor], repeats: int) -> dict[str, Any]:
    """Milliseconds of forward and of backward, median and range, and the memory above the inputs at its highest."""
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        marks[0].record()
        out = form()
        marks[1].record()
        grad = torch.randn_like(out)
        marks[2].record()
        torch.autograd.grad(out, inputs, grad)
        marks[3].record()
        del out, grad
        torch.cuda.synchronize()
        times["forward"].append(marks[0].elapsed_time(marks[1]))
        times["backward"].append(marks[2].elapsed_time(marks[3]))
    found: dict[str, Any] = {"peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}
    for name, values in times.items():
        found |= {f"{name}_ms": statistics.median(values), f"{name}_range_ms": [min(values), max(values)]}
    return found


def picks() -> list[dict[str, Any]]:
    """The configurations that each autotuner timed last, fastest first: (warps, stages, tile sizes, milliseconds)."""
    rows = []
    for kernel in HOPPER:
        timings = getattr(kernel.tuner, "configs_timings", None) or {}
        timed = sorted([t[0], c.num_warps, c.num_stages, str(c.kwargs)] for c, t in timings.items())
        rows.append({"kernel": kernel.name, "configs": len(kernel.tuner.configs), "timed": timed})
    return rows


def measure(name: str, tokens: list[int], repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {"form": name}
    for i, count in enumerate(tokens):
        lengths, inputs = draw(count)
        form = form_of(name, lengths, inputs)
        if i == 0:
            found["import_s"] = seconds(lambda: name == "torch" or import_fla("ops.kda"))
            outs: list[Tensor] = []
            found["first_forward_s"] = seconds(lambda form=form, outs=outs: outs.append(form()))
            grad = torch.randn_like(outs[0])
            found["first_backward_s"] = seconds(
                lambda outs=outs, inputs=inputs, grad=grad: torch.autograd.grad(outs[0], inputs, grad)
            )
            del outs, grad
            print(json.dumps(found), flush=True)
        else:
            found[f"first_of_{count}_s"] = seconds(lambda form=form, inputs=inputs: forward_backward(form, inputs, 1))
        found[str(count)] = forward_backward(form, inputs, repeats)
        print(name, count, json.dumps(found[str(count)]), flush=True)
        del inputs, form
        torch.cuda.empty_cache()
    if name != "torch":
        found["kernels"] = picks()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="+", choices=["fla", "fla_tuned", "torch"], default=["fla", "torch"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 9001, 32768])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    results = [measure(name, args.tokens, args.repeats) for name in args.forms]
    for found in results:
        for row in found.get("kernels", []):
            print(row["kernel"], row["configs"], row["timed"][:3])
    if args.out is not None:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
