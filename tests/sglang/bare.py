"""Instances of SGLang's classes without what their constructors do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def outcome(work: Callable[[], Any]) -> Any:
    """What it gives, or the error that it ends with."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - the error is what is looked at
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def bare(kind: Any, **attributes: Any) -> Any:
    """An instance without its constructor's work."""
    made = kind.__new__(kind)
    if isinstance(made, torch.nn.Module):
        torch.nn.Module.__init__(made)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made
