"""The published config.json: which settings are covered, what makes a file unfit, and a file without the numbers.

Each finding is one sentence: the field, what it holds, what was expected. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

MXFP4_GROUP = 32  # weights that share one scale byte

# Values that this implementation is written for; another one would silently change the maths.
# Readers fill in something else where one of these is missing, so they must be in the file.
WRITTEN_OUT_TEXT = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_router_activation_func": "sigmoid",
}
WRITTEN_OUT_LINEAR = {"use_full_rank_gate": True}
# A file may leave these out: every reader's default is the same.
OPTIONAL_TEXT = {
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
_MXFP4_FORMAT = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
_MXFP4_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": MXFP4_GROUP}


def _show(value: Any) -> str:
    """As in the file, and not longer than a sentence bears."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def field_problem(where: str, kind: str, value: Any) -> str | None:
    """Judge one field by its kind: 'int' (a size, from 1), 'token' (from 0), 'float', 'positive' or 'bool'."""
    if kind == "bool":
        return None if isinstance(value, bool) else f"{where} is {_show(value)}; expected true or false"
    if kind in ("float", "positive"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if is_number and (kind == "float" or value > 0):
            return None
        return f"{where} is {_show(value)}; expected a number" + (" above 0" if kind == "positive" else "")
    least = 0 if kind == "token" else 1
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return None
    return f"{where} is {_show(value)}; expected a whole number from {least}"


def unsupported(found: Mapping[str, Any], covered: Mapping[str, Any], where: str, *, optional: bool) -> list[str]:
    """Fields whose value isn't the one covered; absent ones too, unless `optional`."""
    out = []
    for key, value in covered.items():
        if key not in found:
            if not optional:
                out.append(f"{where}{key} is missing; a Kimi K3 file has {json.dumps(value)}")
        elif found[key] != value or isinstance(found[key], bool) is not isinstance(value, bool):
            out.append(f"{where}{key} is {_show(found[key])}; this implementation covers {json.dumps(value)} only")
    return out


def text_problems(raw: Mapping[str, Any], text: Mapping[str, Any], linear: Mapping[str, Any]) -> Iterator[str]:
    """Settings of the text model that this implementation doesn't cover."""
    yield from unsupported(text, WRITTEN_OUT_TEXT, "text_config.", optional=False)
    yield from unsupported(text, OPTIONAL_TEXT, "text_config.", optional=True)
    yield from unsupported(raw, {"tie_word_embeddings": False}, "", optional=True)
    yield from unsupported(linear, WRITTEN_OUT_LINEAR, "linear_attn_config.", optional=False)
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        yield f"text_config.num_key_value_heads is {_show(kv_heads)}; expected num_attention_heads, {_show(heads)}"
    names = [k for k in ("num_experts_per_token", "num_experts_per_tok") if k in text]
    if len(names) == 2 and text[names[0]] != text[names[1]]:
        a, b = (_show(text[k]) for k in names)
        yield f"text_config.{names[0]} is {a} but {names[1]} is {b}; make them equal"
    for owner, where in ((text, "text_config."), (raw, "")):
        if owner.get("quantization_config") is not None:
            yield from _quantization_problems(owner["quantization_config"], where + "quantization_config")


def _quantization_problems(found: Any, where: str) -> Iterator[str]:
    if not isinstance(found, Mapping):
        yield f"{where} is {_show(found)}; expected an object"
        return
    yield from unsupported(found, _MXFP4_FORMAT, where + ".", optional=False)
    groups = found.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield from unsupported(weights, _MXFP4_WEIGHTS, f"{where}.config_groups.{name}.weights.", optional=True)


def layer_list_problems(num_layers: Any, linear: Mapping[str, Any]) -> list[str]:
    """Whether full_attn_layers and kda_layers, which count from 1, name every layer exactly once (trap 1)."""
    lists = {name: linear.get(name) for name in ("full_attn_layers", "kda_layers")}
    out = [
        f"linear_attn_config.{name} is {_show(value)}; expected a list of layer numbers, counted from 1"
        for name, value in lists.items()
        if not isinstance(value, list) or not all(type(i) is int for i in value)
    ]
    if out or field_problem("", "int", num_layers):
        return out
    full, kda = lists["full_attn_layers"] or [], lists["kda_layers"] or []
    every, named = set(range(1, num_layers + 1)), {*full, *kda}
    both, twice = set(full) & set(kda), {i for x in (full, kda) for i in x if x.count(i) > 1}
    findings = (
        (both, "are in full_attn_layers and in kda_layers; each layer has one kind"),
        (twice, "are named twice in one list; name each layer once"),
        (every - named, "are in neither full_attn_layers nor kda_layers; layers count from 1"),
        (named - every, f"are outside 1..{num_layers}; layers count from 1"),
    )
    return [f"linear_attn_config: layers {sorted(layers)} {what}" for layers, what in findings if layers]


def cross_problems(c: Mapping[str, Any]) -> Iterator[str]:
    """Values that are fine alone and wrong together; `c` holds every field of K3Config, each of the right type."""
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        if c[name] % MXFP4_GROUP:
            yield f"{name} is {c[name]}; MXFP4 scales cover {MXFP4_GROUP} inputs each, so make it a multiple of that"
    if not -5.0 <= c["gate_lower_bound"] < 0.0:
        yield f"gate_lower_bound is {c['gate_lower_bound']}; the KDA kernels cover -5 <= bound < 0"
    if c["num_experts_per_token"] > c["num_experts"]:
        yield f"num_experts_per_token is {c['num_experts_per_token']}, but there are {c['num_experts']} experts"
    if c["first_k_dense_replace"] > c["num_hidden_layers"]:
        yield f"first_k_dense_replace is {c['first_k_dense_replace']} of {c['num_hidden_layers']} layers"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if c[name] >= c["vocab_size"]:
            yield f"{name} is {c[name]}, outside the vocabulary of {c['vocab_size']}"
    mla = c["mla_layers"]
    if list(mla) != sorted({i for i in mla if 0 <= i < c["num_hidden_layers"]}):
        yield f"mla_layers is {mla}; expected rising layer numbers from 0 to {c['num_hidden_layers'] - 1}"


def completed(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` itself when it holds a linear_attn_config, else a published file without the numbers, under `raw`."""
    text = raw.get("text_config", {})
    if "linear_attn_config" in text:
        return raw
    top = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "dtype": "bfloat16",
           "tie_word_embeddings": False}  # fmt: skip
    return {**top, **raw, "text_config": {**_text_skeleton(), **text}}


def _text_skeleton() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": MXFP4_GROUP, "strategy": "group", "symmetric": True,
               "dynamic": False, "scale_dtype": "torch.uint8", "observer": "minmax"}  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    left_out = ["self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head", "vision_tower",
                "mm_projector"]  # fmt: skip
    quantization = {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": [f"re:.*{name}.*" for name in left_out],
    }  # fmt: skip
    return {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "dtype": "bfloat16",
        **WRITTEN_OUT_TEXT, **OPTIONAL_TEXT, "num_key_value_heads": 0, "use_grouped_topk": True,
        "linear_attn_config": dict(WRITTEN_OUT_LINEAR), "quantization_config": quantization,
    }  # fmt: skip
