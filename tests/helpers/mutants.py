"""Planted mistakes: a copy of real code with one change, which a good check must reject."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest


def mutate[T](original: T, old: str, new: str) -> T:
    """The class or function `original` compiled anew, with `old`, which its source must hold once, replaced by `new`.

    Raises LookupError when the source has changed so that the mistake can't be planted any more.
    """
    source = textwrap.dedent(inspect.getsource(original))  # type: ignore[arg-type]
    if source.count(old) != 1:
        name = getattr(original, "__qualname__", original)
        raise LookupError(f"{name} holds {source.count(old)} times, not once: {old!r}; write the mutant anew")
    namespace = dict(vars(sys.modules[original.__module__]))
    exec(compile(source.replace(old, new), f"<mutant of {original.__module__}>", "exec"), namespace)
    return namespace[original.__name__]  # type: ignore[attr-defined]


def with_op[T](model: type[T], **ops: Callable[..., Any]) -> type[T]:
    """A model class whose named ops are replaced."""
    mutant = type(f"Mutant{model.__name__}", (model,), {name: staticmethod(op) for name, op in ops.items()})
    return mutant  # type: ignore[return-value]


def assert_rejects(check: Callable[[Any], None], mutant: Any) -> None:
    """The check must fail on the mutant, by an assertion and not by a crash."""
    with pytest.raises(AssertionError):
        check(mutant)
