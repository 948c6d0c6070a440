"""The ladder's models, adapters and recipes."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_k3.adapters.layout import adapter_layout
from miles_k3.config import Recipe
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import DType, text_params
from miles_k3.rollout.sglang.arguments import Machine, server_arguments, sglang_problems
from miles_k3.types import AdapterConfig

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
GOLDEN_SHA256 = "dae6e43841f99b7c"
GOLDEN_SHAPE = {"layers": 8, "experts": 16, "topk": 16, "hidden": 1024}
RL_SHAPE = {"layers": 4, "experts": 32, "topk": 8, "hidden": 1024, "vocab": 512}  # the tiny tokenizer's vocabulary
ADAPTER = AdapterConfig(rank=16, alpha=32.0, share_gate_up_a=False)


def checkpoint(folder: Path, shape: dict[str, int]) -> Path:
    """A K3 of random weights by the golden maker, made once."""
    if (folder / ".complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    kept = sys.argv
    sys.argv = ["make_golden_checkpoint.py", str(folder)]
    sys.argv += [part for name, value in shape.items() for part in (f"--{name}", str(value))]
    try:
        runpy.run_path(str(GOLDEN / "make_golden_checkpoint.py"))
    finally:
        sys.argv = kept
    (folder / ".complete").touch()
    return folder


def with_released_dtypes(source: Path, target: Path) -> Path:
    """The same checkpoint with each tensor in the release's dtype, which our loader insists on; made once.

    The golden maker keeps KDA's output norm in BF16.
    """
    if (target / ".complete").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", ".complete"))
    dtypes = {p.name: p.dtype for p in text_params(K3Config.from_folder(source))}
    tensors = load_file(source / "model.safetensors")
    exact = {name: t.float() if dtypes.get(name) is DType.F32 else t for name, t in tensors.items()}
    save_file(exact, target / "model.safetensors", metadata={"format": "pt"})
    (target / ".complete").touch()
    return target


def golden_checkpoint(work: Path) -> Path:
    """The golden one. Raises RuntimeError when torch drew other bytes than those that SGLang once served."""
    folder = checkpoint(work / "golden", GOLDEN_SHAPE)
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(GOLDEN_SHA256):
        raise RuntimeError(f"{folder} has sha256 {digest[:16]}, expected {GOLDEN_SHA256}: the draws have changed")
    return folder


def golden_adapter(folder: Path) -> dict[str, Tensor]:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    return runpy.run_path(str(GOLDEN / "make_golden_adapter.py"))["golden_adapter"](text)


def golden_scores(name: str) -> tuple[list[list[int]], list[list[int]], list[Tensor], list[Tensor]]:
    """(prompts, continuations, SGLang's log-probabilities of each) as an H200 gave them; `base` or `lora`."""
    raw = json.loads((GOLDEN / f"sglang_0.5.17_h200_{name}.json").read_text())
    prompt, output = ([torch.tensor(row) for row in raw[f"sglang_{part}_logprobs"]] for part in ("prompt", "output"))
    return raw["prompts"], raw["outputs"], prompt, output


def wide_model(work: Path) -> Path:
    """True widths, four layers, no weights: SGLang fills in its own (`load_format: dummy`)."""
    folder = work / "wide"
    folder.mkdir(parents=True, exist_ok=True)
    raw = json.loads((ROOT / "assets" / "k3-4layer" / "config.json").read_text())
    raw.setdefault("vision_config", {
        "model_type": "kimi_k3_vision", "patch_size": 14, "init_pos_emb_height": 4, "init_pos_emb_width": 4,
        "init_pos_emb_time": 2, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1, "vt_hidden_size": 64,
        "vt_intermediate_size": 128, "qkv_hidden_size": 64, "merge_kernel_size": [2, 2],
        "text_hidden_size": raw["text_config"]["hidden_size"], "mm_hidden_size": 64,
    })  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    return folder


def random_adapter(config: K3Config, device: str, scale: float = 0.01) -> dict[str, Tensor]:
    """A whole adapter of rank 16 on every target, drawn where it is needed."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: (torch.randn(t.shape, generator=generator, device=device) * scale).to(torch.bfloat16)
        for name, t in adapter_layout(config, ADAPTER).items()
    }


def recipe_for(model: Path, *, max_running: int, prompt: int, new: int, **sglang: Any) -> Recipe:
    """A recipe of nothing but an engine; `sglang` are keys of its section. The adapter has rank 16."""
    own = {"memory_fraction": 0.3, "state_slots": 5 * max_running + 20, **sglang}
    return Recipe.model_validate({
        "model": {"path": str(model)}, "task": {"name": "none", "max_prompt_tokens": prompt},
        "lora": {"rank": ADAPTER.rank, "alpha": ADAPTER.alpha, "share_gate_up_a": ADAPTER.share_gate_up_a},
        "rollout": {
            "engine": "sglang", "max_running": max_running, "num_pages": 4096, "prefill_chunk_tokens": 1024,
            "sampling": {"max_new_tokens": new}, "sglang": own,
        },
        "trainer": {"micro_batch_tokens": 2 * (prompt + new)},
    })  # fmt: skip


def arguments_for(recipe: Recipe, config: K3Config, **more: Any) -> dict[str, Any]:
    """SGLang's arguments. Raises RuntimeError with what stands against the recipe."""
    if problems := sglang_problems(recipe, config):
        raise RuntimeError("\n".join(problems))
    return {**server_arguments(recipe, config, Machine()), "log_level": os.environ.get("SGL_LOG", "warning"), **more}
