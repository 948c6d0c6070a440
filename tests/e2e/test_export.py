"""A run of two steps, exported through the command line in each form, and used again."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import train_here

from miles_k3 import cli
from miles_k3.adapters.peft_io import load_peft
from miles_k3.k3.config import K3Config
from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.safetensors_io import Checkpoint

TINY = Path(__file__).parents[2] / "assets" / "tiny-k3"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, and the adapter."""
    root = tmp_path_factory.mktemp("runs")
    train_here(root, "run.steps=2", "run.save_every=1", "trainer.lr=5.0e-3")
    return root / "tiny-cpu"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    def run_cli(*arguments: str | Path) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["miles-k3", *map(str, arguments)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run_cli


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_peft_is_what_the_run_itself_exports(run: Path, call: Callable[..., SimpleNamespace], tmp_path: Path) -> None:
    done = call("export", run, "--to", "peft", "--out", tmp_path / "adapter", "--verify")
    assert done.code == 0, done.err
    assert f"{run}/checkpoints/step-000002" in done.err
    assert files(tmp_path / "adapter") == files(run / "adapter")


def test_an_earlier_step_and_a_run_that_was_killed(
    run: Path, call: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    config = K3Config.from_folder(TINY)
    assert call("export", run, "--to", "peft", "--out", tmp_path / "1", "--step", "1").code == 0
    first, last = load_peft(tmp_path / "1", config)[1], load_peft(run / "adapter", config)[1]
    assert any(not torch.equal(first[n], last[n]) for n in first)
    copy = Path(shutil.copytree(run, tmp_path / "runs" / "tiny-cpu"))
    shutil.rmtree(copy / "adapter")
    with (copy / "checkpoints" / "step-000002" / "COMPLETE").open("a") as file:
        file.write("torn")
    assert call("export", copy, "--to", "peft", "--out", tmp_path / "newest-whole").code == 0
    assert files(tmp_path / "newest-whole") == files(tmp_path / "1")
    done = call("export", copy, "--to", "peft", "--out", tmp_path / "2", "--step", "2")
    assert (done.code, "is damaged" in done.err) == (2, True), done.err
    done = call("export", copy, "--to", "peft", "--out", tmp_path / "7", "--step", "7")
    assert (done.code, "no checkpoint of step 7; there are: 1, 2" in done.err) == (2, True), done.err


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    config = K3Config.from_folder(folder)
    with Checkpoint(folder) as checkpoint, torch.no_grad():
        weights = {p.name: checkpoint.read(p).clone() for p in checkpoint.table(config)}
        shape, tensors = load_peft(adapter, config) if adapter else (None, None)
        model = NaiveK3(config, weights, tensors, shape.scaling if shape else 1.0)
        return model(torch.arange(3, 43).view(2, 20))


@pytest.mark.slow
def test_merged_in_bf16_evaluates_like_base_and_adapter(
    run: Path, call: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    out = tmp_path / "merged"
    (tmp_path / "prompts.txt").write_text("2 + 2\n")
    done = call("export", run, "--to", "bf16", "--out", out, "--verify", "--prompts", tmp_path / "prompts.txt")
    assert done.code == 0, done.err
    assert "read back and compared" in done.out
    assert "quantization_config" not in (out / "config.json").read_text()
    pair, found, plain = logits(TINY, run / "adapter"), logits(out), logits(TINY)
    assert (found - pair).abs().median() < 0.15 * (plain - pair).abs().median()
    sets = ("--set", f"model.path={out}", "--set", "eval.prompts=4", "--set", "eval.temperature=0.0")
    merged = call("eval", "tiny-cpu", *sets)
    assert merged.code == 0, merged.err
    assert "accuracy: " in merged.out
    done = call("check", "tiny-cpu", *sets, "--set", "model.base_dtype=mxfp4")
    assert (done.code, "stored in BF16, so none can be kept packed" in done.out) == (1, True), done.out


@pytest.mark.slow
def test_merged_in_mxfp4_is_a_base_for_a_new_run(
    run: Path, call: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    out = tmp_path / "merged"
    assert call("export", run, "--to", "mxfp4", "--out", out, "--shard-gb", "0.0004").code == 0
    assert json.loads((out / "config.json").read_text()) == json.loads((TINY / "config.json").read_text())
    assert {p.name for p in TINY.iterdir()} - {"model.safetensors"} <= {p.name for p in out.iterdir()}
    assert len(list(out.glob("model-0*-of-*.safetensors"))) > 2
    train_here(tmp_path, "run.steps=1", f"model.path={out}", "rollout.prompts_per_step=2", "rollout.group_size=2")
    done = call("export", tmp_path / "tiny-cpu", "--to", "bf16", "--out", tmp_path / "next", "--verify")
    assert done.code == 0, done.err  # trained on the merged base, so it may be merged into it


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("NOWHERE", "--to", "bf16"), "no such folder; expected a run's folder or a PEFT folder"),
        ((TINY, "--to", "bf16"), "adapter_config.json does not exist; expected a PEFT folder"),
        (("RUN/adapter", "--to", "bf16", "--step", "1"), "is no run's folder; leave it out"),
        (("RUN", "--to", "bf16", "--model", "NOWHERE"), "config.json does not exist"),
        (("RUN", "--to", "bf16", "--prompts", "NOWHERE"), "--prompts NOWHERE can't be read"),
    ],
)
def test_bad_input(run: Path, call: Callable[..., SimpleNamespace], tmp_path: Path, arguments, said: str) -> None:
    arguments = [str(a).replace("RUN", str(run)) for a in arguments]
    done = call("export", *arguments, "--out", tmp_path / "out")
    errors = [line for line in done.err.splitlines() if line.startswith("error")]
    assert (done.code, len(errors)) == (2, 1), done.err
    assert said in errors[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["peft", "bf16"])
def test_a_file_where_a_folder_is_wanted(
    run: Path, call: Callable[..., SimpleNamespace], tmp_path: Path, form: str
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "x", tmp_path / "file" / "x" / "y"):
        done = call("export", run, "--to", form, "--out", out)
        assert done.code == 2
        assert "a part of the path is a file; choose another folder" in done.err.splitlines()[-1]


def test_an_unknown_form_is_told_those_there_are(call: Callable[..., SimpleNamespace], tmp_path: Path) -> None:
    done = call("export", tmp_path, "--to", "bf17", "--out", tmp_path / "x")
    assert done.code == 2
    assert "'bf17' given, expected peft, bf16, mxfp4" in done.err
