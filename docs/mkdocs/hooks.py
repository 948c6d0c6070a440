"""mkdocs: pages made from the code at build time, and links to the repository's files, which the site doesn't hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from miles_k3.judge import recipe_fields
from miles_k3.recipe_keys import explain_key

OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)")
API = {
    "miles_k3.protocols": "The three seams: a class with these verbs takes the place of ours.",
    "miles_k3.types": "What travels between them.",
    "miles_k3.errors": "What is raised.",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the made pages."""
    for name, lines in {"recipe_reference.md": recipe_reference(), "api.md": api()}.items():
        files.append(File.generated(config, name, content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A link out of docs/ becomes its text."""
    return OUTSIDE.sub(r"\1", markdown)


def recipe_reference() -> Iterator[str]:
    """Every key, from the models that judge recipes."""
    yield "# Recipe reference\n"
    yield "Made from the models that judge recipes. `miles-k3 recipe explain KEY` says the same in a terminal.\n"
    fields = recipe_fields()
    parents = {key.rpartition(".")[0] for key in fields}
    for section in [key for key in fields if key in parents]:
        yield f"## {section}\n"
        yield explain_key(section)[0].partition(": ")[2] + "\n"
        yield "| key | type | default | allowed | what it does |"
        yield "|---|---|---|---|---|"
        for key in [key for key in fields if key.rpartition(".")[0] == section and key not in parents]:
            yield _row(key)
        yield ""


def _row(key: str) -> str:
    head, *rest = explain_key(key)
    said = {name: value for name, _, value in (line.strip().partition(": ") for line in rest)}
    text = head.partition(": ")[2].replace("<", "&lt;")
    allowed = said.get("allowed", "")
    cells = [f"`{key}`", said["type"], f"`{said['default']}`", f"`{allowed}`" if "[" in allowed else allowed, text]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def api() -> Iterator[str]:
    """Docstrings of the shared words."""
    yield "# Python\n"
    for module, purpose in API.items():
        yield f"## {module}\n\n{purpose}\n\n::: {module}\n    options: {{show_root_heading: false}}\n"
