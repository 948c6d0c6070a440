"""Base and adapter in, the export's tensors out, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from miles_k3.adapters.content import AdapterSource
from miles_k3.adapters.layout import split_expert, tensor_name
from miles_k3.adapters.update import is_finite
from miles_k3.errors import CheckpointError
from miles_k3.export.rounding import Losses, bf16_loss, mxfp4_loss
from miles_k3.k3.config import K3Config
from miles_k3.k3.ops import mxfp4
from miles_k3.k3.params import Param, Part, iter_params
from miles_k3.k3.safetensors_io import Checkpoint

Target = Literal["bf16", "mxfp4"]
ROWS_NUMBERS = 1 << 20  # numbers merged at a time: 4 MB of float32, a dozen of which are alive


class Merger:
    """W + (alpha / r) B A, summed in float32 and rounded once; tensors without a delta pass through bit by bit.

    `losses` holds what rounding cost in the tensors since it was last taken.
    """

    def __init__(self, base: Checkpoint, config: K3Config, adapter: AdapterSource, target: Target) -> None:
        self._base, self._adapter, self._target = base, adapter, target
        self._stored = {p.name: p for p in base.present(base.table(config))}
        self._config = config
        self.losses = Losses()
        self._scales: tuple[str, list[Tensor]] = ("", [])

    def params(self) -> Iterator[Param]:
        """The tensors of the export, in model order; a vision tower only where the base has one."""
        table = iter_params(self._config, packed=self._target == "mxfp4")
        return (p for p in table if p.part is Part.EXPERT or p.name in self._stored)

    def pieces(self, p: Param) -> Iterator[Tensor]:
        """The rows of one tensor, some at a time. A weight_scale must be asked for right after its weight_packed."""
        module, expert = split_expert(p.module)
        if p.name.endswith(".weight_scale"):
            made_for, scales = self._scales
            assert made_for == p.module, f"{p.name} was asked for without its codes"
            yield from scales
        elif tensor_name(module, "A") not in self._adapter.layout:
            yield self._base.read(self._stored[p.name])
        else:
            yield from self._merged(p, module, expert or 0)

    def _merged(self, p: Param, module: str, expert: int) -> Iterator[Tensor]:
        a, b = (self._adapter.read(tensor_name(module, factor), expert) for factor in ("A", "B"))
        a = a.float()
        self._scales = (p.module, [])
        rows, cols = p.logical_shape or p.shape
        step = max(1, ROWS_NUMBERS // cols)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            base = self._rows(p, part)
            delta = (b[part].float() @ a).mul_(self._adapter.config.scaling)
            merged = base + delta
            if not is_finite(merged) or (p.quantised and float(merged.abs().max()) > mxfp4.LARGEST):
                raise CheckpointError(
                    f"{self._base.where(self._stored_name(p))}: with the adapter it holds NaN, infinity or more than "
                    f"{mxfp4.LARGEST:.3g}, so it can't be written; copy the base again, or export a healthy step"
                )
            if p.quantised:
                stored, scale = mxfp4.quantize(merged, least_error=True)
                self._scales[1].append(scale)
                self.losses.note(p.part.value, mxfp4_loss(base, delta, stored, scale))
            else:
                stored = merged.to(torch.bfloat16)
                self.losses.note(p.part.value, bf16_loss(base, delta, stored.float()))
            yield stored

    def _stored_name(self, p: Param) -> str:
        """The base's tensor of the same weight, which may be packed where the export's is not."""
        packed = f"{p.module}.weight_packed"
        return packed if packed in self._stored else f"{p.module}.weight"

    def _rows(self, p: Param, part: slice) -> Tensor:
        """Rows of the base's weight in float32."""
        stored = self._base.read(self._stored[self._stored_name(p)])[part]
        if stored.dtype != torch.uint8:
            return stored.float()
        return mxfp4.dequantize(stored, self._base.read(self._stored[f"{p.module}.weight_scale"])[part])
