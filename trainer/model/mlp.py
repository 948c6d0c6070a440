"""The plain gate/up/down MLP with SiTU (spec 2.5): layer 0's dense one and the shared experts.

Shape legend: T tokens, H hidden, F inner width (this rank's part of it).
"""

from __future__ import annotations

from torch import Tensor, nn

from miles_k3.trainer.lora import DenseLora, Factory, GateUpLora
from miles_k3.trainer.lora_rules import Site
from miles_k3.trainer.model.collectives import enter, leave
from miles_k3.trainer.model.elementwise import situ
from miles_k3.trainer.model.frozen import FrozenWeights


class Mlp(nn.Module):
    """[T / sp, H] -> [T / sp, H]."""

    def __init__(self, frozen: FrozenWeights, factory: Factory, prefix: str):
        super().__init__()
        self.ranks = frozen.ranks
        self.beta, self.linear_beta = frozen.k3.situ_beta, frozen.k3.situ_linear_beta
        self.fc1, self.fc2 = frozen.gate_up(prefix), frozen.linear(prefix + "down_proj")
        self.fc1_lora = GateUpLora(factory, prefix)
        self.fc2_lora = DenseLora(factory, prefix + "down_proj", Site.FC2)

    def forward(self, x_TH: Tensor) -> Tensor:
        x_TH = enter(x_TH, self.ranks)
        act_TF = situ(self.fc1_lora(x_TH, self.fc1(x_TH)), self.beta, self.linear_beta)
        return leave(self.fc2_lora(act_TF, self.fc2(act_TF)), self.ranks)
