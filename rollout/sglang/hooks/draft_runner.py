"""A draft's model runner without adapters: they are the target's alone.

SGLang makes the runner from a copy of the server's arguments, LoRA and all. It would lay a LoRA pool over the draft's
layers, and look for each batch's adapters in it.
"""

from __future__ import annotations

import functools
from typing import Any

from miles_k3.rollout.sglang.hooks.expect import expect_parameters


def install() -> None:
    from sglang.srt.speculative import draft_worker_common

    change = draft_worker_common.draft_server_args_overrides
    expect_parameters(change, "target_model_config", "draft_backend")

    @functools.wraps(change)
    def without_lora(target_model_config: Any, draft_backend: Any) -> dict[str, Any]:
        return {**change(target_model_config, draft_backend), "enable_lora": False}

    draft_worker_common.draft_server_args_overrides = without_lora
