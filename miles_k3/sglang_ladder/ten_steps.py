"""Ten RL steps of a small recipe: Megatron trainer and SGLang on one GPU."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from miles_k3.config import Recipe
from miles_k3.protocols import Engine
from miles_k3.sglang_ladder.lessons import SUMS, taught_model
from miles_k3.sglang_ladder.models import RL_SHAPE, ROOT, checkpoint, with_released_dtypes
from miles_k3.sglang_ladder.report import Report
from miles_k3.types import AdapterUpdate

STEPS, MISMATCH, KEPT_BYTES = 10, 2e-2, 32 << 20
_METRICS = ("train/mismatch_abs", "train/importance_weight", "rollout/reward", "time/step_s", "sync/load_s")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Watched:
    """An engine that notes how much memory the trainer's process has allocated after each hand-over; `told` hears of
    each."""

    def __init__(self, engine: Engine, told: Callable[[], None]) -> None:
        self._engine, self._told = engine, told
        self.allocated: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load_adapter(self, update: AdapterUpdate) -> None:
        before = torch.cuda.memory_allocated()
        self._engine.load_adapter(update)
        torch.cuda.synchronize()
        self.allocated.append(torch.cuda.memory_allocated() - before)
        self._told()


def small_model(work: Path) -> Path:
    """A K3 that SGLang's kernels take, with the tiny model's tokenizer."""
    folder = with_released_dtypes(checkpoint(work / "rl-drawn", RL_SHAPE), work / "rl")
    for name in _TOKENIZER:
        shutil.copy(ROOT / "assets" / "tiny-k3" / name, folder / name)
    return folder


def small_recipe(work: Path, folder: Path) -> Recipe:
    from miles_k3.recipe import load_recipe

    rows = work / "sums.jsonl"
    rows.write_text("".join(json.dumps({"prompt": question, "answer": answer}) + "\n" for question, answer in SUMS))
    changes = {
        "run.folder": work / "runs", "run.name": "rl", "run.steps": STEPS, "run.save_every": 0, "eval.prompts": 0,
        "model.path": folder, "model.dtype": "bfloat16", "model.device": "cuda", "lora.rank": 16, "lora.alpha": 32.0,
        "task.name": f"jsonl:{rows}", "task.params": "{}", "task.scorer": "exact", "rollout.engine": "sglang",
        "rollout.prompts_per_step": 8, "rollout.group_size": 4, "rollout.max_running": 32, "rollout.num_pages": 2048,
        "rollout.sleep_while_training": True, "rollout.sglang.memory_fraction": 0.3, "trainer.lr": 1e-3,
        "algorithm.drop_equal_groups": False, "algorithm.routing_replay": True,
    }  # fmt: skip
    return load_recipe("tiny-cpu", [f"{key}={value}" for key, value in changes.items()]).recipe


def ten_steps(work: Path, report: Report) -> None:
    from miles_k3.assemble import make_engine
    from miles_k3.loop import run_training
    from miles_k3.run_folder import RunFolder

    start = time.monotonic()
    taught, loss = taught_model(small_model(work), work / "rl-taught", torch.device("cuda"))
    torch.cuda.empty_cache()
    report.note(taught_s=round(time.monotonic() - start, 1), taught_loss=round(loss, 3))
    recipe = small_recipe(work, taught)
    shutil.rmtree(work / "runs" / "rl", ignore_errors=True)
    watched: list[Watched] = []

    with RunFolder.create(recipe) as run:

        def so_far() -> dict[str, list[float]]:
            text = run.metrics_path.read_text() if run.metrics_path.exists() else ""
            lines = [json.loads(line) for line in text.splitlines()]
            return {key: [line[key] for line in lines if key in line] for key in _METRICS}

        def engine(recipe: Recipe, model: Any) -> Any:
            watched.append(Watched(
                make_engine(recipe, model),
                lambda: report.note(kept_after_sync_bytes=watched[0].allocated, **so_far()),
            ))  # fmt: skip
            return watched[0]

        run_training(recipe, run, new_engine=engine)
        found = so_far()
    report.note(kept_after_sync_bytes=watched[0].allocated, **found)
    mismatch = found["train/mismatch_abs"]
    report.check("steps that were trained", len(mismatch), limit=STEPS, at_least=True)
    report.check("trainer against engine, largest mean |dlogprob|", max(mismatch, default=float("nan")), limit=MISMATCH)
    report.check("bytes that a hand-over leaves allocated", max(watched[0].allocated[1:]), limit=KEPT_BYTES)
