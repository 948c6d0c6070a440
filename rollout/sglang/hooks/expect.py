"""What a hook relies on in a function of SGLang's: the names of its parameters, in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def expect_parameters(function: Callable[..., Any], *names: str) -> None:
    """Raise RuntimeError where `function` takes anything else than `names`: a hook around it would change the wrong
    thing."""
    found = tuple(inspect.signature(function).parameters)
    if found != names:
        raise RuntimeError(
            f"{function.__module__}.{function.__qualname__} takes ({', '.join(found)}), the hook around it was "
            f"written for ({', '.join(names)})"
        )
