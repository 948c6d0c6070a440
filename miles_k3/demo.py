"""`miles-k3 demo`: the product's main job on a laptop, with its proof at the end."""

from __future__ import annotations

import time
from pathlib import Path

from miles_k3.errors import LaunchError
from miles_k3.recipe import load_recipe
from miles_k3.run_folder import RunFolder
from miles_k3.world import world_of


def run_demo(seed: int) -> None:
    """Train `recipes/tiny-cpu.yaml` with one seed in a fresh folder below runs/ and print what it reached."""
    if world_of().size > 1:
        raise LaunchError("the demo runs as one process; start it without torchrun: miles-k3 demo")
    started = time.perf_counter()
    name = _fresh_name(Path("runs"), f"demo-seed{seed}")
    recipe = load_recipe("tiny-cpu", [f"run.seed={seed}", f"run.name={name}", "run.folder=runs"]).recipe
    with RunFolder.create(recipe) as run:
        print(f"run folder: {run.path}", flush=True)
        from miles_k3.loop import run_training

        result = run_training(recipe, run)
    if result.stopped_by is not None:
        raise SystemExit(128 + result.stopped_by)  # the loop has said how to go on
    assert result.before is not None
    assert result.after is not None
    for picture in result.plots:
        print(f"picture: {picture}")
    print(f"peak memory: {result.peak_memory_bytes / 1e9:.2f} GB")
    print(
        f"DEMO accuracy {result.before.accuracy:.3f} -> {result.after.accuracy:.3f} (n={result.after.num_prompts}) "
        f"in {time.perf_counter() - started:.0f} s, adapter at {result.adapter}"
    )


def _fresh_name(folder: Path, wanted: str) -> str:
    """`wanted`, or `wanted-2` and so on where that folder exists."""
    taken = {p.name for p in folder.glob(f"{wanted}*")}
    names = (wanted, *(f"{wanted}-{i}" for i in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)
