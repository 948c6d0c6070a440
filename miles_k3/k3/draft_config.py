"""DraftConfig <-> the config.json of a published DSpark draft (spec 6.1, 6.3). Imports no torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from miles_k3.errors import CheckpointError
from miles_k3.k3.config import K3Config
from miles_k3.k3.config_format import field_problem

_NESTED = ("dspark_config", "dflash_config")
# field of DraftConfig -> its spellings, the one that is written first
_KEYS: Mapping[str, tuple[str, ...]] = {
    name: (name,)
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
                 "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings")
}  # fmt: skip
_DRAFT_KEYS: Mapping[str, tuple[str, ...]] = {
    "block_size": ("block_size",),
    "markov_rank": ("markov_rank",),
    "mask_token_id": ("mask_token_id",),
    "use_confidence_head": ("enable_confidence_head", "use_confidence_head"),
}
_TARGET_LAYERS = ("num_target_layers",)
_IN_DFLASH = ("mask_token_id", "target_layer_ids")
# What the file may say only so, and what it means where it says nothing.
_ONLY: Mapping[str, tuple[tuple[str, ...], Any]] = {
    "markov_head_type": (("markov_head_type",), "vanilla"),
    "confidence_head_with_markov": (("confidence_head_with_markov",), True),
    "sample_from_anchor": (("sample_from_anchor",), True),
    "hidden_act": (("hidden_act",), "silu"),
    "attention_bias": (("attention_bias",), False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN's stretching of the rotation; `attention_factor` None takes 0.1 ln(factor) + 1."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A DSpark draft of the Qwen3 kind: dense GQA layers, embedding and output head of its target.

    `target_layer_ids`: layers of the target, 0-based, after which its AttnRes mixtures are tapped. `num_target_layers`:
    how many the target has; SGLang takes the draft's own number where the file doesn't say, and refuses the taps beyond
    it. `raw` is the JSON as read, unknown fields included; `to_json` gives it back with our fields written over it.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    block_size: int
    markov_rank: int
    mask_token_id: int
    use_confidence_head: bool
    target_layer_ids: tuple[int, ...]
    rope_theta: float = 10000.0
    yarn: Yarn | None = None
    num_target_layers: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if problems := list(_cross_problems(self)):
            raise CheckpointError("\n".join(f"DraftConfig: {p}" for p in problems))

    @property
    def tap_width(self) -> int:
        """Numbers that the target hands over for one token."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def context_width(self) -> int:
        """Numbers that the draft itself keeps of one token: keys and values of all its layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def refuse_target(self, target: K3Config, source: str) -> None:
        """Raises CheckpointError unless the draft can read `target`'s taps, embedding and head."""
        problems = [
            f"{name} is {getattr(self, name)}, the target's is {getattr(target, name)}; take the draft of this target"
            for name in ("hidden_size", "vocab_size")
            if getattr(self, name) != getattr(target, name)
        ]
        problems += [
            f"target_layer_ids has {layer}, the target's layers are 0..{target.num_hidden_layers - 1}; take the draft "
            "of this target"
            for layer in self.target_layer_ids
            if layer >= target.num_hidden_layers
        ]
        _refuse(source, problems)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], source: str = "config.json") -> DraftConfig:
        """Read the published shape, under any of the spellings that its readers know.

        Raises CheckpointError with a line for every missing, wrong or unsupported field, each beginning with `source`.
        """
        problems: list[str] = []
        values = _take(raw, problems)
        problems += _unsupported(raw)
        values["target_layer_ids"] = _tap_layers(raw, problems)
        values["rope_theta"], values["yarn"] = _rope(raw, problems)
        if (layers := _value(raw, _TARGET_LAYERS)) is not None:
            values["num_target_layers"] = layers
            problems += [problem] if (problem := field_problem("num_target_layers", "int", layers)) else []
        _refuse(source, problems)
        try:
            return cls(**values, raw=copy.deepcopy(dict(raw)))
        except CheckpointError as e:
            raise CheckpointError(str(e).replace("DraftConfig", source)) from None

    @classmethod
    def from_folder(cls, folder: str | Path) -> DraftConfig:
        """Read `folder/config.json`. Raises CheckpointError when it is missing, is not JSON, or is unfit."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; a draft is a folder with config.json and tensors") from None
        except OSError as e:
            raise CheckpointError(f"{path} can't be read ({e.strerror}); check the path and its permissions") from None
        except ValueError as e:
            raise CheckpointError(f"{path}: not JSON ({e}); copy the file again") from None
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path}: holds a {type(raw).__name__}; expected the object of a DSpark draft")
        return cls.from_json(raw, str(path))

    def to_json(self) -> dict[str, Any]:
        """The published shape: `raw` with our values written over it, each where `raw` has it."""
        raw = copy.deepcopy(dict(self.raw)) or {
            "architectures": ["DSparkDraftModel"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_act": "silu",
            "attention_bias": False, "markov_head_type": "vanilla", "confidence_head_with_markov": True,
            "tie_word_embeddings": False, "layer_types": ["full_attention"] * self.num_hidden_layers,
            "dflash_config": {},
        }  # fmt: skip
        for name, keys in {**_KEYS, **_DRAFT_KEYS, "target_layer_ids": ("target_layer_ids",)}.items():
            value = getattr(self, name)
            owner, key = next(_places(raw, keys), (None, keys[0]))
            if owner is None:
                owner = raw.setdefault("dflash_config", {}) if name in _IN_DFLASH else raw
            owner[key] = list(value) if isinstance(value, tuple) else value
        if self.num_target_layers is not None:
            owner, key = next(_places(raw, _TARGET_LAYERS), (raw, "num_target_layers"))
            owner[key] = self.num_target_layers
        if not self.raw or _rope(raw, []) != (self.rope_theta, self.yarn):
            for old in ("rope_theta", "rope_scaling"):
                raw.pop(old, None)
            raw["rope_parameters"] = self._rope_json()
        return raw

    def _rope_json(self) -> dict[str, Any]:
        if self.yarn is None:
            return {"rope_type": "default", "rope_theta": self.rope_theta}
        values = {f.name: getattr(self.yarn, f.name) for f in fields(Yarn)}
        known = {key: value for key, value in values.items() if value is not None}
        return {"rope_type": "yarn", "rope_theta": self.rope_theta, **known}


def _places(raw: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    """(owner, key) of everywhere a value is found, the first one first: dspark_ keys, nested objects, plain keys."""
    for key in keys:
        if raw.get(f"dspark_{key}") is not None:
            yield raw, f"dspark_{key}"
    for owner in (*(raw.get(name) for name in _NESTED), raw):
        for key in keys:
            if isinstance(owner, Mapping) and owner.get(key) is not None:
                yield owner, key


def _value(raw: Mapping[str, Any], keys: tuple[str, ...], default: Any = None) -> Any:
    owner, key = next(_places(raw, keys), (None, ""))
    return default if owner is None else owner[key]


def _take(raw: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    out = {}
    for name, keys in {**_KEYS, **_DRAFT_KEYS}.items():
        kind = {"rms_norm_eps": "positive", "use_confidence_head": "bool", "mask_token_id": "token"}.get(name, "int")
        value = _value(raw, keys)
        if value is None:
            problems.append(f"{keys[0]} is missing; copy config.json from the draft's source")
        elif problem := field_problem(keys[0], kind, value):
            problems.append(problem)
        else:
            out[name] = float(value) if kind == "positive" else value
    return out


def _unsupported(raw: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, (keys, only) in _ONLY.items():
        if (found := _value(raw, keys, only)) != only:
            problems.append(f"{name} is {json.dumps(found)}; only {json.dumps(only)} is supported")
    if raw.get("model_type", "qwen3") != "qwen3":
        problems.append(
            f'model_type is {json.dumps(raw["model_type"])}; only "qwen3" (dense GQA layers, as RadixArk publishes '
            "them) is supported, not drafts with MLA layers"
        )
    if strange := sorted({str(kind) for kind in raw.get("layer_types") or ()} - {"full_attention"}):
        problems.append(f"layer_types has {', '.join(strange)}; only full_attention is supported")
    return problems


def _tap_layers(raw: Mapping[str, Any], problems: list[str]) -> tuple[int, ...]:
    found = _value(raw, ("target_layer_ids",))
    whole = isinstance(found, list) and found and all(type(i) is int and i >= 0 for i in found)
    if whole and len(set(found)) == len(found):
        return tuple(found)
    problems.append(f"target_layer_ids is {json.dumps(found)}; expected different layers, counted from 0")
    return ()


def _rope(raw: Mapping[str, Any], problems: list[str]) -> tuple[float, Yarn | None]:
    """The base of the rotation and its stretching, from rope_parameters or the older rope_theta and rope_scaling."""
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        problems.append(f"rope_parameters is {json.dumps(found)}; expected an object")
        return 0.0, None
    theta = found.get("rope_theta", raw.get("rope_theta", 10000.0))
    if problem := field_problem("rope_theta", "positive", theta):
        problems.append(problem)
        return 0.0, None
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return float(theta), None
    known = {f.name for f in fields(Yarn)}
    strange = sorted(key for key in set(found) - known - {"rope_theta", "rope_type", "type"} if found[key] is not None)
    if kind != "yarn" or strange:
        asked = f"rope_type {json.dumps(kind)}" if kind != "yarn" else f"{', '.join(strange)} of yarn"
        problems.append(f"{asked} is not supported; only default and yarn with {', '.join(sorted(known))} are")
        return float(theta), None
    values = {key: found[key] for key in known if found.get(key) is not None}
    for key in ("factor", "original_max_position_embeddings"):
        if key not in values:
            problems.append(f"{key} of yarn is missing; copy config.json from the draft's source")
    problems += [p for key, value in values.items() if (p := field_problem(key, "positive", value))]
    return float(theta), None if problems else Yarn(**values)


def _cross_problems(c: DraftConfig) -> Iterator[str]:
    if c.num_attention_heads % c.num_key_value_heads:
        yield f"num_attention_heads {c.num_attention_heads} is no multiple of {c.num_key_value_heads} key-value heads"
    if c.head_dim % 2:
        yield f"head_dim is {c.head_dim}; rotation needs an even one"
    if c.mask_token_id >= c.vocab_size:
        yield f"mask_token_id is {c.mask_token_id}, beyond the vocabulary of {c.vocab_size}"
    if not c.target_layer_ids:
        yield "target_layer_ids is empty; a draft reads at least one layer of its target"


def _refuse(source: str, problems: list[str]) -> None:
    if problems:
        raise CheckpointError("\n".join(f"{source}: {p}" for p in problems))
