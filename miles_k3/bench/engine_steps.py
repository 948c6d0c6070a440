"""`miles-k3 bench decode|eager|prefill|swap|variants`: which bench, of which model, on which device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from miles_k3.bench import EngineBench
from miles_k3.bench.engine import bench_decode, bench_eager, bench_prefill, bench_swap, two_layers
from miles_k3.bench.measures import Ceilings, Row, collected
from miles_k3.bench.variants import bench_variants
from miles_k3.errors import LaunchError
from miles_k3.k3.config import K3Config
from miles_k3.k3.random_weights import random_base


def run(
    name: EngineBench, model: Path, batches: Sequence[int], context: int,
    told: Callable[[Row], None] = lambda _: None, *, device: str = "cuda",
) -> tuple[Ceilings, list[Row]]:  # fmt: skip
    """A bench of the config in a folder, `told` row by row; `eager` takes one layer of each kind of it.

    Raises LaunchError where the device isn't there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise LaunchError(
            f"miles-k3 bench {name} measures whole steps on a GPU and found no CUDA device; for a look at the table "
            "take a CPU and a small model: --device cpu --model assets/tiny-k3"
        )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ceilings, config = Ceilings.measure(device, dtype), K3Config.from_folder(model)
    if name == "eager":
        config = two_layers(config)
    base = random_base(config, dtype=dtype, device=device, base_dtype="mxfp4")
    benches = {
        "decode": partial(bench_decode, batches=batches, context=context),
        "eager": partial(bench_eager, batches=batches, context=context),
        "prefill": partial(bench_prefill, tokens=context),
        "swap": partial(bench_swap, batch=batches[0]),
        "variants": partial(bench_variants, batches=batches, context=context),
    }
    return ceilings, collected(benches[name](base, ceilings), told)
