"""A PEFT folder becomes a run's folder that trains, or every reason why it can't is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from helpers.runs import SMALL
from helpers.tiny import tiny_adapter
from safetensors.torch import load_file, save_file

from miles_k3.adapters.peft_io import load_peft, save_peft
from miles_k3.adapters.update import make_update
from miles_k3.errors import AdapterError, CheckpointError, ConfigError
from miles_k3.importing import import_peft
from miles_k3.k3.config import K3Config
from miles_k3.recipe import load_recipe
from miles_k3.types import AdapterConfig

TINY = Path(__file__).parents[2] / "assets" / "tiny-k3"
FILE = "adapter_model.safetensors"


def make_adapter(folder: Path, base: str = str(TINY), **changes: object) -> Path:
    shape = AdapterConfig(**{"rank": 4, "alpha": 6.0, **changes})  # type: ignore[arg-type]
    save_peft(folder, make_update(0, shape, tiny_adapter(K3Config.from_folder(TINY), shape)), base)
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter")


def test_the_recipe_follows_the_adapter(adapter: Path, tmp_path: Path) -> None:
    made = import_peft(adapter, "tiny-cpu", tmp_path / "runs" / "next", ["lora.rank=32", "lora.alpha=16.0"])
    assert [str(change) for change in made.changes] == [
        "lora.rank: 32 in the recipe, 4 now",
        "lora.alpha: 16.0 in the recipe, 6.0 now",
    ]
    (note,) = made.notes
    assert "alpha / rank is 1.5 instead of 0.5" in note
    recipe = load_recipe(made.folder).recipe
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.share_gate_up_a) == (4, 6.0, True)
    assert (recipe.run.folder, recipe.run.name) == (str(tmp_path / "runs"), "next")
    assert recipe.lora.init_from == str(made.folder / "start")
    assert recipe.model == load_recipe("tiny-cpu").recipe.model
    config = K3Config.from_folder(TINY)
    for one, other in zip(load_peft(adapter, config)[1].values(), load_peft(made.folder / "start", config)[1].values(),
                          strict=True):  # fmt: skip
        assert torch.equal(one, other)


def test_what_doesn_t_fit_the_recipe_is_changed_and_said(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base="elsewhere/K3", rank=24, share_gate_up_a=False)
    made = import_peft(folder, "tiny-cpu", tmp_path / "next", ["lora.init_from=/x"])
    assert {change.key for change in made.changes} >= {"lora.rank", "lora.alpha", "lora.share_gate_up_a"}
    recipe = load_recipe(made.folder).recipe
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.share_gate_up_a) == (24, 6.0, False)
    assert recipe.rollout.max_lora_rank >= 24
    assert any("names the base elsewhere/K3" in note for note in made.notes)
    assert any("lora.init_from was /x" in note for note in made.notes)


def test_a_run_begins_with_it(adapter: Path, tmp_path: Path) -> None:
    """`train FOLDER` without a step exports what was imported."""
    from miles_k3.loop import run_training
    from miles_k3.run_folder import RunFolder

    made = import_peft(adapter, "tiny-cpu", tmp_path / "next", [*SMALL, "run.steps=0"])
    with RunFolder.create(load_recipe(made.folder).recipe) as run:
        run_training(load_recipe(made.folder).recipe, run)
    config = K3Config.from_folder(TINY)
    found, wanted = (load_peft(f, config)[1] for f in (made.folder / "adapter", adapter))
    assert all(torch.equal(found[n], wanted[n].to(found[n].dtype)) for n in wanted)


def retold(adapter: Path, **fields: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_every_mismatch_is_named_at_once(adapter: Path, tmp_path: Path) -> None:
    retold(adapter, use_rslora=True, bias="all")
    with pytest.raises(AdapterError) as error:
        import_peft(adapter, "tiny-cpu", tmp_path / "next")
    assert len(str(error.value).splitlines()) == 2
    retold(adapter, use_rslora=False, bias="none")
    tensors = load_file(adapter / FILE)
    gone = [n for n in tensors if "layers.3.self_attn.q_a_proj" in n]
    renamed = {n.replace("layers.0.mlp", "layers.0.mlpp"): t for n, t in tensors.items() if n not in gone}
    save_file(renamed, adapter / FILE)
    with pytest.raises(AdapterError) as error:
        import_peft(adapter, "tiny-cpu", tmp_path / "next")
    text = str(error.value)
    for part in ("lacks 8 of", "layers.3.self_attn.q_a_proj.lora_A", "has 6 keys that match nothing", "did you mean"):
        assert part in text
    assert not (tmp_path / "next").exists()
    assert not list(tmp_path.glob(".tmp-*"))


def test_bad_input(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder; expected a PEFT folder"):
        import_peft(tmp_path / "nowhere", "tiny-cpu", tmp_path / "next")
    with pytest.raises(ConfigError, match="adapter exists already"):
        import_peft(adapter, "tiny-cpu", adapter)
    with pytest.raises(ConfigError, match="no recipe of that name"):
        import_peft(adapter, "tiny-cqu", tmp_path / "next")
    with pytest.raises(CheckpointError, match="does not exist"):
        import_peft(adapter, "tiny-cpu", tmp_path / "next", ["model.path=/nowhere"])
    with pytest.raises(ConfigError, match=r"run\.name: .*expected one folder name"):
        import_peft(adapter, "tiny-cpu", tmp_path / "a name")
    (adapter / FILE).write_bytes((adapter / FILE).read_bytes()[:-100])
    with pytest.raises(AdapterError, match="is not a whole safetensors file"):
        import_peft(adapter, "tiny-cpu", tmp_path / "next")


def test_what_peft_trained_and_saved_is_imported(adapter: Path, tmp_path: Path) -> None:
    """peft's own config file has more fields; those that change nothing are no mismatch."""
    fields = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["o_proj"]).to_dict()
    given = json.loads((adapter / "adapter_config.json").read_text())
    theirs = Path(shutil.copytree(adapter, tmp_path / "theirs"))
    (theirs / "adapter_config.json").write_text(json.dumps({**fields, **given}, default=str))
    assert import_peft(theirs, "tiny-cpu", tmp_path / "next").config.rank == 4
