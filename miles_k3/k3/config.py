"""K3Config <-> the published config.json. Imports no torch."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from miles_k3.errors import CheckpointError
from miles_k3.k3 import config_format
from miles_k3.k3.config_format import MXFP4_GROUP as MXFP4_GROUP  # for everyone who reads shapes

_SAME_NAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "first_k_dense_replace", "rms_norm_eps", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "attn_res_block_size", "num_experts", "num_shared_experts", "moe_intermediate_size",
    "routed_expert_hidden_size", "latent_moe_use_norm", "moe_renormalize", "routed_scaling_factor",
    "max_position_embeddings",
)  # fmt: skip
# field of K3Config or VisionShape -> its key in the file
_TEXT_KEYS = {name: name for name in _SAME_NAME} | {
    "situ_beta": "activation_situ_beta",
    "situ_linear_beta": "activation_situ_linear_beta",
}
_LINEAR_KEYS = {
    "kda_num_heads": "num_heads",
    "kda_head_dim": "head_dim",
    "short_conv_kernel_size": "short_conv_kernel_size",
    "gate_lower_bound": "gate_lower_bound",
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_VISION_KEYS = {
    "hidden_size": "vt_hidden_size",
    "num_layers": "vt_num_hidden_layers",
    "intermediate_size": "vt_intermediate_size",
    "qkv_hidden_size": "qkv_hidden_size",
    "patch_size": "patch_size",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
}
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
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        problems = [p for name in _KINDS if (p := config_format.field_problem(name, _KINDS[name], values[name]))]
        _refuse("K3Config", problems or list(config_format.cross_problems(values)))

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
    def from_json(cls, raw: Mapping[str, Any], *, mla_latent_norm_eps: float | None = None,
                  source: str = "config.json") -> K3Config:  # fmt: skip
        """Read the published shape; the eps of the MLA latent norms is `rms_norm_eps` unless given or in the file.

        Raises CheckpointError with a line for every missing, wrong or unsupported field, each beginning with `source`.
        """
        text = _object(raw, "text_config", source)
        linear = _object(text, "linear_attn_config", source)
        problems = [*config_format.text_problems(raw, text, linear)]
        problems += config_format.layer_list_problems(text.get("num_hidden_layers"), linear)
        old_name = "num_experts_per_token" not in text and "num_experts_per_tok" in text
        experts = "num_experts_per_tok" if old_name else "num_experts_per_token"
        values = _take(text, {**_TEXT_KEYS, "num_experts_per_token": experts}, "text_config.", problems)
        values |= _take(linear, _LINEAR_KEYS, "linear_attn_config.", problems)
        for key in _TOKENS:
            values |= _take(raw if key in raw else text, {key: key}, "", problems)
        vision = _vision_shape(raw["vision_config"], problems) if raw.get("vision_config") is not None else None
        if mla_latent_norm_eps is not None:
            values["mla_latent_norm_eps"] = mla_latent_norm_eps
        elif "mla_latent_norm_eps" in text:
            values |= _take(text, {"mla_latent_norm_eps": "mla_latent_norm_eps"}, "text_config.", problems)
        else:
            values["mla_latent_norm_eps"] = values.get("rms_norm_eps")
        _refuse(source, problems)
        values["mla_layers"] = tuple(sorted(i - 1 for i in linear["full_attn_layers"]))
        _refuse(source, list(config_format.cross_problems(values)))
        return cls(**values, vision=vision, raw=copy.deepcopy(dict(raw)))

    @classmethod
    def from_folder(cls, folder: str | Path) -> K3Config:
        """Read `folder/config.json`. Raises CheckpointError when it is missing, is not JSON, or is unfit."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist; model.path must be a Hugging Face folder with config.json"
            ) from None
        except OSError as e:
            raise CheckpointError(f"{path} can't be read ({e.strerror}); check the path and its permissions") from None
        except json.JSONDecodeError as e:
            raise CheckpointError(f"{path}:{e.lineno}: not JSON ({e.msg}); copy the file again") from None
        except UnicodeDecodeError as e:
            raise CheckpointError(f"{path}: not UTF-8 text ({e.reason}); copy the file again") from None
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path}: holds a {type(raw).__name__}; expected the published Kimi K3 object")
        return cls.from_json(raw, source=str(path))

    def to_json(self) -> dict[str, Any]:
        """The published shape: `raw` with our values written over it, so fields we don't know survive.

        Where `raw` was never a whole file (no linear_attn_config), the published settings are filled in.
        """
        raw = config_format.completed(copy.deepcopy(dict(self.raw)))
        text = raw["text_config"]
        linear = text["linear_attn_config"]
        text.update({key: getattr(self, name) for name, key in _TEXT_KEYS.items()})
        linear.update({key: getattr(self, name) for name, key in _LINEAR_KEYS.items()})
        linear["full_attn_layers"] = [i + 1 for i in self.mla_layers]
        linear["kda_layers"] = [i + 1 for i in self.kda_layers]
        experts = [k for k in ("num_experts_per_token", "num_experts_per_tok") if k in text]
        text.update(dict.fromkeys(experts or ["num_experts_per_token"], self.num_experts_per_token))
        if "num_key_value_heads" in text:
            text["num_key_value_heads"] = self.num_attention_heads
        if "mla_latent_norm_eps" in text or self.mla_latent_norm_eps != self.rms_norm_eps:
            text["mla_latent_norm_eps"] = self.mla_latent_norm_eps
        for key in _TOKENS:
            (text if key in text and key not in raw else raw)[key] = getattr(self, key)
        if self.vision is None:
            raw.pop("vision_config", None)
        else:
            raw["vision_config"] = _vision_json(self.vision, raw.get("vision_config") or {})
        return raw


_POSITIVE = ("rms_norm_eps", "mla_latent_norm_eps", "routed_scaling_factor", "situ_beta", "situ_linear_beta")
_KINDS = {f.name: str(f.type) for f in fields(K3Config) if f.name not in ("mla_layers", "vision", "raw")}
_KINDS |= dict.fromkeys(_TOKENS, "token") | dict.fromkeys(_POSITIVE, "positive")


def _refuse(source: str, problems: list[str]) -> None:
    if problems:
        raise CheckpointError("\n".join(f"{source}: {p}" for p in problems))


def _object(owner: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    found = owner.get(key)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{source}: {key} is missing or no object; expected the published Kimi K3 layout")
    return found


def _take(found: Mapping[str, Any], keys: Mapping[str, str], where: str, problems: list[str]) -> dict[str, Any]:
    """{field: value} for `keys` {field: key in the file}; what is missing or of a wrong type goes to `problems`."""
    out = {}
    for name, key in keys.items():
        if found.get(key) is None:
            problems.append(f"{where}{key} is missing; copy config.json from the checkpoint's source")
        elif problem := config_format.field_problem(where + key, _KINDS.get(name, "int"), found[key]):
            problems.append(problem)
        else:
            out[name] = float(found[key]) if _KINDS.get(name) in ("float", "positive") else found[key]
    return out


def _vision_shape(found: Any, problems: list[str]) -> VisionShape | None:
    if not isinstance(found, Mapping):
        problems.append(
            f"vision_config is {json.dumps(found)}; expected an object, or leave it out for a text-only model"
        )
        return None
    before = len(problems)
    values = _take(found, _VISION_KEYS, "vision_config.", problems)
    merge = found.get("merge_kernel", found.get("merge_kernel_size"))
    if not isinstance(merge, list) or any(config_format.field_problem("", "int", m) for m in merge):
        problems.append(f"vision_config.merge_kernel is {json.dumps(merge)}; expected two sizes, e.g. [2, 2]")
    return None if len(problems) > before else VisionShape(**values, merge_factor=math.prod(merge))


def _vision_json(v: VisionShape, raw: Mapping[str, Any]) -> dict[str, Any]:
    out = {**raw, **{key: getattr(v, name) for name, key in _VISION_KEYS.items()}}
    key = "merge_kernel_size" if "merge_kernel_size" in raw else "merge_kernel"
    if math.prod(raw.get(key, [0])) != v.merge_factor:
        side = math.isqrt(v.merge_factor)
        out[key] = [side, side] if side * side == v.merge_factor else [1, v.merge_factor]
    return out
