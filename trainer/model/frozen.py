"""Megatron's parallel layers over the resident base's own tensors: no second copy, no weight gradient.

Shape legend: T tokens, I in, O out.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import Param, Part, layer_params, text_params
from miles_k3.k3.weights import ResidentBase
from miles_k3.trainer.mcore import (
    ColumnParallelLinear,
    RowParallelLinear,
    TransformerConfig,
    VocabParallelEmbedding,
    parallel_state,
    set_tensor_model_parallel_attributes,
)
from miles_k3.trainer.model.elementwise import rms_norm


class Column(ColumnParallelLinear):
    """Output split over the tensor-parallel ranks. [T, I] -> [T, O / tp]."""

    def forward(self, input_: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(input_)[0]


class Row(RowParallelLinear):
    """Input split over the tensor-parallel ranks, output summed. [T, I / tp] -> [T, O]."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs["tp_group"] = self.tp_group  # the stock class passes None here, which warns at every call
        return super()._forward_impl(input, weight, *args, **kwargs)

    def forward(self, input_: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(input_)[0]


class Duplicated(nn.Module):
    """The same weight on every tensor-parallel rank (TransformerEngine's "duplicated" mode). [T, I] -> [T, O]."""

    def __init__(self, weight: Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight)


class RmsNorm(nn.Module):
    """[..., D] -> [..., D]."""

    def __init__(self, weight: Parameter, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class FrozenWeights:
    """Builds modules whose weights are the resident base's tensors, split as the parameter table says."""

    def __init__(self, base: ResidentBase, k3: K3Config, config: TransformerConfig):
        self.base, self.k3, self.config = base, k3, config
        self.tp_group: Any = parallel_state.get_tensor_model_parallel_group()

    def parameter(self, name: str) -> Parameter:
        """A frozen parameter over the base's storage."""
        return Parameter(self.base[name], requires_grad=False)

    def norm(self, module: str, eps: float | None = None) -> RmsNorm:
        return RmsNorm(self.parameter(module + ".weight"), self.k3.rms_norm_eps if eps is None else eps)

    def linear(self, module: str) -> nn.Module:
        """Column-parallel, row-parallel or duplicated, as the table's split dimension says."""
        name = module + ".weight"
        return self._linear(self.parameter(name), self._param(name).tp_dim)

    def gate_up(self, prefix: str) -> nn.Module:
        """The fused [2F, H] weight of a dense or shared MLP, gate half first."""
        weight = Parameter(self.base.gate_up[prefix], requires_grad=False)
        return self._linear(weight, self._param(prefix + "gate_proj.weight").tp_dim)

    def embedding(self, name: str) -> VocabParallelEmbedding:
        weight = self.parameter(name)
        with torch.device("meta"):  # megatron allocates a weight, which is replaced before it holds any memory
            module = VocabParallelEmbedding(*weight.shape, init_method=_never, config=self.config,
                                            tp_group=self.tp_group)  # fmt: skip
        return _with_weight(module, weight, 0)

    def _linear(self, weight: Parameter, tp_dim: int | None) -> nn.Module:
        if tp_dim is None:
            return Duplicated(weight)
        rows, cols = weight.shape
        common: dict[str, Any] = {
            "config": self.config, "init_method": _never, "bias": False, "tp_group": self.tp_group
        }  # fmt: skip
        with torch.device("meta"):
            if tp_dim == 0:
                module = Column(cols, rows, **common)
            else:
                module = Row(cols, rows, input_is_parallel=True, skip_bias_add=False, **common)
        return _with_weight(module, weight, tp_dim)

    def _param(self, name: str) -> Param:
        """The table's row of a tensor outside the routed experts."""
        if not hasattr(self, "_table"):
            table: dict[str, Param] = {p.name: p for p in takewhile(lambda p: p.layer is None, text_params(self.k3))}
            for layer in range(self.k3.num_hidden_layers):
                dense = takewhile(lambda p: p.part is not Part.EXPERT, layer_params(self.k3, layer))
                table.update((p.name, p) for p in dense)
            self._table = table
        return self._table[name]


def _with_weight(module: Any, weight: Parameter, tp_dim: int) -> Any:
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=tp_dim, stride=1)
    module.weight = weight
    return module


def _never(_: Tensor) -> None:
    raise AssertionError("frozen weights come from the resident base and are never initialised")
