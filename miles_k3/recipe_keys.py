"""The keys of a recipe as documentation: defaults, notes of base.yaml, who changes them, and the editors' schema."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic.fields import FieldInfo

from miles_k3.config import ModelSection, Recipe, Section, TaskSection
from miles_k3.errors import ConfigError
from miles_k3.judge import recipe_fields, suggestions
from miles_k3.recipe import RECIPES_FOLDER, find_recipe, flatten, shipped_recipes
from miles_k3.yaml_text import parse

MISSING = "none"


def defaults() -> dict[str, str]:
    """Dotted key -> its default as JSON; keys without one are left out."""
    bare = Recipe(model=ModelSection(path="?"), task=TaskSection(name="?"))
    found = {key: json.dumps(value, ensure_ascii=False) for key, value in flatten(bare.model_dump())}
    return {key: value for key, value in found.items() if key not in ("model.path", "task.name")}


def explain_key(key: str) -> list[str]:
    """Lines about a key or a section. Raises ConfigError with what was probably meant."""
    fields = recipe_fields()
    if key not in fields:
        guesses = suggestions(key)
        hint = f"did you mean {' or '.join(guesses)}?" if guesses else "`miles-k3 recipe show base` lists all keys"
        if key.startswith("task.params."):
            hint = "task.params are arguments of the task: see docs/data_and_rewards.md"
        raise ConfigError(f"{key}: no such key of a recipe; {hint}")
    info = fields[key]
    if _section(info) is not None:
        return [f"{key}: {_summary(info)}", *_section_lines(key, fields)]
    usual = defaults().get(key, MISSING)
    lines = [f"{key}: {info.description}", f"  type: {_type_name(info.annotation)}", f"  default: {usual}"]
    if allowed := _allowed(info):
        lines.append(f"  allowed: {allowed}")
    if note := _notes().get(key):
        lines.append(f"  note: {note}")
    return [*lines, *_changed_in(key)]


def _section_lines(key: str, fields: dict[str, FieldInfo]) -> Iterator[str]:
    own = {name: info for name, info in fields.items() if name.rpartition(".")[0] == key}
    width = max(len(name) for name in own)
    for name, info in own.items():
        yield f"  {name:<{width}}  {_summary(info) if _section(info) else info.description}"


def _section(info: FieldInfo) -> type[Section] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _summary(info: FieldInfo) -> str:
    """First line of a section's docstring."""
    return str(getattr(_section(info), "__doc__", "")).splitlines()[0]


def _type_name(kind: Any) -> str:
    """A type as a recipe's author would say it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _type_name(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in inner)
    if origin is Literal:
        return "text"
    if origin is tuple:
        return f"list of {_type_name(inner[0])}"
    if origin is dict:
        return "mapping"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(kind, str(kind))


def _allowed(info: FieldInfo) -> str:
    """Choices and bounds, those inside `Annotated` included."""
    found = list(_choices(info.annotation))
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "pattern": "matches"}
    metadata = [*info.metadata, *_inner_metadata(info.annotation)]
    for name, sign in signs.items():
        bounds = [getattr(m, name) for m in metadata if getattr(m, name, None) is not None]
        found += [f"{sign} {bound}" for bound in bounds]
    return ", ".join(found)


def _choices(kind: Any) -> Iterator[str]:
    if typing.get_origin(kind) is Literal:
        yield from map(str, typing.get_args(kind))
        return
    for part in typing.get_args(kind):
        yield from _choices(part)


def _inner_metadata(kind: Any) -> Iterator[Any]:
    if typing.get_origin(kind) is typing.Annotated:
        for extra in typing.get_args(kind)[1:]:
            yield from extra.metadata if isinstance(extra, FieldInfo) else [extra]
    for part in typing.get_args(kind):
        yield from _inner_metadata(part)


def _notes() -> dict[str, str]:
    """Key -> the comment behind it in base.yaml."""
    text = (RECIPES_FOLDER / "base.yaml").read_text(encoding="utf-8")
    rows = text.splitlines()
    notes = {}
    for key, line in parse(text).lines.items():
        _, hash_sign, note = rows[line - 1].partition(" # ")
        if hash_sign:
            notes[key] = note.strip()
    return notes


def _changed_in(key: str) -> Iterator[str]:
    """Shipped recipes that spell the key themselves, with their own note."""
    for name in shipped_recipes():
        if name == "base":
            continue
        path = find_recipe(name)
        text = path.read_text(encoding="utf-8")
        line = parse(text).lines.get(key)
        if line is not None:
            yield f"  {name} (line {line}): {text.splitlines()[line - 1].strip()}"


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe file: every key may be left out, and may refer to another one (`${lora.rank}`)."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    schema["title"] = "miles-k3 recipe"
    base = {"type": "string", "description": "Recipe file that this one starts from, relative to it."}
    schema["properties"] = {"base": base, **schema["properties"]}
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)
        for name, field in section["properties"].items():
            section["properties"][name] = field if name == "base" else _or_reference(field)
    return schema


def _or_reference(field: dict[str, Any]) -> dict[str, Any]:
    """The field's schema, or a reference to another key, or ??? where a recipe must still give it."""
    if "$ref" in field or "allOf" in field:
        return {"anyOf": [field, {"type": "null"}]}  # a section may be empty
    texts = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
    return {**texts, "anyOf": [field, {"type": "string", "pattern": r"^(\?\?\?|.*\$\{.+\}.*)$"}]}
