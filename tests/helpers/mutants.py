"""Planted mistakes: a copy of real code with one change, which a good check must reject."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from helpers.ops_model import OpsK3

from miles_k3.k3.naive import NaiveK3


def mutate[T](original: T, *edits: tuple[str, str]) -> T:
    """The class or function `original` compiled anew with each (old, new) edit; its source must hold each old once.

    Raises LookupError when the source has changed so that the mistake can't be planted any more.
    """
    source = textwrap.dedent(inspect.getsource(original))  # type: ignore[arg-type]
    for old, new in edits:
        if source.count(old) != 1:
            name = getattr(original, "__qualname__", original)
            raise LookupError(f"{name} holds {source.count(old)} times, not once: {old!r}; plant the mistake anew")
        source = source.replace(old, new)
    namespace = dict(vars(sys.modules[original.__module__]))
    exec(compile(source, f"<mutant of {original.__module__}>", "exec"), namespace)
    return namespace[original.__name__]  # type: ignore[attr-defined]


def mutants(plants: Mapping[str, Callable[[], Any]]) -> pytest.MarkDecorator:
    """Parametrise `plant` over named makers of mutants; made inside the test, so that one stale edit fails one test."""
    return pytest.mark.parametrize("plant", list(plants.values()), ids=list(plants))


def naive(*edits: tuple[str, str]) -> Callable[[], type[NaiveK3]]:
    """Maker of a NaiveK3 with edits."""
    return lambda: mutate(NaiveK3, *edits)


def on_ops(**ops: Callable[..., Any]) -> Callable[[], type[OpsK3]]:
    """Maker of an OpsK3 with replaced ops."""
    return lambda: type("MutantOpsK3", (OpsK3,), {name: staticmethod(op) for name, op in ops.items()})


def assert_rejects(check: Callable[[Any], None], mutant: Any) -> None:
    """The check must fail on the mutant, by an assertion and not by a crash."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(mutant)


def record(model: Any, method: str) -> list[tuple[tuple, Any]]:
    """The (arguments, result) of every later call of a method of this one object."""
    calls, original = [], getattr(model, method)

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append((args, result))
        return result

    setattr(model, method, spy)
    return calls
