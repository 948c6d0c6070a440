"""adapter_config.json: written for peft and servers, judged when it comes back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_k3.errors import AdapterError
from miles_k3.types import AdapterConfig

CONFIG_FILE = "adapter_config.json"
LAYOUT_FIELD = "miles_k3_expert_layout"  # "grouped": 3-D expert tensors, for servers only; peft would skip them
SERVER_TARGETS = ("down_proj", "gate_proj", "kv_a_proj_with_mqa", "o_proj", "q_a_proj", "up_proj")  # spec 5.2
EXPERT_TARGETS = ("w1", "w2", "w3")

# Fields that say where an adapter came from or where it goes, not what it computes.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type", LAYOUT_FIELD,
}  # fmt: skip
# Values of the remaining fields that leave plain LoRA: everything else would change what is computed.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others also change the base weights
}
_ABSENT = (None, False, {}, [], "")


def peft_config(config: AdapterConfig, *, base_model: str, expand_experts: bool) -> dict[str, Any]:
    """The fields that peft and servers read; no version stamps, so that the bytes depend on the adapter alone."""
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "target_modules": sorted(SERVER_TARGETS + EXPERT_TARGETS) if expand_experts else list(SERVER_TARGETS),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "inference_mode": True,
    }
    if not expand_experts:
        fields[LAYOUT_FIELD] = "grouped"
    return fields


def read_peft_config(folder: Path) -> AdapterConfig:
    """Rank and alpha of a PEFT folder; `share_gate_up_a` is left at its default for the caller to find out.

    Raises AdapterError with every field that plain LoRA at alpha / r can't honour, one a line.
    """
    path = folder / CONFIG_FILE
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        raise AdapterError(f"{path} does not exist; expected a PEFT folder with {CONFIG_FILE}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise AdapterError(f"{path} is not JSON ({e}); export the adapter again") from None
    if not isinstance(fields, dict):
        raise AdapterError(f"{path} holds a {type(fields).__name__}, expected an object")
    problems = list(_findings(fields))
    if problems:
        raise AdapterError("\n".join(f"{path}: {problem}" for problem in problems))
    return AdapterConfig(rank=fields["r"], alpha=float(fields["lora_alpha"]))


def _findings(fields: Mapping[str, Any]) -> Iterator[str]:
    if fields.get("peft_type") != "LORA":
        yield f"peft_type is {fields.get('peft_type')!r}, expected 'LORA'"
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        yield f"r is {rank!r}, expected a whole number of at least 1"
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        yield f"lora_alpha is {alpha!r}, expected a finite number above 0"
    if fields.get(LAYOUT_FIELD) not in (None, "grouped"):
        yield f"{LAYOUT_FIELD} is {fields[LAYOUT_FIELD]!r}, expected 'grouped' or no such field"
    for name, value in fields.items():
        if name in _HARMLESS or value in _NEUTRAL.get(name, _ABSENT):
            continue
        neutral = _NEUTRAL.get(name, _ABSENT)[0]
        yield (
            f"{name} is {value!r}: only plain LoRA with scaling lora_alpha / r is supported; "
            f"retrain or convert it with {name} {neutral!r}"
        )
