"""A small K3 that SGLang loads, and the arguments that start it on a CPU."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.k3.draft_config import DraftConfig
from miles_k3.recipe import load_recipe
from miles_k3.sglang_ladder.drafts import draft_config, write_telling_draft

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPE = {"layers": 4, "experts": 4, "topk": 2, "hidden": 256, "latent": 256, "inter": 128, "vocab": 512}
RANK = 4
CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu", "tp_size": 1, "dtype": "bfloat16", "context_length": 512, "sampling_backend": "pytorch",
    "grammar_backend": "none", "disable_cuda_graph": True, "disable_overlap_schedule": True,
    "skip_tokenizer_init": True, "enable_multimodal": False, "skip_server_warmup": True, "mem_fraction_static": 0.05,
    "max_total_tokens": 2048, "max_running_requests": 4, "max_mamba_cache_size": 16, "chunked_prefill_size": 256,
    "random_seed": 1, "enable_lora": True, "lora_backend": "torch_native", "max_lora_rank": RANK,
    "max_loras_per_batch": 3, "experts_shared_outer_loras": True, "lora_strict_loading": True,
    "lora_target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip


def write_small_k3(folder: Path) -> Path:
    """The golden checkpoint's maker at a small size: names, dtypes and packing are the release's."""
    arguments = [str(folder), *(part for name, value in SHAPE.items() for part in (f"--{name}", str(value)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_golden_checkpoint.py", *arguments])
        runpy.run_path(str(GOLDEN / "make_golden_checkpoint.py"))
    return folder


def write_small_draft(folder: Path) -> DraftConfig:
    """A draft of that K3, in the published format."""
    config = small_config()
    write_telling_draft(folder, config, [range(40)])
    return draft_config(config)


def drafted_recipe(draft: Path) -> Recipe:
    """What asks for a server of `CPU_ARGUMENTS` with a draft."""
    return load_recipe("tiny-cpu", [
        "rollout.engine=sglang", f"rollout.max_running={CPU_ARGUMENTS['max_running_requests']}", "rollout.page_size=16",
        f"rollout.num_pages={CPU_ARGUMENTS['max_total_tokens'] // 16}", f"rollout.max_lora_rank={RANK}",
        f"lora.rank={RANK}", f"rollout.sglang.state_slots={CPU_ARGUMENTS['max_mamba_cache_size']}",
        "rollout.sglang.cuda_graphs=false", f"rollout.sglang.draft={draft}",
    ]).recipe  # fmt: skip


@contextmanager
def errors_into(path: Path) -> Iterator[None]:
    """Standard error of this process, and of those started meanwhile, into a file."""
    kept = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def small_config() -> K3Config:
    """The config of `write_small_k3`'s checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        return K3Config.from_folder(write_small_k3(Path(folder)))
