"""Two names that SGLang reads from K3's config, and that the published file spells otherwise.

Without them the LoRA pool ends with KeyError 'gate_up_proj' (`n_shared_experts`) and the expert capturer with
AttributeError (`num_experts_per_tok`).
"""

from __future__ import annotations

ALIASES = {"num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts"}


def install() -> None:
    from sglang.srt.configs.kimi_linear import KimiLinearConfig

    KimiLinearConfig.attribute_map = {**KimiLinearConfig.attribute_map, **ALIASES}
