"""A PEFT folder as the start of a run: judged against the model, copied, and a recipe that fits it."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_k3.adapters.peft_config import CONFIG_FILE
from miles_k3.adapters.peft_io import save_peft
from miles_k3.adapters.peft_read import PeftReader, read_whole
from miles_k3.adapters.update import make_update
from miles_k3.config import Recipe
from miles_k3.errors import ConfigError
from miles_k3.files import sync_folder, write_text
from miles_k3.judge import judge
from miles_k3.k3.config import K3Config
from miles_k3.recipe import dump_resolved, load_recipe
from miles_k3.types import AdapterConfig

START = "start"  # the adapter's copy within the run's folder
_PLACE = ("lora.init_from", "run.folder", "run.name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key that the recipe had otherwise; the adapter decides it."""

    key: str
    recipe: Any
    adapter: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.recipe} in the recipe, {self.adapter} now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """`folder` is ready for `miles-k3 train`. `notes`: what may be meant otherwise, in sentences."""

    folder: Path
    config: AdapterConfig
    sha256: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]


def import_peft(source: Path, recipe: str, out: Path, overrides: Sequence[str] = ()) -> Imported:
    """Make `out` a run's folder that begins with the adapter of `source` and is otherwise as `recipe` says.

    Rank, alpha and shared factors are the adapter's. Raises AdapterError with every way in which the adapter doesn't
    fit the recipe's model, and ConfigError when `out` exists or the recipe can't be changed to fit.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; name a new folder, or remove it")
    if not source.is_dir():
        raise ConfigError(f"{source}: no such folder; expected a PEFT folder with {CONFIG_FILE}")
    given = load_recipe(recipe, overrides).recipe
    model = K3Config.from_folder(given.model.path)
    with PeftReader(source, model) as adapter:
        sha256 = adapter.verify()
        update = make_update(0, adapter.config, read_whole(adapter))
    changes = tuple(_changes(given, update.config, out))
    fitted = _changed(given, changes)
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".tmp-{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir()
        save_peft(temporary / START, update, given.model.path)
        write_text(temporary / "recipe.yaml", dump_resolved(fitted))
        temporary.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already when it got its name
    return Imported(
        folder=out, config=update.config, sha256=sha256, changes=tuple(c for c in changes if c.key not in _PLACE),
        notes=tuple(_notes(source, given, fitted)),
    )  # fmt: skip


def _changes(recipe: Recipe, adapter: AdapterConfig, out: Path) -> Iterator[Change]:
    lora = recipe.lora
    wanted = {
        "lora.rank": (lora.rank, adapter.rank),
        "lora.alpha": (lora.alpha, adapter.alpha),
        # Factors that are equal may be trained as one or as two; different ones can't be one.
        "lora.share_gate_up_a": (lora.share_gate_up_a, lora.share_gate_up_a and adapter.share_gate_up_a),
        "rollout.max_lora_rank": (recipe.rollout.max_lora_rank, max(recipe.rollout.max_lora_rank, adapter.rank)),
        "lora.init_from": (lora.init_from, START),  # beside the recipe
        "run.folder": (recipe.run.folder, str(out.absolute().parent)),
        "run.name": (recipe.run.name, out.name),
    }
    for key, (old, new) in wanted.items():
        if old != new:
            yield Change(key=key, recipe=old, adapter=new)


def _changed(recipe: Recipe, changes: Sequence[Change]) -> Recipe:
    values = recipe.model_dump()
    for change in changes:
        section, name = change.key.split(".")
        values[section][name] = change.adapter
    fitted, problems = judge(values)
    if fitted is None:
        raise ConfigError([f"{p.key}: {p.text}" if p.key else p.text for p in problems])
    return fitted


def _notes(source: Path, given: Recipe, fitted: Recipe) -> Iterator[str]:
    named = json.loads((source / CONFIG_FILE).read_text()).get("base_model_name_or_path")
    if named and Path(named).resolve() != Path(given.model.path).resolve():
        yield f"the adapter names the base {named}, the recipe trains {given.model.path}: only shapes are known to fit"
    if given.lora.init_from is not None:
        yield f"lora.init_from was {given.lora.init_from}; it is the imported adapter now"
    scales = [section.alpha / section.rank for section in (given.lora, fitted.lora)]
    if scales[0] != scales[1]:
        yield (
            f"alpha / rank is {scales[1]:g} instead of {scales[0]:g}, which scales every update: look at trainer.lr "
            f"{fitted.trainer.lr:g} again"
        )
