"""The part of a recipe that only an SGLang engine reads. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles_k3.config_types import Fraction, PositiveInt, Section, Text


class DisaggregationSection(Section):
    """Prefill and decode in separate workers: `miles-k3 sglang-commands` prints how they are started."""

    transfer: Literal["off", "nixl", "mooncake"] = Field(
        default="off", description="How KV and states go from prefill to decode workers; off: one engine does both."
    )
    prefill_workers: PositiveInt = Field(default=1, description="Engines that only compute prompts.")
    prefill_pp: PositiveInt = Field(default=1, description="Pipeline stages of a prefill worker.")
    decode_workers: PositiveInt = Field(
        default=1, description="Engines that only decode; rollout.sglang.dcp is theirs."
    )


class SglangSection(Section):
    """How an SGLang engine spreads over its rollout.engine_tp GPUs, and what it computes with."""

    ep: PositiveInt = Field(default=1, description="Expert-parallel ranks among rollout.engine_tp.")
    dcp: PositiveInt = Field(
        default=1, description="Ranks among rollout.engine_tp that share a request's KV while it is decoded."
    )
    nodes: PositiveInt = Field(default=1, description="Machines that one engine spans.")
    attention: Literal["auto", "triton", "fa3", "flashmla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla"] = Field(
        default="auto", description="Kernels of MLA layers; auto: triton on Hopper, SGLang's choice elsewhere."
    )
    cuda_graphs: bool = Field(default=True, description="Replay decode steps from captured graphs.")
    unified_memory: bool = Field(default=False, description="One pool for KDA states and KV.")
    memory_fraction: Fraction | None = Field(
        default=None, description="GPU memory for weights and caches; null: SGLang's choice, for an engine alone."
    )
    state_slots: int = Field(
        default=0, ge=0, description="KDA states held for requests and prefixes; 0 takes 5 a running request."
    )
    draft: Text | None = Field(
        default=None,
        description="Folder of a DSpark draft; it proposes tokens for base and adapters alike. null: plain decoding.",
    )
    disaggregation: DisaggregationSection = DisaggregationSection()
