"""`miles-k3 draft train` from end to end: what it writes, going on after a kill, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from miles_k3 import drafting
from miles_k3.assemble import load_engine
from miles_k3.cli import app
from miles_k3.errors import CheckpointError, ConfigError, DataError
from miles_k3.k3.config import K3Config
from miles_k3.k3.draft_params import draft_params
from miles_k3.recipe import load_recipe
from miles_k3.rollout.speculative.draft import DraftModel
from miles_k3.rollout.speculative.draft_eval import measure_acceptance
from miles_k3.rollout.speculative.draft_io import read_draft
from miles_k3.rollout.speculative.draft_train import DraftTrainer
from miles_k3.rollout.tasks.registry import make_task
from miles_k3.world import ALONE

ASSETS = Path(__file__).parents[2] / "assets"
SPEAKERS = ("miles_k3.assemble", "miles_k3.drafting")


def train(out: Path, *more: str) -> Any:
    options = ["--steps", "6", "--prompts", "8", "--group-size", "2", "--eval-prompts", "4", "--save-every", "2"]
    return CliRunner().invoke(
        app, ["draft", "train", "tiny-cpu", "--out", str(out), *options, *more], catch_exceptions=False
    )


def test_a_killed_training_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    said = train(whole)
    assert said.exit_code == 0
    assert "greedy, past the end" in said.stdout
    spoken = [record.getMessage() for record in caplog.records if record.name in SPEAKERS]
    assert [line.split()[0] for line in spoken] == ["loading", "sampling", "computing", "measuring"]
    step = DraftTrainer.step

    def dies(self: DraftTrainer, examples: Any) -> dict[str, float]:
        if self.num_steps == 5:
            raise KeyboardInterrupt
        return step(self, examples)

    monkeypatch.setattr(DraftTrainer, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        drafting_run(killed)
    monkeypatch.undo()
    assert not (killed / "draft").exists()
    assert train(killed, "--resume").exit_code == 0
    for name in ("samples.jsonl", "metrics.jsonl", "acceptance.json", "draft/model.safetensors", "draft/config.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    config, _ = read_draft(whole / "draft", K3Config.from_folder(ASSETS / "tiny-k3"), torch.float32)
    assert load_file(whole / "draft" / "model.safetensors").keys() == {p.name for p in draft_params(config)}
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 6]
    refused_resumes(whole)


def drafting_run(out: Path) -> None:
    """As the command line does it, but for its handling of interrupts."""
    from miles_k3.commands.draft import train as command

    command("tiny-cpu", out, steps=6, prompts=8, group_size=2, eval_prompts=4, save_every=2)


def refused_resumes(out: Path) -> None:
    with pytest.raises(ConfigError, match="is there already; go on with it by --resume"):
        train(out)
    with pytest.raises(ConfigError, match=r"other settings \(training\.lr: 0\.002 there, 0\.1 now\)"):
        train(out, "--resume", "--lr", "0.1")
    with pytest.raises(ConfigError, match=r"other settings \(task\.params\.max_digits: 2 there, 1 now\)"):
        train(out, "--resume", "--set", "task.params.max_digits=1")
    settings = (out / "settings.json").read_text()
    (out / "settings.json").write_text(settings[:90])
    with pytest.raises(ConfigError, match="is damaged: nobody knows"):
        train(out, "--resume")
    (out / "settings.json").write_text(settings)
    with pytest.raises(ConfigError, match="no training of a draft to go on with"):
        train(out.with_name("nothing"), "--resume")


def test_a_start_that_is_no_draft_leaves_the_folder_free(tmp_path: Path) -> None:
    for start in ("nowhere", "void"):
        with pytest.raises(CheckpointError, match=f"{start}.*config.json does not exist"):
            train(tmp_path / "out", "--from", str(tmp_path / start))


@pytest.mark.parametrize("line", ['{"prompt": [1, 2', "[]", '{"prompt": [1]}', '{"prompt": [1], "answer": ["x"]}'])
def test_damaged_samples_are_told_by_their_line(line: str, tmp_path: Path) -> None:
    (path := tmp_path / "samples.jsonl").write_text('{"prompt": [1, 2], "answer": [3]}\n' + line + "\n")
    with pytest.raises(DataError, match=r"samples\.jsonl:2 is damaged; remove the file"):
        drafting._rows(path)


@pytest.mark.parametrize("name", ["tiny-k3", "kimi-k3", "k3-4layer"])
def test_a_new_draft_fits_its_target(name: str) -> None:
    target = K3Config.from_folder(ASSETS / name)
    config = drafting.new_draft_config(target)
    config.refuse_target(target, name)
    assert config.num_target_layers == target.num_hidden_layers
    if name == "kimi-k3":
        assert sum(p.num_params for p in draft_params(config)) == 2_249_289_601


@pytest.mark.slow
def test_the_shipped_draft_is_accepted_as_the_documentation_says() -> None:
    recipe = load_recipe("tiny-cpu").recipe
    engine = load_engine(recipe, ALONE)
    config, weights = read_draft(ASSETS / "tiny-k3-draft", engine.config, torch.float32)
    target = engine.runner.model.weights
    model = DraftModel(config, weights, target.embed, target.head)
    prompts = make_task(recipe.task, engine.tokenizer, seed=0).eval_prompts(64)
    ended, longer = (
        measure_acceptance(model, engine, [p.token_ids for p in prompts], max_new_tokens=12, stop_token_ids=stop,
                           sampled=False)
        for stop in ((engine.config.eos_token_id,), ())
    )  # fmt: skip
    assert ended.mean_accepted > 0.75 * ended.room
    assert longer.mean_accepted > 3.0
    engine.close()
