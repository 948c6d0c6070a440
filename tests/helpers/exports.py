"""A base and an adapter to export, and the bytes of a folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import iter_params
from miles_k3.k3.safetensors_io import write_checkpoint
from miles_k3.types import AdapterUpdate

SHARD_BYTES = 150_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """`weights`: every tensor of `base` by name; `update`: what `peft` holds."""

    base: Path
    peft: Path
    config: K3Config
    weights: dict[str, torch.Tensor]
    update: AdapterUpdate


def write_base(folder: Path, config: K3Config, weights: dict[str, torch.Tensor]) -> None:
    extra = {"config.json": json.dumps(config.to_json(), indent=1), "generation_config.json": "{}\n", "LICENSE": "text"}
    write_checkpoint(folder, list(iter_params(config)), lambda p: weights[p.name], shard_bytes=SHARD_BYTES,
                     extra_files=extra)  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}
