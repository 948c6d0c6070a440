"""No merged front of the MoE where LoRA is on one of its parts.

SGLang multiplies the shared experts' gate and up, the router and the latent down projection as one raw matrix, so their
LoRA wrappers are never asked. Without the merge it calls each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

# Spellings of SGLang and of PEFT; `all` means every module that SGLang knows.
_FRONT = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "routed_expert_down_proj", "all", "all-linear"}


def lora_on_front(enabled: bool, targets: Iterable[str] | None) -> bool:
    """Whether an adapter may target a part of the front; unknown targets count."""
    if not enabled:
        return False
    return targets is None or bool(_FRONT & {t.rpartition(".")[2] for t in targets})


def install() -> None:
    from sglang.srt.models.kimi_k3 import KimiK3MoE
    from sglang.srt.runtime_context import get_server_args

    merge = KimiK3MoE._merge_front_weights

    @functools.wraps(merge)
    def merge_unless_lora(self: Any) -> None:
        options = get_server_args()
        if not lora_on_front(bool(options.enable_lora), options.lora_target_modules):
            merge(self)

    KimiK3MoE._merge_front_weights = merge_unless_lora
