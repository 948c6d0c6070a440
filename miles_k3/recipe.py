"""Recipes: YAML files on disk -> one judged, frozen `Recipe`, with the place that each value came from.

Layers, later ones win: the file named by `base:` (and its own base), the recipe, then each `--set key=value`.
Mappings are merged key by key, everything else is replaced; `--set` replaces whatever the key held. Shared values are
written once and referred to as `${lora.rank}`.

Input paths (see INPUT_PATHS) are relative to the file that spells them, and on the command line to the current folder.
`run.folder` is always relative to the current folder.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from miles_k3.config import Recipe
from miles_k3.errors import ConfigError
from miles_k3.judge import judge
from miles_k3.yaml_text import Document, dump, escape_interpolation, map_texts, parse

RECIPES_FOLDER = Path(__file__).resolve().parent.parent / "recipes"
# Keys that name something to read, and what stands before the path.
INPUT_PATHS = {"model.path": "", "model.tokenizer": "", "lora.init_from": "", "task.name": "jsonl:",
               "task.params.eval_path": "", "rollout.sglang.draft": "",
               "rollout.speculative.draft": "", "rollout.speculative.costs": ""}  # fmt: skip
COMMAND_LINE = "--set"
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """A recipe and, for each of its dotted keys, where the value came from: `file:line`, `--set` or `default`."""

    recipe: Recipe
    sources: dict[str, str]
    name: str
    path: Path


@dataclass(slots=True)
class _Origin:
    """Where a key was spelled; `folder` is what its relative paths start from."""

    place: str
    folder: Path


@dataclass(slots=True)
class _Layers:
    """What has been merged so far, and everything wrong with it."""

    config: DictConfig = field(default_factory=lambda: OmegaConf.create({}))
    origins: dict[str, _Origin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    bad_keys: set[str] = field(default_factory=set)

    def complain(self, key: str, text: str, place: str = "") -> None:
        self.bad_keys.add(key)
        self.problems.append((f"{key}: " if key else "") + text + (f" ({place})" if place else ""))


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe file, a run folder's recipe, or a shipped recipe by its bare name. Raises ConfigError with every
    problem, one sentence each."""
    file = find_recipe(path_or_name)
    layers = _Layers()
    for path, document in _read_chain(file, layers):
        _add_file(layers, path, document)
    if Path(path_or_name).is_dir():  # a run may have been moved since its recipe was written
        run = Path(path_or_name).absolute()
        overrides = [f"run.folder={json.dumps(str(run.parent))}", f"run.name={json.dumps(run.name)}", *overrides]
    for override in overrides:
        _add_override(layers, override)
    values = _resolve(layers.config, layers)
    _anchor_paths(values, layers)
    recipe, found = judge(values, frozenset(layers.bad_keys))
    spelled = dict(flatten(OmegaConf.to_container(layers.config, resolve=False)))  # type: ignore[arg-type]
    bad = {problem.key for problem in found}
    for problem in found:
        if _reference(spelled.get(problem.key)) not in bad:  # else it is said where the value was spelled
            layers.complain(problem.key, problem.text, _origin_place(layers, problem.key))
    if recipe is None or layers.problems:
        raise ConfigError(layers.problems)
    sources = {key: _source(layers, key, spelled.get(key)) for key, _ in flatten(recipe.model_dump())}
    name = file.parent.name if file.name == "recipe.yaml" else file.stem
    return LoadedRecipe(recipe=recipe, sources=sources, name=name, path=file)


def find_recipe(path_or_name: str | Path) -> Path:
    """The file meant by a path, a run folder or the bare name of a shipped recipe."""
    text, path = str(path_or_name), Path(path_or_name)
    if path.is_dir() and (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    if isinstance(path_or_name, Path) or "/" in text or path.suffix in {".yaml", ".yml"}:
        if path.is_file():
            return path
        raise ConfigError(
            f"{text}: no such recipe; expected a YAML file, a run folder, or one of: {', '.join(shipped_recipes())}"
        )
    shipped = RECIPES_FOLDER / f"{text}.yaml"
    if shipped.is_file():
        return shipped
    known = shipped_recipes()
    close = difflib.get_close_matches(text, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are: {', '.join(known)}"
    raise ConfigError(f"{text}: no recipe of that name in {RECIPES_FOLDER}; {hint} (a file's name ends in .yaml)")


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the product."""
    return sorted(path.stem for path in RECIPES_FOLDER.glob("*.yaml"))


def dump_resolved(recipe: Recipe) -> str:
    """YAML text that `load_recipe` turns back into exactly this recipe."""
    return dump(map_texts(recipe.model_dump(), escape_interpolation))


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; an empty section is a value of its own."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _read_chain(file: Path, layers: _Layers) -> list[tuple[Path, Document]]:
    """The recipe and its bases, outermost base first."""
    chain: list[tuple[Path, Document]] = []
    while True:
        document = _read(file, layers)
        chain.insert(0, (file, document))
        parent = document.values.pop("base", None)
        if parent is None:
            return chain
        place = f"{_shown(file)}:{document.lines.get('base', 1)}"
        if not isinstance(parent, str):
            layers.complain("base", f"{parent!r} given, expected the name of a recipe file", place)
            return chain
        file = file.parent / parent
        if not file.is_file():
            layers.complain(
                "base", f"{_shown(file)} doesn't exist; a base is relative to the recipe that names it", place
            )
            return chain
        if any(file.samefile(seen) for seen, _ in chain):
            names = " -> ".join(_shown(p) for p in [*(seen for seen, _ in reversed(chain)), file])
            layers.complain("base", f"recipes name each other in a circle: {names}; remove one base", place)
            return chain


def _read(file: Path, layers: _Layers) -> Document:
    try:
        document = parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_shown(file)}: can't be read as UTF-8 text ({error})") from None
    for key, line, text in document.problems:
        layers.complain(key, text, f"{_shown(file)}:{line}")
    if document.values is None:
        if document.problems:  # nothing can be judged after a syntax error
            raise ConfigError(layers.problems)
        return Document({}, {}, [])
    if not isinstance(document.values, dict):
        raise ConfigError(f"{_shown(file)}: expected sections such as `model:` and `task:`, found {document.values!r}")
    return document


def _add_file(layers: _Layers, file: Path, document: Document) -> None:
    # A section with nothing below it (all of its lines commented out) changes nothing.
    values = {k: v for k, v in document.values.items() if not (v is None and k in Recipe.model_fields)}
    values = _checked_texts(layers, values, lambda key: f"{_shown(file)}:{document.lines.get(key, 1)}")
    try:
        layers.config = OmegaConf.merge(layers.config, values)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        layers.complain("", f"{_shown(file)}: can't be merged with its base: {_first_line(error)}")
    for key, line in document.lines.items():
        layers.origins[key] = _Origin(f"{_shown(file)}:{line}", file.parent)


def _add_override(layers: _Layers, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        layers.problems.append(f"--set {override}: expected section.key=value, for example --set rollout.group_size=4")
        return
    if key == "base":
        layers.problems.append("--set base: a base can only be named in a recipe file; name another recipe instead")
        return
    document = parse(text, key)
    for _, _, problem in document.problems:
        layers.complain(
            key, f"{problem}; text with special characters needs quotes of its own", f"{COMMAND_LINE} {override}"
        )
    if document.problems:
        return
    parts = key.split(".")
    for depth in range(1, len(parts)):
        above = ".".join(parts[:depth])
        held = OmegaConf.select(layers.config, above, throw_on_missing=False)
        if held is not None and not isinstance(held, DictConfig):
            layers.complain(key, f"{above} holds {held!r}, so nothing can be set below it", COMMAND_LINE)
            return
    checked = _checked_texts(layers, {key: document.values}, lambda _: COMMAND_LINE)
    if key not in checked:
        return
    OmegaConf.update(layers.config, key, checked[key], merge=False, force_add=True)
    for old in [k for k in layers.origins if k.startswith(f"{key}.")]:
        del layers.origins[old]
    for new in {key, *document.lines}:
        layers.origins[new] = _Origin(COMMAND_LINE, Path.cwd())


def _checked_texts(layers: _Layers, values: dict[str, Any], place_of: Any, prefix: str = "") -> dict[str, Any]:
    """`values` without the texts whose `${...}` OmegaConf can't parse; those are complained about."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, dict):
            kept[name] = _checked_texts(layers, value, place_of, f"{key}.")
            continue
        if "${" not in str(value):
            kept[name] = value
            continue
        try:
            OmegaConf.create({"x": value})
            kept[name] = value
        except OmegaConfBaseException:
            layers.complain(
                key, f"{value!r} holds a broken ${{...}}; write \\${{ for the characters themselves", place_of(key)
            )
    return kept


def _resolve(node: DictConfig, layers: _Layers, prefix: str = "") -> dict[str, Any]:
    """Plain values with every `${...}` replaced; what can't be replaced is complained about and left out."""
    values: dict[str, Any] = {}
    for name in node:
        key = f"{prefix}{name}"
        try:
            value = node[name]
            if isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except MissingMandatoryValue:
            continue  # judged as missing
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(node, resolve=False)[name]  # type: ignore[index,call-overload]
            layers.complain(key, f"{raw} can't be filled in: {_first_line(error)}", _origin_place(layers, key))
            continue
        values[str(name)] = _resolve(value, layers, f"{key}.") if isinstance(value, DictConfig) else value
    return values


def _anchor_paths(values: dict[str, Any], layers: _Layers) -> None:
    """Make input paths absolute, starting from the folder of the file that spells them."""
    for key, scheme in INPUT_PATHS.items():
        *sections, name = key.split(".")
        held: Any = values
        for section in sections:
            held = held.get(section) if isinstance(held, dict) else None
        text = held.get(name) if isinstance(held, dict) else None
        if not isinstance(text, str) or not text.startswith(scheme) or len(text) == len(scheme):
            continue
        origin = layers.origins.get(key)
        folder = origin.folder if origin else Path.cwd()
        path = (folder / Path(text.removeprefix(scheme)).expanduser()).absolute()
        held[name] = scheme + str(_without_dots(path))


def _without_dots(path: Path) -> Path:
    """`a/../b` -> `b` where that is the same file, i.e. always except behind a link."""
    short = Path(os.path.normpath(path))
    return short if not path.exists() or (short.exists() and short.samefile(path)) else path


def _origin_place(layers: _Layers, key: str) -> str:
    origin = layers.origins.get(key)
    return origin.place if origin else ""


def _reference(spelled: Any) -> str | None:
    """The key that a value is a mere reference to."""
    whole = re.fullmatch(r"\$\{([\w.]+)\}", spelled) if isinstance(spelled, str) else None
    return whole and whole[1]


def _source(layers: _Layers, key: str, spelled: Any) -> str:
    place = _origin_place(layers, key) or DEFAULT
    refers = isinstance(spelled, str) and "${" in spelled.replace("\\${", "")
    return f"{place} as {spelled}" if refers else place


def _shown(file: Path) -> str:
    """The file as its user would name it: below the current folder without the folder."""
    full, here = file.absolute(), Path.cwd()
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(full)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
