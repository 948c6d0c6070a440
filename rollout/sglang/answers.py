"""Requests and answers in SGLang's words, and back. Imports nothing of SGLang."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from miles_k3.errors import EngineError
from miles_k3.k3.config import K3Config
from miles_k3.types import FinishReason, SamplingParams


def sampling_dict(params: SamplingParams) -> dict[str, Any]:
    """SGLang's sampling parameters.

    It ends at the model's own end token too, unless there are no stop tokens at all; stop strings are not its affair,
    since it has no tokenizer here. Raises EngineError on what it would answer with other log-probabilities than ours.
    """
    if params.top_p < 1.0 or params.top_k > 0:
        raise EngineError(
            f"top_p is {params.top_p} and top_k {params.top_k}, but SGLang's log-probabilities leave both out; set "
            "rollout.sampling.top_p: 1.0 and rollout.sampling.top_k: 0, or rollout.engine: embedded"
        )
    return {
        "temperature": params.temperature, "top_p": 1.0, "top_k": -1, "max_new_tokens": params.max_new_tokens,
        "stop_token_ids": list(params.stop_token_ids) or None, "ignore_eos": not params.stop_token_ids,
    }  # fmt: skip


def finish_reason(meta: Mapping[str, Any]) -> FinishReason:
    """Why a generation ended. Raises EngineError on a reason that we don't know."""
    reason = meta.get("finish_reason") or {}
    kinds = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
    kind = kinds.get(reason.get("type", ""))
    if kind is None:
        raise EngineError(f"SGLang ended a request for {reason!r}, expected one of {sorted(kinds)}")
    return kind


def output_logprobs(meta: Mapping[str, Any], tokens: Sequence[int]) -> tuple[float, ...]:
    """One for each token. Raises EngineError when SGLang's belong to other tokens."""
    rows = meta.get("output_token_logprobs") or []
    if [int(row[1]) for row in rows] != list(tokens):
        raise EngineError(
            f"SGLang gave {len(rows)} log-probabilities for {len(tokens)} tokens, or for other ones; expected one each"
        )
    return tuple(float(row[0]) for row in rows)


def input_logprobs(meta: Mapping[str, Any], sequence: Sequence[int]) -> torch.Tensor:
    """fp32 [len - 1]: those of tokens 1.. of a sequence. Raises EngineError when they belong to other tokens."""
    rows = (meta.get("input_token_logprobs") or [])[-(len(sequence) - 1) :]
    if [int(row[1]) for row in rows] != list(sequence[1:]) or any(row[0] is None for row in rows):
        raise EngineError(
            f"SGLang scored {len(rows)} tokens of a sequence of {len(sequence)}, or other ones; expected all but the "
            "first"
        )
    return torch.tensor([float(row[0]) for row in rows])


def routed_experts(meta: Mapping[str, Any], num_tokens: int, config: K3Config) -> torch.Tensor:
    """int16 [tokens - 1, MoE layers, K] from SGLang's base64 of int32 [tokens - 1, layers, K].

    Raises EngineError when it has another size.
    """
    raw = base64.b64decode(meta.get("routed_experts") or "")
    k, layers = config.num_experts_per_token, config.num_hidden_layers
    expected = (num_tokens - 1) * layers * k * 4
    if len(raw) != expected:
        raise EngineError(
            f"SGLang gave {len(raw)} bytes of routed experts, expected {expected} for {num_tokens - 1} tokens, "
            f"{layers} layers and {k} experts: is the hook expert_capture in, and enable_return_routed_experts on?"
        )
    chosen = torch.frombuffer(bytearray(raw), dtype=torch.int32).view(num_tokens - 1, layers, k)
    chosen = chosen[:, list(config.moe_layers)]
    if chosen.numel() and not (int(chosen.min()) >= 0 and int(chosen.max()) < config.num_experts):
        raise EngineError(
            f"SGLang named experts {int(chosen.min())} to {int(chosen.max())}; the model has {config.num_experts}"
        )
    return chosen.to(torch.int16)
