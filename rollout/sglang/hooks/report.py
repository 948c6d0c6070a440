"""Tells the engine that a scheduler process has the hooks: SGLang swallows what goes wrong with a plugin."""

from __future__ import annotations

import functools
from typing import Any

KEY = "miles_k3_hooks"


def install() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    from miles_k3.rollout.sglang.hooks import hook_names

    ask = Scheduler.get_internal_state

    @functools.wraps(ask)
    def with_hooks(self: Any, request: Any) -> Any:
        answer = ask(self, request)
        answer.internal_state[KEY] = list(hook_names())
        return answer

    Scheduler.get_internal_state = with_hooks
