"""Which part of the frozen weights one rank of a trainer holds, where no engine beside it needs the whole."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import Param, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseShard:
    """Layers `layers` and experts `experts` of them, split `tp_size` ways as the parameter table says."""

    layers: tuple[int, ...]
    experts: range
    tp_rank: int = 0
    tp_size: int = 1

    @classmethod
    def whole(cls, config: K3Config) -> BaseShard:
        """Everything."""
        return cls(layers=tuple(range(config.num_hidden_layers)), experts=range(config.num_experts))

    def holds(self, p: Param, config: K3Config) -> bool:
        """Whether any of the tensor is this rank's: the embedding belongs to the first layer's rank, what comes after
        the layers to the last one's."""
        if p.layer is None:
            return (0 if p.part is Part.EMBED else config.num_hidden_layers - 1) in self.layers
        return p.layer in self.layers and (p.expert is None or p.expert in self.experts)

    def part(self, p: Param, tensor: Tensor) -> Tensor:
        """This rank's part of the tensor, a view; `tensor` is without A_log's padding."""
        if p.tp_dim is None or self.tp_size == 1:
            return tensor
        each = tensor.shape[p.tp_dim] // self.tp_size
        return tensor.narrow(p.tp_dim, self.tp_rank * each, each)
