"""The naive model in float64: what fp32 implementations, the naive one included, are rounded from."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_k3.k3.naive import NaiveK3
from miles_k3.k3.params import moe_prefix


class Oracle64(NaiveK3):
    """NaiveK3's formulas at double precision; `adapter` may hold leaf tensors that require a gradient."""

    def weight(self, name: str) -> Tensor:
        return self.weights[name].double()

    def expert_weight(self, layer: int, expert: int, which: str) -> Tensor:
        return super().expert_weight(layer, expert, which).double()

    def linear(self, x: Tensor, module: str) -> Tensor:
        y, a = x @ self.weight(module + ".weight").t(), self.adapter.get(module + ".lora_A.weight")
        return y if a is None else y + self.delta(x, a, self.adapter[module + ".lora_B.weight"])

    def expert_linear(self, x: Tensor, layer: int, expert: int, which: str) -> Tensor:
        y = x @ self.expert_weight(layer, expert, which).t()
        a, b = (self.adapter.get(f"{moe_prefix(layer)}experts.{which}.lora_{f}.weight") for f in "AB")
        if a is None or b is None:
            return y
        return y + self.delta(x, *(f[expert if f.shape[0] > 1 else 0] for f in (a, b)))

    def delta(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.scaling * (x @ a.double().t()) @ b.double().t()


def packed_logits(model: NaiveK3, sequences: list[Tensor]) -> Tensor:
    """Logits of sequences scored one by one, concatenated as a packed stream [T, V]."""
    return torch.cat([model(tokens[None])[0] for tokens in sequences])
