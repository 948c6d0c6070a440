"""What context parallelism adds to a KDA layer: bytes and time of the way into the stream's order and back, of the
convolution's halo and of the state's hand-over, as a share of the layer.

Start one process a GPU with torchrun. Widths are K3's; 24 of its 96 heads are a rank's share at tensor parallelism 4.
Shape legend: T tokens of the stream, N heads, K = V channels of a head, H hidden.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_trainer_layers import ALPHA, RANK, random_base, timed, trained, true_widths
from torch import Tensor

from miles_k3.config import ParallelSection, TrainerSection
from miles_k3.k3.config import K3Config
from miles_k3.k3.ops.packed import Packed
from miles_k3.k3.params import Part, layer_params
from miles_k3.trainer import distributed
from miles_k3.trainer.build import transformer_config
from miles_k3.trainer.distributed import Ranks
from miles_k3.trainer.lora import Factory
from miles_k3.trainer.model.collectives import all_gather_states
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.kda import KdaAttention
from miles_k3.trainer.model.kda_fla import fla_context, fla_delta_rule
from miles_k3.trainer.model.stream import Stream
from miles_k3.types import AdapterConfig
from miles_k3.world import join_world, leave_world

LINK_GB_S = 450.0  # NVLink 4 of an H200, one direction, by its data sheet


def build(k3: K3Config, section: TrainerSection, device: torch.device) -> tuple[Ranks, KdaAttention]:
    ranks = distributed.initialize(k3, section, device=device, seed=0)
    base = random_base(k3, (p for p in layer_params(k3, 0) if p.part is Part.KDA))
    frozen = FrozenWeights(base, k3, transformer_config(k3, section, torch.bfloat16), ranks)
    factory = Factory(k3, AdapterConfig(rank=RANK, alpha=ALPHA), seed=0, dtype=torch.bfloat16, device=device,
                      ranks=ranks)  # fmt: skip
    return ranks, KdaAttention(frozen, factory, 0)


def delta_inputs(tokens: int, heads: int, dim: int) -> list[Tensor]:
    q, k, v = (torch.randn(tokens, heads, dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    g = torch.rand(tokens, heads, dim, device="cuda").mul_(-5.0).requires_grad_()
    return [q, k, v, g, torch.rand(tokens, heads, device="cuda").requires_grad_()]


def delta_times(k3: K3Config, stream: Stream, ranks: Ranks, repeats: int) -> dict[str, Any]:
    """fla's delta rule over the ranks, and over this rank's slice as if it were a stream of its own."""
    layout, device = stream.layout, torch.device("cuda", torch.cuda.current_device())
    q, *others = delta_inputs(layout.num_local, k3.kda_num_heads, k3.kda_head_dim)
    found = {}
    for name, lengths in (("alone", tuple(layout.slice_lengths(ranks.cp.rank))), ("handed over", layout.lengths)):
        host = Packed.from_lengths(lengths).cu_seqlens
        cu = host.to(device)
        cp = None if name == "alone" else fla_context(cu, host, ranks.cp.group, k3.short_conv_kernel_size)
        k, v, g, beta = others

        def run(q: Tensor, k=k, v=v, g=g, beta=beta, cu=cu, host=host, cp=cp) -> Tensor:
            return fla_delta_rule(q, k, v, g, beta, cu, host, cp)

        dist.barrier()
        found[name] = timed(run, q, others, repeats)  # pyright: ignore[reportArgumentType]
    return found


def measure(k3: K3Config, ranks: Ranks, layer: KdaAttention, tokens: int, repeats: int) -> dict[str, Any]:
    lengths = (5 * tokens // 8, tokens // 4, tokens // 8)  # the first goes on from one slice to the next
    stream = Stream.of(torch.zeros(tokens, dtype=torch.int64), lengths, k3, "cuda", ranks=ranks, kernel="fla")
    kda, local = stream.kda, stream.layout.num_local
    assert kda.into is not None
    assert kda.back is not None
    x = torch.randn(local, k3.hidden_size, device="cuda", dtype=torch.bfloat16)
    state = torch.randn(k3.kda_num_heads, k3.kda_head_dim, 2 * k3.kda_head_dim, device="cuda")
    found: dict[str, Any] = {}
    runs = {
        "into": (kda.into, []),
        "back": (kda.back, []),
        "layer": (partial(layer, stream=stream), trained(layer)),
    }
    for name, (run, params) in runs.items():
        dist.barrier()
        found[name] = timed(run, x.detach().clone(), params, repeats)
        if ranks.cp.rank == 0:
            print(tokens, name, round(found[name]["ms"], 3), flush=True)
    found |= delta_times(k3, stream, ranks, repeats)
    found["state gather"] = {"ms": gather_ms(state, ranks, repeats)}
    rows = {name: relayout.num_sent for name, relayout in (("into", kda.into), ("back", kda.back))}
    row_bytes = k3.hidden_size * x.element_size()
    found["sent_bytes"] = {name: 2 * n * row_bytes for name, n in rows.items()}  # forward and backward
    found["sent_bytes"] |= {"halo": 2 * kda.maps.halo * row_bytes, "state": 2 * state.numel() * state.element_size()}
    moved = sum(found["sent_bytes"][name] for name in ("into", "back", "state"))
    ms = found["into"]["ms"] + found["back"]["ms"] + found["handed over"]["ms"] - found["alone"]["ms"]
    found |= {"added_ms": ms, "share": ms / found["layer"]["ms"], "link_floor_ms": moved / LINK_GB_S / 1e6}
    return found


def gather_ms(state: Tensor, ranks: Ranks, repeats: int) -> float:
    """One all-gather of the states, as one direction needs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    all_gather_states(state, ranks.cp)
    dist.barrier()
    start.record()
    for _ in range(repeats):
        all_gather_states(state, ranks.cp)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "assets/kimi-k3/config.json")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1 << 15, 1 << 17, 1 << 19])
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    world = join_world()
    torch.manual_seed(world.rank)
    k3 = replace(true_widths(args.config, 16), kda_num_heads=args.heads)
    ranks, layer = build(k3, TrainerSection(parallel=ParallelSection(cp=world.size)), device)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "ranks": world.size, "heads": args.heads}
    for tokens in args.tokens:
        found = measure(k3, ranks, layer, tokens, args.repeats)
        result[str(tokens)] = found
        torch.cuda.empty_cache()
        if world.first:
            timed_parts = {n: v for n, v in found.items() if isinstance(v, dict) and "ms" in v}
            line = {n: round(v["ms"], 3) for n, v in timed_parts.items()}
            print(tokens, line, {n: round(found[n], 4) for n in ("added_ms", "share", "link_floor_ms")}, flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1))
    leave_world()


if __name__ == "__main__":
    main()
