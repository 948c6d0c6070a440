"""An adapter read a part at a time, whatever holds it, and the hash of what it computes.

The hash covers rank, alpha, and each exported tensor's name, dtype, shape and checksum; neither the version nor how the
tensors lie in files, so that a copy in another layout has the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from miles_k3.adapters.checksum import hash_table, streamed_checksum
from miles_k3.adapters.layout import AdapterTensor
from miles_k3.adapters.update import adapter_sha256
from miles_k3.types import AdapterConfig

CONTENT_SHA256 = "miles_k3.content_checksums_sha256"  # in the metadata of adapter_model.safetensors


class AdapterSource(Protocol):
    """A whole adapter, judged by its headers, whose tensors are read when they are asked for."""

    @property
    def config(self) -> AdapterConfig: ...

    @property
    def layout(self) -> Mapping[str, AdapterTensor]: ...

    def dtype(self, name: str) -> torch.dtype:
        """That of an exported tensor."""
        ...

    def read(self, name: str, expert: int = 0) -> Tensor:
        """An exported tensor; of a routed-expert one the 2-D part of `expert`."""
        ...


def parts(t: AdapterTensor) -> range:
    """The experts whose 2-D parts make up an exported tensor; one where it has none, or where they share it."""
    return range(t.shape[0] if t.kind == "expert" else 1)


def content_sha256(config: AdapterConfig, tensors: Mapping[str, Tensor]) -> str:
    """The hash of whole tensors."""
    return adapter_sha256(0, dataclasses.replace(config, share_gate_up_a=True), tensors)


def streamed_sha256(source: AdapterSource, seen: Callable[[AdapterTensor, int, Tensor], None]) -> str:
    """The same hash, with one part in memory at a time; each is shown to `seen` on its way."""

    def pieces(t: AdapterTensor) -> Iterator[Tensor]:
        for expert in parts(t):
            part = source.read(t.name, expert)
            seen(t, expert, part)
            yield part

    table = {
        t.name: (str(source.dtype(t.name)), list(t.shape), streamed_checksum(pieces(t))) for t in source.layout.values()
    }
    return hash_table(0, dataclasses.replace(source.config, share_gate_up_a=True), table)
