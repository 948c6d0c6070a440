"""Bytes of the frozen base and of the adapter that one rank holds, from the parameter table. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from math import prod

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import DType, Param, Part, expert_params, layer_params, text_params

FP32 = 4
ADAPTER_ROWS, ADAPTER_COLUMNS = 1, 0  # dimension of a weight that its ranks split: input, output


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank holds of the model: layers, experts of each, and a `tp`-th of what tensor parallelism splits.

    `embedding`, `head`: whether it holds the first and the last layer's neighbours.
    """

    layers: Sequence[int]
    experts: int
    tp: int
    embedding: bool
    head: bool

    @classmethod
    def whole(cls, c: K3Config) -> Share:
        return cls(layers=range(c.num_hidden_layers), experts=c.num_experts, tp=1, embedding=True, head=True)


@dataclass(frozen=True, slots=True)
class BaseBytes:
    """`experts`: routed ones as they are held; `dense`: everything else. `gate_up`: fused gate and up weights in it;
    `layer_codes`: packed codes and scales of one layer's experts, and `layer_experts` what is held of that layer."""

    experts: int
    dense: int
    gate_up: int
    layer_codes: int
    layer_experts: int

    @property
    def total(self) -> int:
        return self.experts + self.dense


def base_bytes(c: K3Config, share: Share, *, itemsize: int, packed: bool) -> BaseBytes:
    """The resident base of a rank: experts packed or unpacked to `itemsize`, float32 tensors as they are."""
    dense = gate_up = 0
    for p in dense_params(c, share):
        size = prod(_held_shape(c, p)) * (FP32 if p.dtype is DType.F32 else itemsize)
        size //= share.tp if p.tp_dim is not None else 1
        dense += size
        if p.part in (Part.DENSE, Part.SHARED) and not p.module.endswith("down_proj"):
            gate_up += size
    moe = sum(c.is_moe(layer) for layer in share.layers)
    one = list(expert_params(c, c.moe_layers[0], 0)) if c.moe_layers else []
    codes = share.experts * sum(p.num_bytes for p in one)
    held = codes if packed else share.experts * sum(p.num_params for p in one) * itemsize
    return BaseBytes(held * moe, dense, gate_up, codes if moe else 0, held if moe else 0)


def dense_params(c: K3Config, share: Share) -> Iterator[Param]:
    """The rows of the table that are no routed experts, of a rank's share."""
    for p in takewhile(lambda p: p.layer is None, text_params(c)):
        if share.embedding if p.part is Part.EMBED else share.head:
            yield p
    for layer in share.layers:
        yield from _outside_experts(c, layer)


@lru_cache(maxsize=1024)
def _outside_experts(c: K3Config, layer: int) -> tuple[Param, ...]:
    return tuple(takewhile(lambda p: p.part is not Part.EXPERT, layer_params(c, layer)))


def _held_shape(c: K3Config, p: Param) -> tuple[int, ...]:
    return (c.kda_num_heads,) if p.name.endswith("A_log") else p.shape  # without its padding


@dataclass(frozen=True, slots=True)
class AdapterNumbers:
    """Trained numbers of a rank: `dense` ones are copied over data- and context-parallel ranks, per-`expert` ones over
    the ranks that hold the same experts. `largest`: of one factor."""

    dense: int
    expert: int
    largest: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def adapter_numbers(c: K3Config, share: Share, rank: int, *, one_gate_up_a: bool) -> AdapterNumbers:
    """Factors of every weight that the table marks (spec 5.1): A [r, in], B [out, r]; a factor follows its weight's
    split, and what experts share is whole on each rank. `one_gate_up_a`: gate and up have one A, as in the trainer."""
    dense = expert = largest = 0
    for layer in share.layers:
        for p in (p for p in _outside_experts(c, layer) if p.lora):
            rows, cols = p.shape
            twin = one_gate_up_a and p.module.endswith("up_proj")
            a = 0 if twin else rank * cols // (share.tp if p.tp_dim == ADAPTER_ROWS else 1)
            b = rank * rows // (share.tp if p.tp_dim == ADAPTER_COLUMNS else 1)
            dense, largest = dense + a + b, max(largest, a, b)
        if c.is_moe(layer):
            latent, inner = c.routed_expert_hidden_size, c.moe_intermediate_size
            dense += 3 * rank * latent
            expert += 3 * share.experts * rank * inner
            largest = max(largest, share.experts * rank * inner)
    return AdapterNumbers(dense, expert, largest)
