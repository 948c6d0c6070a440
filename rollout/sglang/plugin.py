"""What SGLang calls in each of its processes: the entry point `miles_k3` of the group `sglang.srt.plugins`.

SGLang logs what a plugin raises and goes on without it, which for K3 with LoRA means wrong numbers. So whatever goes
wrong here is kept, and raised when a K3 model is about to be built; other models are served as if nothing were
installed. The engine asks every scheduler process for its hooks afterwards (`hooks.report`).
"""

from __future__ import annotations

import logging

from miles_k3.rollout.sglang.hooks import HOOKS
from miles_k3.rollout.sglang.versions import installed_version, version_problem

log = logging.getLogger(__name__)


def install() -> None:
    """Put all hooks in, or make K3's model refuse to be built. Raises ImportError only where SGLang has no K3."""
    problem = version_problem(installed_version())
    if problem is None:
        problem = _install_hooks()
    if problem is not None:
        _refuse_k3(problem)


def _install_hooks() -> str | None:
    """What went wrong with the first hook that failed."""
    for hook in HOOKS:
        try:
            hook.install()
        except Exception as error:  # noqa: BLE001 - SGLang would swallow it; K3's model raises it
            return f"miles-k3's hook {hook.__name__} could not be put into SGLang ({error!r})"
    return None


def _refuse_k3(problem: str) -> None:
    from sglang.srt.models.kimi_k3 import KimiK3ForConditionalGeneration

    def refuse(self: object, *_: object, **__: object) -> None:
        raise RuntimeError(problem)

    log.error("%s", problem)
    KimiK3ForConditionalGeneration.__init__ = refuse
