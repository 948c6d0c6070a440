"""Megatron's parallel layers over the resident base's own tensors: no second copy, no weight gradient.

Shape legend: T tokens, I in, O out.
"""

from __future__ import annotations

import copy
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import Param, Part, layer_params, text_params
from miles_k3.k3.weights import ExpertBank, ResidentBase
from miles_k3.trainer.distributed import Ranks
from miles_k3.trainer.mcore import (
    ColumnParallelLinear,
    RowParallelLinear,
    TransformerConfig,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from miles_k3.trainer.model.elementwise import rms_norm


class Column(ColumnParallelLinear):
    """Output split over the tensor-parallel ranks. [T, I] -> [T, O / tp].

    The gradient of the input is this rank's part only: `collectives.enter` sums it once for a whole sublayer.
    """

    def forward(self, input_: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(input_)[0]


class Row(RowParallelLinear):
    """Input split over the tensor-parallel ranks. [T, I / tp] -> [T, O], this rank's part of the sum.

    `collectives.leave` sums the parts, after the adapter's delta was added to them.
    """

    def forward(self, input_: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._forward_impl(
            input=input_, weight=self.weight, bias=None, gradient_accumulation_fusion=False, allreduce_dgrad=False,
            sequence_parallel=False, grad_output_buffer=None, tp_group=self.tp_group,
        )  # fmt: skip


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
    """Builds modules whose weights are this rank's parts of the resident base's tensors.

    The parts are views of the base wherever one view can hold them; a fused gate/up weight that is split is copied, as
    its two halves are split each.
    """

    def __init__(
        self, base: ResidentBase, k3: K3Config, config: TransformerConfig, ranks: Ranks, mla_attention: str = "torch"
    ):
        self.mla_attention = mla_attention
        self.base, self.k3, self.ranks = base, k3, ranks
        self._cut = ranks.tp.size > 1 and base.shard is None  # a shard was cut when it was loaded
        self.config = copy.copy(config)
        self.config.sequence_parallel = False  # tokens are gathered and scattered once a sublayer, not in each linear

    def parameter(self, name: str) -> Parameter:
        """A frozen parameter over the base's storage: this rank's part where the table splits it."""
        tp_dim = self._param(name).tp_dim if self._cut else None
        return Parameter(self._part(self.base[name], tp_dim), requires_grad=False)

    def norm(self, module: str, eps: float | None = None) -> RmsNorm:
        return RmsNorm(self.parameter(module + ".weight"), self.k3.rms_norm_eps if eps is None else eps)

    def linear(self, module: str) -> nn.Module:
        """Column-parallel, row-parallel or duplicated, as the table's split dimension says."""
        name = module + ".weight"
        return self._linear(self.parameter(name), self._param(name).tp_dim)

    def gate_up(self, prefix: str) -> nn.Module:
        """The fused [2F / tp, H] weight of a dense or shared MLP, gate half first."""
        weight, tp_dim = self.base.gate_up[prefix], self._param(prefix + "gate_proj.weight").tp_dim
        if self._cut:
            weight = torch.cat([self._part(half, tp_dim) for half in weight.chunk(2)])
        return self._linear(Parameter(weight, requires_grad=False), tp_dim)

    def experts(self, layer: int) -> ExpertBank:
        """This expert-parallel rank's experts."""
        bank = self.base.experts[layer]
        return bank if self.base.shard is not None else bank.part(self.ranks.ep.part(self.k3.num_experts))

    def embedding(self, name: str) -> VocabParallelEmbedding:
        with torch.device("meta"):  # megatron allocates a weight, which is replaced before it holds any memory
            module = VocabParallelEmbedding(*self._param(name).shape, init_method=_never, config=self.config,
                                            reduce_scatter_embeddings=self.ranks.sequence_parallel,
                                            tp_group=self.ranks.tp.group)  # fmt: skip
        return _with_weight(module, self.parameter(name), 0)

    def _part(self, whole: Tensor, tp_dim: int | None) -> Tensor:
        if tp_dim is None:
            return whole
        own = self.ranks.tp.part(whole.shape[tp_dim])
        return whole.narrow(tp_dim, own.start, own.stop - own.start)

    def _linear(self, weight: Parameter, tp_dim: int | None) -> nn.Module:
        """`weight` is this rank's part."""
        if tp_dim is None:
            return Duplicated(weight)
        rows, cols = weight.shape
        tp = self.ranks.tp
        common: dict[str, Any] = {
            "config": self.config, "init_method": _never, "bias": False, "tp_group": tp.group
        }  # fmt: skip
        with torch.device("meta"):
            if tp_dim == 0:
                module = Column(cols, rows * tp.size, disable_grad_reduce=True, **common)
            else:
                module = Row(cols * tp.size, rows, input_is_parallel=True, skip_bias_add=False, **common)
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
