"""A draft's folder: config.json and safetensors under the published names, in and out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from miles_k3.errors import CheckpointError
from miles_k3.k3.config import K3Config
from miles_k3.k3.draft_config import DraftConfig
from miles_k3.k3.draft_params import CONFIDENCE_BIAS, CONFIDENCE_WEIGHT, draft_params
from miles_k3.k3.params import DType, Param
from miles_k3.k3.safetensors_io import Checkpoint, write_checkpoint


def read_draft(folder: str | Path, target: K3Config, dtype: torch.dtype) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Config and weights, in `dtype`, of a draft of `target`.

    Raises CheckpointError for a tensor that is missing, of another shape or dtype, not finite, or that the draft has no
    place for: a reader that skips unknown names drafts noise, and nothing says so.
    """
    with _opened(folder, target) as (config, checkpoint, params):
        weights = {p.name: checkpoint.read(p).to(dtype) for p in params}
    if bad := [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]:
        raise CheckpointError(f"{folder}: tensor {bad[0]} isn't finite (of {len(bad)}); copy the file again")
    return config, weights


def check_draft(folder: str | Path, target: K3Config) -> None:
    """Whether `read_draft` would find every tensor, by config.json and headers alone. Raises CheckpointError."""
    with _opened(folder, target):
        pass


def write_draft(folder: str | Path, config: DraftConfig, weights: Mapping[str, Tensor]) -> None:
    """The folder appears whole or not at all; tensors are rounded to BF16. Raises CheckpointError when it exists."""
    write_checkpoint(
        folder, list(draft_params(config)), lambda p: weights[p.name].to(torch.bfloat16),
        extra_files={"config.json": json.dumps(config.to_json(), indent=1) + "\n"},
    )  # fmt: skip


@contextmanager
def _opened(folder: str | Path, target: K3Config) -> Iterator[tuple[DraftConfig, Checkpoint, list[Param]]]:
    config = DraftConfig.from_folder(folder)
    config.refuse_target(target, str(folder))
    with Checkpoint(folder) as checkpoint:
        params = [_as_stored(p, checkpoint) for p in draft_params(config)]
        checkpoint.require(params)
        yield config, checkpoint, params


def _as_stored(p: Param, checkpoint: Checkpoint) -> Param:
    """The confidence head may be in FP32, in which it is computed, while the rest is BF16."""
    header = checkpoint.headers.get(p.name)
    if p.name in (CONFIDENCE_WEIGHT, CONFIDENCE_BIAS) and header is not None and header.dtype == DType.F32:
        return dataclasses.replace(p, dtype=DType.F32)
    return p
