"""Stands in for a running SGLang: `backend.Backend` without it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from helpers.tiny import tiny_config

from miles_k3.rollout.sglang.backend import OnProgress, SglangGoneError
from miles_k3.types import LentAdapter

CONFIG = tiny_config()


class StandIn:
    """Answers with the tokens 0, 1, 2, ...; remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.held: asyncio.Event | None = None
        self.aborted: set[str] = set()
        self.gone = False
        self.logprob = -0.5

    async def generate(
        self, tokens: Sequence[int], sampling: Mapping[str, Any], *, request_id: str, adapter: str | None,
        routed_experts: bool, on_progress: OnProgress | None,
    ) -> Mapping[str, Any]:  # fmt: skip
        self.told.append(("generate", adapter, dict(sampling)))
        if self.held is not None:
            await self.held.wait()
        if self.gone:
            raise SglangGoneError("its processes have ended")
        out, kind = list(range(sampling["max_new_tokens"])), "length"
        rows = [(self.logprob, t, None) for t in out]
        if on_progress is not None:
            for i in range(len(out)):
                on_progress(out[: i + 1], rows[: i + 1])
        if request_id in self.aborted:
            kind = "abort"
        chosen = torch.zeros(len(tokens) + len(out) - 1, CONFIG.num_hidden_layers, 2, dtype=torch.int32)
        chosen += torch.arange(CONFIG.num_hidden_layers)[:, None]
        meta = {"finish_reason": {"type": kind}, "output_token_logprobs": rows}
        if routed_experts:
            meta["routed_experts"] = base64.b64encode(chosen.numpy().tobytes()).decode()
        return {"output_ids": out, "meta_info": meta}

    def score(self, sequences: Sequence[Sequence[int]], adapter: str | None) -> list[Mapping[str, Any]]:
        self.told.append(("score", adapter))
        return [{"input_token_logprobs": [(None, s[0], None), *((-1.0, t, None) for t in s[1:])]} for s in sequences]

    def load(self, name: str, lent: LentAdapter) -> None:
        if self.gone:
            raise SglangGoneError("its processes have ended")
        self.told.append(("load", name, lent.version))

    def unload(self, name: str) -> None:
        self.told.append(("unload", name))

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    def pause(self, mode: str) -> None:
        self.told.append(("pause", mode))

    def unpause(self) -> None:
        self.told.append(("unpause",))

    def release(self, tags: Sequence[str]) -> None:
        self.told.append(("release", *tags))

    def resume(self, tags: Sequence[str]) -> None:
        self.told.append(("resume", *tags))

    def state(self) -> Mapping[str, Any]:
        return {"last_gen_throughput": 7.0, "device": "cpu", "enable_lora": True}

    def close(self) -> None:
        self.told.append(("close",))
