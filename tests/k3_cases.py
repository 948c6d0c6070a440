"""Kimi K3 in two sizes for tests: the published config.json, and a tiny model with every dimension of its own."""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import DType, Param, iter_params

PUBLISHED = Path(__file__).parents[1] / "assets" / "kimi-k3" / "config.json"


def published_json() -> dict[str, Any]:
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def published() -> K3Config:
    return K3Config.from_json(published_json())


def tiny_json(**text: Any) -> dict[str, Any]:
    """Spec 7.1's tiny-A with a one-block vision tower; `text` overrides fields of text_config."""
    raw = copy.deepcopy(published_json())
    raw.update(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    raw["text_config"].update(
        vocab_size=256, hidden_size=96, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=160, attn_res_block_size=3, num_experts=8, num_experts_per_token=2, q_lora_rank=40,
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24, moe_intermediate_size=32,
        routed_expert_hidden_size=64, max_position_embeddings=512,
    )  # fmt: skip
    raw["text_config"]["linear_attn_config"].update(
        num_heads=4, head_dim=16, full_attn_layers=[4, 7, 8], kda_layers=[1, 2, 3, 5, 6]
    )
    raw["vision_config"].update(
        vt_hidden_size=12, vt_num_hidden_layers=1, vt_intermediate_size=20, qkv_hidden_size=16, patch_size=2,
        init_pos_emb_height=3, init_pos_emb_width=5, text_hidden_size=96,
    )  # fmt: skip
    raw["text_config"].update(text)
    return raw


def tiny(**text: Any) -> K3Config:
    return K3Config.from_json(tiny_json(**text))


def large(**text: Any) -> K3Config:
    """Widths at which weights outweigh Python's own objects."""
    raw = tiny_json(hidden_size=512, num_hidden_layers=3, vocab_size=8192, intermediate_size=1024, num_experts=32,
                    moe_intermediate_size=256, routed_expert_hidden_size=256, **text)  # fmt: skip
    raw["text_config"]["linear_attn_config"].update(full_attn_layers=[3], kda_layers=[1, 2])
    del raw["vision_config"]
    return K3Config.from_json(raw)


def random_tensor(p: Param, config: K3Config, generator: torch.Generator) -> Tensor:
    """One checkpoint tensor as it could be: MXFP4 bytes, padded A_log, seeded normal numbers elsewhere."""
    if p.is_scale:
        return torch.randint(110, 131, p.shape, generator=generator, dtype=torch.uint8)
    if p.dtype is DType.U8:
        return torch.randint(0, 256, p.shape, generator=generator, dtype=torch.uint8)
    tensor = torch.randn(p.shape, generator=generator)
    if p.name.endswith("A_log"):
        tensor[config.kda_num_heads :] = 0
    return tensor.to(torch.bfloat16 if p.dtype is DType.BF16 else torch.float32)


def random_tensors(config: K3Config, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by name, vision included."""
    generator = torch.Generator().manual_seed(seed)
    return {p.name: random_tensor(p, config, generator) for p in iter_params(config)}


class OneAtATime:
    """A source of tensors that fails when it is asked for one while the memory of an earlier one still lives."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self._last, self.given = tensors, None, 0

    def get(self, p: Param) -> Tensor:
        assert self._last is None or self._last() is None, f"an earlier tensor lives while {p.name} is asked for"
        tensor = self._tensors[p.name]
        memory = tensor.contiguous().view(torch.uint8).numpy().copy()
        self._last = weakref.ref(memory)  # every view of the tensor keeps this array alive
        self.given += 1
        return torch.from_numpy(memory).view(tensor.dtype)


@contextmanager
def peak_of_anonymous_memory() -> Iterator[list[int]]:
    """Sampled growth of this process's own memory in bytes; pages of mapped files are the kernel's and don't count."""

    def anonymous() -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(text.split("RssAnon:")[1].split()[0])

    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: blocks above 1 MiB go back to the system when freed
    libc.malloc_trim(0)  # memory that was freed but kept would hide what is taken next
    start, peak, stop = anonymous(), [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.001):
            peak[0] = max(peak[0], anonymous() - start)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
