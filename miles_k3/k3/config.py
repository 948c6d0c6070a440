"""K3Config <-> the published config.json. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_k3.errors import CheckpointError

# config.json field -> value that this implementation is written for; another value would silently change the maths.
_REQUIRED_TEXT = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "tie_word_embeddings": False,
    "topk_group": 1,
}
_REQUIRED_LINEAR = {"use_full_rank_gate": True}
_SAME_NAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "first_k_dense_replace", "rms_norm_eps", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "attn_res_block_size", "num_experts", "num_shared_experts", "moe_intermediate_size",
    "routed_expert_hidden_size", "latent_moe_use_norm", "moe_renormalize", "routed_scaling_factor",
    "max_position_embeddings",
)  # fmt: skip
MXFP4_GROUP = 32
A_LOG_MULTIPLE = 128  # the release pads A_log with zeros to a multiple of this


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Widths of the vision tower's tensors, which are passed through untouched."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    qkv_hidden_size: int
    patch_size: int
    pos_emb_height: int
    pos_emb_width: int
    merge_factor: int  # spatial patches merged into one token


@dataclass(frozen=True, slots=True, kw_only=True)
class K3Config:
    """The text model's dimensions, names as in config.json; layer indices are 0-based here, 1-based in the file.

    `raw` is the JSON as read, unknown fields included; `to_json` gives it back with our fields written over it.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    first_k_dense_replace: int
    rms_norm_eps: float
    mla_latent_norm_eps: float  # 1e-5 in serving and training stacks; not in config.json, see spec 2.4
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attn_res_block_size: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    latent_moe_use_norm: bool
    moe_renormalize: bool
    routed_scaling_factor: float
    situ_beta: float
    situ_linear_beta: float
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    mla_layers: tuple[int, ...]
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    vision: VisionShape | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        problems = list(_inconsistencies(self))
        if problems:
            raise CheckpointError("config.json: " + "; ".join(problems))

    # --- layers -------------------------------------------------------------------------------------------------
    def is_mla(self, layer: int) -> bool:
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.mla_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    def starts_block(self, layer: int) -> bool:
        """Whether `layer` appends the prefix to the bank and restarts it (AttnRes write step, spec 2.2)."""
        return layer % self.attn_res_block_size == 0

    def bank_rows(self, layer: int) -> int:
        """Bank rows that the attention side of `layer` sees; also what a pipeline cut before `layer` carries."""
        return -(-layer // self.attn_res_block_size)

    # --- widths -------------------------------------------------------------------------------------------------
    @property
    def kda_dim(self) -> int:
        return self.kda_num_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_value_dim(self) -> int:
        return self.num_attention_heads * self.v_head_dim

    @property
    def latent_cache_dim(self) -> int:
        """Numbers that one token adds to the KV cache of one MLA layer: normalised latent and shared extra key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def a_log_padded(self) -> int:
        return -(-self.kda_num_heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE

    # --- file ---------------------------------------------------------------------------------------------------
    @classmethod
    def from_json(cls, raw: Mapping[str, Any], *, mla_latent_norm_eps: float | None = None) -> K3Config:
        """Read the published shape. Raises CheckpointError naming every missing or unsupported field."""
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise CheckpointError("config.json: text_config is missing; expected the published Kimi K3 layout")
        linear = text.get("linear_attn_config")
        if not isinstance(linear, Mapping):
            raise CheckpointError("config.json: text_config.linear_attn_config is missing; a Kimi K3 model has one")
        problems = [
            *_refusals(text, _REQUIRED_TEXT, "text_config"),
            *_refusals(linear, _REQUIRED_LINEAR, "linear_attn_config"),
        ]
        values: dict[str, Any] = {}

        def take(source: Mapping[str, Any], key: str, name: str) -> None:
            if key in source and source[key] is not None:
                values[name] = source[key]
            else:
                problems.append(f"{key} is missing")

        for name in _SAME_NAME:
            take(text, name, name)
        experts_key = "num_experts_per_token" if "num_experts_per_token" in text else "num_experts_per_tok"
        take(text, experts_key, "num_experts_per_token")
        take(text, "activation_situ_beta", "situ_beta")
        take(text, "activation_situ_linear_beta", "situ_linear_beta")
        take(linear, "num_heads", "kda_num_heads")
        take(linear, "head_dim", "kda_head_dim")
        take(linear, "short_conv_kernel_size", "short_conv_kernel_size")
        take(linear, "gate_lower_bound", "gate_lower_bound")
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            take(raw if key in raw else text, key, key)
        problems += _layer_list_problems(text, linear)
        if problems:
            raise CheckpointError("config.json: " + "; ".join(problems))
        values["mla_layers"] = tuple(sorted(i - 1 for i in linear["full_attn_layers"]))
        eps = values["rms_norm_eps"] if mla_latent_norm_eps is None else mla_latent_norm_eps
        vision = _vision_shape(raw["vision_config"]) if raw.get("vision_config") else None
        return cls(**values, mla_latent_norm_eps=eps, vision=vision, raw=raw)

    @classmethod
    def from_folder(cls, folder: str | Path) -> K3Config:
        """Read `folder/config.json`. Raises CheckpointError when it is missing or is not JSON."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist; model.path must be a Hugging Face folder with config.json"
            ) from None
        except json.JSONDecodeError as e:
            raise CheckpointError(f"{path}:{e.lineno}: not JSON ({e.msg}); copy the file again") from None
        return cls.from_json(raw)

    def to_json(self) -> dict[str, Any]:
        """The published shape: `raw` with our values written over it, so fields we don't know survive."""
        raw = json.loads(json.dumps(self.raw)) if self.raw else {}
        text = raw.setdefault("text_config", {})
        for name in _SAME_NAME:
            text[name] = getattr(self, name)
        text["num_experts_per_token"] = self.num_experts_per_token
        text["activation_situ_beta"] = self.situ_beta
        text["activation_situ_linear_beta"] = self.situ_linear_beta
        text.update({k: v for k, v in _REQUIRED_TEXT.items() if k not in text})
        linear = text.setdefault("linear_attn_config", {})
        linear.update(
            num_heads=self.kda_num_heads, head_dim=self.kda_head_dim, gate_lower_bound=self.gate_lower_bound,
            short_conv_kernel_size=self.short_conv_kernel_size, use_full_rank_gate=True,
            full_attn_layers=[i + 1 for i in self.mla_layers], kda_layers=[i + 1 for i in self.kda_layers],
        )  # fmt: skip
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            raw[key] = getattr(self, key)
        return raw


def _refusals(found: Mapping[str, Any], required: Mapping[str, Any], where: str) -> list[str]:
    return [
        f"{where}.{key} is {found[key]!r}; this implementation covers {value!r} only"
        for key, value in required.items()
        if key in found and found[key] != value
    ]


def _layer_list_problems(text: Mapping[str, Any], linear: Mapping[str, Any]) -> list[str]:
    full, kda = linear.get("full_attn_layers"), linear.get("kda_layers")
    if not isinstance(full, list) or not isinstance(kda, list):
        return ["linear_attn_config.full_attn_layers and kda_layers must be lists of 1-based layer numbers"]
    num = text.get("num_hidden_layers") or 0
    both, union = sorted(set(full) & set(kda)), set(full) | set(kda)
    missing, foreign = sorted(set(range(1, num + 1)) - union), sorted(union - set(range(1, num + 1)))
    out = []
    if both:
        out.append(f"layers {both} are in full_attn_layers and in kda_layers")
    if missing:
        out.append(f"layers {missing} are in neither full_attn_layers nor kda_layers (they count from 1)")
    if foreign:
        out.append(f"layers {foreign} are outside 1..{num} (they count from 1)")
    return out


def _inconsistencies(c: K3Config) -> list[str]:
    out = []
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        if getattr(c, name) % MXFP4_GROUP:
            out.append(f"{name} is {getattr(c, name)}; MXFP4 groups need a multiple of {MXFP4_GROUP}")
    if not -5.0 <= c.gate_lower_bound < 0.0:
        out.append(f"gate_lower_bound is {c.gate_lower_bound}; expected -5 <= bound < 0")
    if not 0 < c.num_experts_per_token <= c.num_experts:
        out.append(f"num_experts_per_token is {c.num_experts_per_token} of {c.num_experts} experts")
    if c.first_k_dense_replace < 1:
        out.append("first_k_dense_replace is 0; layer 0 must be dense")
    return out


def _vision_shape(v: Mapping[str, Any]) -> VisionShape:
    try:
        merge = v.get("merge_kernel_size") or v.get("merge_kernel") or [2, 2]
        return VisionShape(
            hidden_size=v["vt_hidden_size"], num_layers=v["vt_num_hidden_layers"],
            intermediate_size=v["vt_intermediate_size"], qkv_hidden_size=v["qkv_hidden_size"],
            patch_size=v["patch_size"], pos_emb_height=v["init_pos_emb_height"],
            pos_emb_width=v["init_pos_emb_width"], merge_factor=merge[0] * merge[1],
        )  # fmt: skip
    except KeyError as e:
        raise CheckpointError(f"config.json: vision_config.{e.args[0]} is missing") from None
