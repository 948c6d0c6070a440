"""Answers to questions about a recipe or a machine, and how they are printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from miles_k3.errors import MilesError

if TYPE_CHECKING:
    from rich.console import Console


class Level(StrEnum):
    """How an answer is meant."""

    OK = "ok"
    WARN = "warn"  # runs, but slower, or other than it was verified
    FAIL = "fail"


_MARKS = {Level.OK: ("✓", "green"), Level.WARN: ("!", "bold yellow"), Level.FAIL: ("✗", "bold red")}


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question; `fix` is what to do about it, where the text doesn't say."""

    name: str
    level: Level
    text: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        """Whether it keeps nothing from running."""
        return self.level is not Level.FAIL

    @property
    def sentence(self) -> str:
        return f"{self.text}; {self.fix}" if self.fix else self.text


class Findings(list[Finding]):
    """Findings in the order in which they were made."""

    def add(self, name: str, ok: bool, text: str) -> None:
        self.append(Finding(name, Level.OK if ok else Level.FAIL, text))

    def warn(self, name: str, text: str, fix: str) -> None:
        self.append(Finding(name, Level.WARN, text, fix))

    def fail(self, name: str, text: str, fix: str) -> None:
        self.append(Finding(name, Level.FAIL, text, fix))

    @contextmanager
    def asking(self, name: str) -> Iterator[None]:
        """An error of the product inside the block is the answer to the question, one finding a sentence."""
        try:
            yield
        except (MilesError, OSError) as error:
            for line in str(error).splitlines():
                self.add(name, False, line)


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """One line a finding, ✓, ! or ✗ first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(highlight=False)
    if not console.is_terminal:  # whole lines, for pipes and logs
        for finding in findings:
            mark, _ = _MARKS[finding.level]
            console.print(f"{mark} {finding.name}: {finding.sentence}", markup=False, soft_wrap=True)
        return
    table = Table(box=None, show_header=False, padding=(0, 1))
    for finding in findings:
        table.add_row(Text(*_MARKS[finding.level]), Text(finding.name, "bold"), Text(finding.sentence))
    console.print(table)
