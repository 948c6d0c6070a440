"""An engine over two ranks, as if on a machine each: it starts, takes an adapter, and holds what is planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.sglang_cpu import CPU_ARGUMENTS, RANK
from helpers.tiny import tiny_adapter

from miles_k3.k3.config import K3Config
from miles_k3.plan.engine import BF16, kv_bytes_per_token, state_bytes
from miles_k3.plan.sglang import SLOTS, Split, slot_numbers, weight_bytes
from miles_k3.plan.weights import Share, base_bytes
from miles_k3.rollout.sglang.hooks import hook_names
from miles_k3.types import AdapterConfig

HERE = Path(__file__).parent
SPLIT = Split(tp=2, ep=2)
ADAPTER = AdapterConfig(rank=RANK, alpha=8.0)


def check_slot(held: dict[str, dict[int, torch.Tensor]], rank: int, config: K3Config) -> None:
    """Of the routed experts a rank's slot has its own half, gate above up, B scaled."""
    tensors = {name: t.to(torch.bfloat16) for name, t in tiny_adapter(config, ADAPTER).items()}
    half = config.num_experts // 2
    own = slice(rank * half, (rank + 1) * half)
    for layer in config.moe_layers:
        prefix = f"language_model.model.layers.{layer}.block_sparse_moe.experts."
        up, gate, down = ([tensors[f"{prefix}w{n}.lora_{f}.weight"] for f in "AB"] for n in (3, 1, 2))
        assert torch.equal(held["A.down_proj_moe"][layer], down[0][own])
        assert torch.equal(held["B.down_proj_moe"][layer], down[1] * ADAPTER.scaling)
        assert torch.equal(held["A.gate_up_proj_moe"][layer], torch.cat([gate[0], up[0]], dim=1))
        assert torch.equal(
            held["B.gate_up_proj_moe"][layer], torch.cat([gate[1][own], up[1][own]], dim=1) * ADAPTER.scaling
        )


def test_it_starts_takes_an_adapter_and_ends_whole(tmp_path: Path, config: K3Config) -> None:
    """Each rank reads its own shard by a handle, the second one's from another process, and has it in its slot."""
    paths = os.pathsep.join([str(HERE / "stubs"), str(HERE.parent), str(HERE.parents[1])])
    environment = {
        **os.environ, "PYTHONPATH": paths, "SGLANG_CPU_OMP_THREADS_BIND": "0|1", "GLOO_SOCKET_IFNAME": "lo",
        "SGLANG_CPU_SLOTS": str(tmp_path),
    }  # fmt: skip
    script = HERE / "two_ranks.py"
    ended = subprocess.run(
        [sys.executable, script, tmp_path / "k3"], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert found["hooks"] == list(hook_names())
    for rank in range(2):
        check_slot(torch.load(tmp_path / f"{rank}.pt"), rank, config)
    held = found["bytes"]
    assert held["adapter slots"] == SLOTS * slot_numbers(config, RANK, SPLIT) * BF16
    assert held["states"] == (CPU_ARGUMENTS["max_mamba_cache_size"] + 1) * state_bytes(config, BF16, SPLIT.tp)
    assert held["kv"] == (CPU_ARGUMENTS["max_total_tokens"] + 1) * kv_bytes_per_token(config, BF16)
    experts = base_bytes(config, Share.whole(config), itemsize=BF16, packed=True).experts
    assert held["weights"] == pytest.approx(weight_bytes(config, SPLIT) - experts // SPLIT.tp, rel=0.002)
