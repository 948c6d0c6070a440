"""What is wrong with a recipe: every finding at once, each with what came, what was expected and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from miles_k3.config import Recipe, Section


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a recipe: the dotted key ("" when it concerns several) and one sentence."""

    key: str
    text: str


def recipe_fields() -> dict[str, FieldInfo]:
    """Every dotted key of a recipe, sections included."""
    return dict(_walk_fields(Recipe, ""))


def judge(values: Mapping[str, Any], already_bad: frozenset[str] = frozenset()) -> tuple[Recipe | None, list[Problem]]:
    """Build the recipe from plain values, or name everything that is wrong with them at once.

    Keys in `already_bad` have been reported by the caller: neither their absence nor a rule that involves them is
    reported again.
    """
    filled = {**{name: {} for name in ("model", "task")}, **values}
    try:
        return Recipe.model_validate(filled), []
    except ValidationError as error:
        problems = [p for p in _translate(error) if not (p.key in already_bad and p.text.startswith("missing"))]
    bad = already_bad | {p.key for p in problems}
    bad |= {guess for p in problems if p.text.startswith("unknown key") for guess in suggestions(p.key)}
    return None, problems + [p for p in _rules_broken_by_the_rest(filled, bad) if p not in problems]


def suggestions(key: str) -> list[str]:
    """The known keys that an unknown one was probably meant to be."""
    section, _, name = key.rpartition(".")
    places: dict[str, list[str]] = {}
    for known in recipe_fields():
        places.setdefault(known.rpartition(".")[2], []).append(known)
    if name in places:
        return places[name]
    siblings = {n: [k for k in keys if k.rpartition(".")[0] == section] for n, keys in places.items()}
    siblings = {n: keys for n, keys in siblings.items() if keys}
    for names, cutoff in ((siblings, 0.6), (places, 0.8)):
        if close := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return names[close[0]]
    return []


def _walk_fields(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        yield prefix + name, info
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from _walk_fields(info.annotation, f"{prefix}{name}.")


def _rules_broken_by_the_rest(values: Mapping[str, Any], bad: frozenset[str]) -> list[Problem]:
    """Rules across fields, judged with every bad key at its default and left out where they mention one."""
    rest = _without(values, bad)
    for key in ("model.path", "task.name"):
        section, name = key.split(".")
        rest.setdefault(section, {}).setdefault(name, "?")
    try:
        Recipe.model_validate(rest)
    except ValidationError as error:
        mentions = re.compile(r"\b(?:" + "|".join(map(re.escape, sorted(bad))) + r")\b") if bad else None
        return [p for p in _translate(error) if p.key == "" and not (mentions and mentions.search(p.text))]
    return []


def _without(values: Mapping[str, Any], bad: frozenset[str], prefix: str = "") -> dict[str, Any]:
    return {
        key: _without(value, bad, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in values.items()
        if f"{prefix}{key}" not in bad
    }


def _translate(error: ValidationError) -> list[Problem]:
    problems = []
    for detail in error.errors(include_url=False):
        if detail["type"] == "value_error":
            problems += [
                Problem("", line) for line in str(detail.get("ctx", {}).get("error", detail["msg"])).splitlines()
            ]
        else:
            key, last = ".".join(map(str, detail["loc"])), str(detail["loc"][-1])
            text = _sentence(key, detail["type"], detail["input"], detail.get("ctx", {}))
            if "." in last and detail["type"] == "extra_forbidden":
                text = f"unknown key; write it nested, as {last.replace('.', ': {')}: ...{'}' * last.count('.')}"
            problems.append(Problem(key, text))
    return problems


def _sentence(key: str, kind: str, given: Any, ctx: Mapping[str, Any]) -> str:
    if kind == "extra_forbidden":
        return _unknown_key(key)
    if kind == "missing":
        return f"missing; set it in the recipe or with --set {key}=... ({_purpose(key)})"
    shown = f"text {given!r}" if isinstance(given, str) else yaml.safe_dump(given, default_flow_style=True, width=1000)
    shown = shown.removesuffix("\n...\n").strip()
    if kind in _NUMBER_HINTS and isinstance(given, str):
        return f"{shown} given, expected {_NUMBER_HINTS[kind]}; {_how_to_write_number(given, kind)}"
    if kind in _EXPECTED:
        hint = (
            "; put quotes around it"
            if kind == "string_type" and not isinstance(given, dict | list | type(None))
            else ""
        )
        if kind == "int_type" and isinstance(given, float) and given.is_integer():
            hint = f"; write {int(given)}"
        reason = f" ({_purpose(key)})" if kind in _LIMITS and _purpose(key) else ""
        return f"{shown} given, expected {_EXPECTED[kind].format(**ctx)}{hint}{reason}"
    return f"{shown} given, but it {ctx.get('reason', 'does not fit')} ({kind})"


def _unknown_key(key: str) -> str:
    if guesses := suggestions(key):
        return f"unknown key; did you mean {' or '.join(guesses)}?"
    section = key.rpartition(".")[0]
    names = [k.rpartition(".")[2] for k in recipe_fields() if k.rpartition(".")[0] == section]
    return f"unknown key; {section or 'a recipe'} has {', '.join(names)}"


def _purpose(key: str) -> str:
    info = recipe_fields().get(key)
    return (info.description or "").removesuffix(".") if info else ""


def _how_to_write_number(given: str, kind: str) -> str:
    try:
        number = float(given.replace("_", ""))
    except ValueError:
        return "write a number"
    if kind == "int_type":
        return f"write {int(number)}" if number.is_integer() else "write a whole number"
    if re.search(r"\d[eE]", given) and "." not in given:
        mantissa, exponent = re.split("[eE]", given)
        sign = "" if exponent[0] in "+-" else "+"
        return f"YAML needs the dot: write {mantissa}.0e{sign}{exponent}"
    return f"write {number!r} without quotes"


_NUMBER_HINTS = {"int_type": "a whole number", "float_type": "a number"}
_EXPECTED = {
    **_NUMBER_HINTS,
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that isn't empty",
    "string_pattern_mismatch": "one folder name of letters, digits and . _ + = -",
    "literal_error": "{expected}",
    "tuple_type": "a list",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
    "finite_number": "a finite number",
}
_LIMITS = {
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "{le:g} or less",
}
_EXPECTED |= _LIMITS
