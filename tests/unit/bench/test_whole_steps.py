"""`miles-k3 bench decode|eager|prefill|swap|train` on a CPU: every row is measured, floors are what one can count."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from miles_k3.adapters.layout import adapter_layout
from miles_k3.bench import engine_steps, training
from miles_k3.bench.engine import CONFIG, Work, bench_engine, decode_step, decoding, end
from miles_k3.cli import app
from miles_k3.commands import bench
from miles_k3.errors import LaunchError
from miles_k3.k3.config import K3Config
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.params import text_params
from miles_k3.k3.random_weights import draw, random_base
from miles_k3.recipe import load_recipe

TINY = Path(__file__).parents[3] / "assets" / "tiny-k3"


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["decode", "--batch", "2", "--context", "5"], ["decode step"] * 4),
        (["variants", "--batch", "2", "--context", "5"], ["no branch", "dependent launches"]),
        (["eager", "--batch", "2", "--context", "5"], ["decode step of 2 layers"]),
        (["prefill", "--tokens", "16"], ["prefill"] * 2),
        (["swap"], ["swap, idle device", "swap, what decode loses"]),
    ],
    ids=lambda value: value[0],
)
def test_engine_rows(arguments: list[str], rows: list[str], tmp_path: Path) -> None:
    line = ["bench", *arguments, "--device", "cpu", "--model", str(TINY), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, line, catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads((tmp_path / f"{arguments[0]}.json").read_text())["rows"]
    assert [row["kernel"] for row in found] == rows
    assert all(row["floor_ms"] > 0 and math.isfinite(row["ms"]) for row in found)
    assert all(row["ms"] > 0 for row in found if row["kernel"] != "swap, what decode loses")


@pytest.mark.parametrize(("asked", "taken"), [([], "assets/k3-4layer"), (["--model", "mine"], "mine")])
def test_the_shipped_model_is_found_from_any_folder(
    asked: list[str], taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = []
    monkeypatch.setattr(engine_steps, "run", lambda name, model, *rest, **options: given.append(model) or (None, []))
    monkeypatch.setattr(bench, "_told", lambda *row: None)
    for name in ("decode", "prefill", "swap"):
        assert CliRunner().invoke(app, ["bench", name, *asked], catch_exceptions=False).exit_code == 0
    assert given == [Path(taken) if asked else TINY.parents[1] / taken] * 3
    assert asked or (given[0] / "config.json").is_file()


def test_a_device_of_another_name_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "decode", "--device", "gpu", "--model", str(TINY)])
    assert result.exit_code == 2, result.exception
    assert "gpu" in result.output


def test_requests_of_one_prompt_share_their_experts() -> None:
    config = K3Config.from_folder(TINY)
    made = bench_engine(random_base(config, dtype=torch.float32), max_running=4, context=8, new_tokens=64)
    chosen = {}
    for same in (False, True):
        requests = decoding(made, 4, 8, same=same)
        chosen[same] = decode_step(made, requests, repeats=2)[1]
        end(made, requests)
    made.close()
    assert chosen[True] == config.num_experts_per_token * len(config.moe_layers) < chosen[False]


@pytest.mark.slow
def test_train_rows(tmp_path: Path) -> None:
    line = ["bench", "train", "tiny-cpu", "--tokens", "64", "--repeats", "1", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, line, catch_exceptions=False).exit_code == 0
    scoring, step, export = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert scoring["shape"] == "64 tokens in 1 sequences, 1 micro-batches"
    assert step["floor_ms"] > 2 * scoring["floor_ms"]
    assert [row["kernel"] for row in (scoring, step, export)] == ["scoring", "training step", "adapter export"]


def test_a_whole_model_is_read_once() -> None:
    """With every expert touched a step reads the checkpoint's bytes, but for the embedding and what has two forms."""
    config = K3Config.from_folder(TINY)
    params = [p for p in text_params(config) if "embed_tokens" not in p.name]
    packed = sum(p.num_params * 17 / 32 for p in params if p.name.endswith("weight_packed"))
    stored = packed + sum(2 * p.num_params for p in params if not (p.name.endswith("weight_packed") or p.is_scale))
    work = Work.of(config, CONFIG)
    everything = config.num_experts * len(config.moe_layers)
    assert work.decode_bytes(everything, adapted=False) == stored
    adapter = sum(2 * math.prod(t.shape) for t in adapter_layout(config, CONFIG).values())
    assert work.decode_bytes(everything, adapted=True) == stored + adapter


def test_forward_flops_are_the_products_with_weights() -> None:
    config = K3Config.from_folder(TINY)
    model = NaiveK3(config, {p.name: draw(p, config, torch.device("cpu")) for p in text_params(config)})
    tokens = torch.arange(32).view(1, -1)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    frozen, _ = training.forward_flops(Work.of(config, CONFIG), config.num_experts, tokens.numel())  # it computes all
    # norms, gates and mixing queries are numbers too, of no matrix
    assert frozen == pytest.approx(counter.get_flop_counts()["Global"][torch.ops.aten.mm], rel=0.02)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(LaunchError, match="measures one rank; the recipe"):
        training.run(load_recipe("tiny-2proc", ["trainer.parallel.tp=2"]).recipe)
    if not torch.cuda.is_available():
        with pytest.raises(LaunchError, match="bench decode measures whole steps on a GPU and found no CUDA device"):
            engine_steps.run("decode", TINY, [1], 8)
