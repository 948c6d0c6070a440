"""No fused all-reduce behind o_proj where LoRA is on it.

On Blackwell with several GPUs SGLang lets o_proj write into a buffer that all of them see, sums it up there, and calls
o_proj with that buffer as an argument. A LoRA wrapper around o_proj takes no such argument and computes into memory of
its own: KDA's call ends the scheduler, MLA's sum would be of the wrong memory. Without it o_proj reduces itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any


def lora_on_o_proj(enabled: bool, targets: Iterable[str] | None) -> bool:
    """Whether an adapter may target o_proj; unknown targets count."""
    return enabled and (targets is None or bool({"o_proj", "all", "all-linear"} & {t.split(".")[-1] for t in targets}))


def install() -> None:
    from sglang.srt.environ import envs
    from sglang.srt.layers import k3_ar_fusion
    from sglang.srt.runtime_context import get_server_args

    probe = k3_ar_fusion._get_state

    @functools.wraps(probe)
    def none_under_lora() -> Any:
        options = get_server_args()
        if not lora_on_o_proj(bool(options.enable_lora), options.lora_target_modules):
            return probe()
        if envs.SGLANG_K3_AR_FUSION.is_set() and envs.SGLANG_K3_AR_FUSION.get():
            raise RuntimeError(
                "SGLANG_K3_AR_FUSION is set, but LoRA on o_proj can't be summed up by it; unset the variable"
            )
        return None

    k3_ar_fusion._get_state = none_under_lora
