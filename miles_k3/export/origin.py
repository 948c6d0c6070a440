"""What is exported: the adapter of a run or of a PEFT folder, and the base that it belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from miles_k3.adapters.content import AdapterSource, streamed_sha256
from miles_k3.adapters.layout import adapter_layout, gate_up_pairs
from miles_k3.adapters.peft_config import CONFIG_FILE, read_peft_config
from miles_k3.adapters.peft_read import PeftReader, not_finite
from miles_k3.checkpoints import find_damage, latest_checkpoint, list_checkpoints
from miles_k3.errors import AdapterError, CheckpointError, ConfigError
from miles_k3.k3.config import K3Config
from miles_k3.recipe import load_recipe
from miles_k3.saving import TRAINER
from miles_k3.trainer.boxes import Box
from miles_k3.trainer.checkpoint_files import Facts, Reader, read_index
from miles_k3.types import AdapterConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origin:
    """An adapter that was read once and found sound. `version`: its trainer steps, None where nothing says so.

    `own_base`: whether the adapter itself names `model` as what it was trained on.
    """

    adapter: AdapterSource
    sha256: str
    version: int | None
    place: Path
    model: Path
    config: K3Config
    own_base: bool


class CheckpointAdapter:
    """An AdapterSource of a trainer checkpoint, whatever layout wrote it; values as the run exports them."""

    def __init__(self, folder: Path, config: K3Config, dtype: torch.dtype) -> None:
        facts = Facts.read(folder)
        self.config = AdapterConfig(**facts.adapter)
        self.version = facts.version
        self.layout = adapter_layout(config, self.config)
        pairs = gate_up_pairs(self.layout) if self.config.share_gate_up_a else []
        self._stored = {up: gate for gate, up in pairs}  # one A, kept once
        shapes = {name: list(t.shape) for name, t in self.layout.items() if name not in self._stored}
        index = read_index(folder, adapter=facts.adapter, shapes=shapes)
        self.reader, self._dtype, self._folder = Reader(folder, index), dtype, folder

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, name: str, expert: int = 0) -> Tensor:
        t = self.layout[name]
        if t.kind == "dense":
            box = Box.whole(t.shape)
        else:
            box = Box((0 if t.shared else expert, 0, 0), (1, *t.shape[1:]))
        value = self.reader.read(self._stored.get(name, name), "master", box).to(self._dtype)
        return value if t.kind == "dense" else value[0]

    def verify(self) -> str:
        """Read everything once; the content's hash. Raises AdapterError on values that are not finite."""
        problems: list[str] = []
        sha256 = streamed_sha256(self, lambda t, expert, part: problems.extend(not_finite(t, expert, part)))
        if problems:
            raise AdapterError("\n".join(f"{self._folder} {problem}" for problem in problems))
        return sha256


@contextmanager
def open_origin(source: Path, *, model: Path | None = None, step: int | None = None) -> Iterator[Origin]:
    """The adapter of `source`, a run's folder or a PEFT folder. `model`: its base, where another one than it names.

    Of a run the newest whole checkpoint is taken, or that of `step`; before the first one its exported adapter. All of
    it is read and judged here. Raises ConfigError, CheckpointError or AdapterError.
    """
    if not source.is_dir():
        raise ConfigError(f"{source}: no such folder; expected a run's folder or a PEFT folder with {CONFIG_FILE}")
    if (source / "recipe.yaml").is_file():
        with _of_run(source, model, step) as origin:
            yield origin
        return
    if step is not None:
        raise ConfigError(f"--step {step} picks a checkpoint of a run, but {source} is no run's folder; leave it out")
    read_peft_config(source)  # says what is wrong with a folder that is neither
    base, named = _base_of_peft(source, model)
    with _of_peft(source, base, K3Config.from_folder(base), named) as origin:
        yield origin


@contextmanager
def _of_run(run: Path, model: Path | None, step: int | None) -> Iterator[Origin]:
    recipe = load_recipe(run).recipe
    base = model or Path(recipe.model.path)
    config = K3Config.from_folder(base)
    if recipe.model.mla_latent_norm_eps is not None:
        config = replace(config, mla_latent_norm_eps=recipe.model.mla_latent_norm_eps)
    own = _same(base, recipe.model.path)
    checkpoint = _checkpoint(run, step)
    if checkpoint is None:
        if not (run / "adapter").is_dir():
            raise CheckpointError(f"{run} has neither a checkpoint nor an exported adapter yet; let it make a step")
        with _of_peft(run / "adapter", base, config, own) as origin:
            yield origin
        return
    with trainer_adapter(checkpoint / TRAINER, config, getattr(torch, recipe.model.dtype)) as adapter:
        yield Origin(
            adapter=adapter, sha256=adapter.verify(), version=adapter.version, place=checkpoint, model=base,
            config=config, own_base=own,
        )  # fmt: skip


@contextmanager
def trainer_adapter(folder: Path, config: K3Config, dtype: torch.dtype) -> Iterator[CheckpointAdapter]:
    """The adapter of a trainer's checkpoint, whose files are open meanwhile."""
    adapter = CheckpointAdapter(folder, config, dtype)
    with adapter.reader:
        yield adapter


def _checkpoint(run: Path, step: int | None) -> Path | None:
    if step is None:
        newest = latest_checkpoint(run)
        return newest[1] if newest else None
    found = dict(list_checkpoints(run))
    if step not in found:
        steps = ", ".join(map(str, found)) or "none"
        raise CheckpointError(f"{run} has no checkpoint of step {step}; there are: {steps}")
    if damage := find_damage(found[step]):
        raise CheckpointError(f"{found[step]} is damaged: {damage}; choose another --step")
    return found[step]


@contextmanager
def _of_peft(folder: Path, base: Path, config: K3Config, own: bool) -> Iterator[Origin]:
    with PeftReader(folder, config) as adapter:
        yield Origin(
            adapter=adapter, sha256=adapter.verify(), version=None, place=folder, model=base, config=config,
            own_base=own,
        )  # fmt: skip


def _base_of_peft(folder: Path, model: Path | None) -> tuple[Path, bool]:
    """The base's folder, and whether the adapter names it."""
    named = json.loads((folder / CONFIG_FILE).read_text()).get("base_model_name_or_path")
    if model is not None:
        return model, bool(named) and _same(model, named)
    if not named or not Path(named).is_dir():
        raise ConfigError(f"{folder / CONFIG_FILE} names the base {named!r}, which is no folder here; add --model")
    return Path(named), True


def _same(one: str | Path, other: str | Path) -> bool:
    return Path(one).resolve() == Path(other).resolve()
