"""Steps at K3's true widths, four layers, dummy weights: what a decode step and a swap of a large adapter cost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from miles_k3.k3.config import K3Config
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.sglang_ladder import golden, measures
from miles_k3.sglang_ladder.models import ADAPTER, arguments_for, random_adapter, recipe_for, wide_model
from miles_k3.sglang_ladder.report import Report

BATCHES = (1, 8, 64)
BASE_MS = {1: 2.76, 8: 3.00, 64: 6.5}  # measured without LoRA, with CUDA graphs, on an H200
RATIO, SWAP_S = 1.35, 0.15


@contextmanager
def wide_engine(work: Path, report: Report, *, lora: bool) -> Iterator[tuple[SglangEngine, K3Config]]:
    folder = wide_model(work)
    config = K3Config.from_folder(folder)
    recipe = recipe_for(folder, max_running=64, prompt=256, new=128, memory_fraction=0.6)
    arguments = arguments_for(recipe, config, load_format="dummy")
    if not lora:
        arguments = {k: v for k, v in arguments.items() if "lora" not in k}
    start = time.monotonic()
    backend = golden.started(arguments, config)
    report.note(start_s=round(time.monotonic() - start, 1), gpu_bytes_in_use=_used_bytes())
    engine = SglangEngine(
        backend, config, tokenizer=None, adapter_config=ADAPTER, max_lora_rank=ADAPTER.rank,
        max_sequence_tokens=384,
    )  # fmt: skip
    try:
        yield engine, config
    finally:
        engine.close()


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + 13 * j) % 150_000 + 100 for j in range(64)] for i in range(count)]


def wide_base(work: Path, report: Report) -> None:
    """Without LoRA: the yardstick, again on this machine."""
    with wide_engine(work, report, lora=False) as (engine, _):
        _decode(engine, report, "base", None, limited=False)


def wide_lora(work: Path, report: Report) -> None:
    """Rank 16 on all targets, experts included, CUDA graphs on."""
    with wide_engine(work, report, lora=True) as (engine, config):
        tensors = random_adapter(config, "cuda")
        report.note(adapter_bytes=sum(t.numel() * t.element_size() for t in tensors.values()))
        engine.load_adapter(measures.next_update(engine, ADAPTER, tensors))
        with report.part("decode with the adapter"):
            _decode(engine, report, "lora", None)
        with report.part("swap"):
            swaps = measures.swap_seconds(
                engine, lambda: measures.next_update(engine, ADAPTER, tensors), prompts(1)[0], 5
            )
            report.note(swap=swaps)
            both = swaps["load_s"] + swaps["first_token_s"]
            report.check("swap of the adapter with the first token, s", both, limit=SWAP_S)
        with report.part("decode of the base beside it"):
            _decode(engine, report, "base_requests", -1)


def wide_lora_blocks(work: Path, report: Report) -> None:
    """The same with SGLang's own LoRA kernels for the experts, to compare with."""
    os.environ["MILES_K3_SGLANG_ROW_LORA"] = "0"  # read in SGLang's processes, which inherit it
    with wide_engine(work, report, lora=True) as (engine, config):
        engine.load_adapter(measures.next_update(engine, ADAPTER, random_adapter(config, "cuda")))
        _decode(engine, report, "blocks", None, limited=False)


def _decode(engine: SglangEngine, report: Report, name: str, version: int | None, *, limited: bool = True) -> None:
    """Milliseconds of a decode step at each batch, told one by one."""
    found = {}
    for batch in BATCHES:
        found[batch] = measures.decode_step_ms(engine, prompts(batch), version)
        report.note(**{f"decode_ms_{name}": dict(found)})
        if limited:
            report.check(
                f"decode step, {name}, batch {batch}, ms", found[batch]["median"], limit=RATIO * BASE_MS[batch]
            )


def _used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free
