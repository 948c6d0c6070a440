"""YAML in, plain values out, with the line of every key. Stricter than PyYAML and without YAML 1.1's surprises.

`off`, `no`, `012`, `1:30` and dates stay text (YAML 1.1 reads them as false, false, 10, 90 and dates); a number with an
exponent needs a dot, so `1e-5` stays text too and is then refused by the field that wants a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - filled below, instead of the inherited YAML 1.1 table


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


class _Dumper(yaml.SafeDumper):
    def represent_text(self, text: str) -> yaml.Node:
        # PyYAML writes these line breaks plainly and reads them back as others.
        style = '"' if re.search("[\x85\u2028\u2029\ufeff]", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)

_BAD = object()  # stands for a value that has been complained about and is left out
_CONTAINER_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


@dataclass(frozen=True, slots=True)
class Document:
    """Plain values of one text; `lines` maps dotted keys to line numbers; `problems` are (key, line, sentence)."""

    values: Any
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[tuple[str, int, str]] = field(default_factory=list)


def parse(text: str, prefix: str = "") -> Document:
    """Read one YAML text; `prefix` is the dotted key that the text is the value of. Never raises on bad text."""
    document = Document(values=None)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        values = None if node is None else _Builder(loader, document).build(node, prefix, ())
        return Document(None if values is _BAD else values, document.lines, document.problems)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        hint = "; indent with spaces" if "\\t" in str(error.problem) else ""
        return Document(None, {}, [(prefix, line, f"not YAML: {error.problem}{hint}")])
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return Document(None, {}, [(prefix, line, f"not YAML: {error.reason} (character {error.character:#06x})")])


def dump(values: dict[str, Any]) -> str:
    """Block-style YAML, in the given order, that `parse` turns back into exactly these values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def escape_interpolation(text: str) -> str:
    """Text that OmegaConf reads back as `text`, although it holds `${`."""
    return re.sub(r"(\\*)\$\{", lambda m: f"{m[1]}{m[1]}\\${{", text)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every text among nested plain values; tuples become lists."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value


class _Builder:
    """Turns nodes into plain values, noting lines and problems."""

    def __init__(self, loader: yaml.SafeLoader, document: Document) -> None:
        self.loader, self.document = loader, document

    def build(self, node: yaml.Node, key: str, above: tuple[yaml.Node, ...]) -> Any:
        line = node.start_mark.line + 1
        if key:
            self.document.lines.setdefault(key, line)
        if node in above:
            self.document.problems.append((key, line, "an alias refers to a part that contains it"))
            return _BAD
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _CONTAINER_TAGS:
            self.document.problems.append((key, line, f"the tag {node.tag} means nothing here; remove it"))
            return _BAD
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, key, (*above, node))
        if isinstance(node, yaml.SequenceNode):
            items = [self.build(child, f"{key}.{i}", (*above, node)) for i, child in enumerate(node.value)]
            return [item for item in items if item is not _BAD]
        try:
            return self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError):
            self.document.problems.append((key, line, f"{node.value!r} can't be read as {node.tag}"))
            return _BAD

    def _build_mapping(self, node: yaml.MappingNode, key: str, above: tuple[yaml.Node, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name_node, child in node.value:
            line = name_node.start_mark.line + 1
            if not isinstance(name_node, yaml.ScalarNode) or name_node.tag != "tag:yaml.org,2002:str":
                shown = name_node.value if isinstance(name_node, yaml.ScalarNode) else "a list or section"
                self.document.problems.append((key, line, f"the key {shown} is not text; put quotes around it"))
                continue
            name = name_node.value
            full = f"{key}.{name}" if key else name
            if name in values:
                first = self.document.lines[full]
                self.document.problems.append((full, line, f"given twice, first on line {first}; keep one"))
                continue
            self.document.lines[full] = line
            if (value := self.build(child, full, above)) is not _BAD:
                values[name] = value
        return values
