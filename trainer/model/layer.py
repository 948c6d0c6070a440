"""One decoder layer: Attention Residuals in place of the residual stream (spec 2.2).

Shape legend: T tokens of this rank between sublayers, H hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from miles_k3.k3.params import layer_prefix, mlp_prefix
from miles_k3.trainer.lora import Factory
from miles_k3.trainer.model.elementwise import attn_res
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.kda import KdaAttention
from miles_k3.trainer.model.mla import MlaAttention
from miles_k3.trainer.model.mlp import Mlp
from miles_k3.trainer.model.moe import LatentMoe
from miles_k3.trainer.model.recompute import Recompute
from miles_k3.trainer.model.stream import Stream

Bank = tuple[Tensor, ...]  # residual snapshots, each [T, H], oldest first


class AttnRes(nn.Module):
    """Mix of the bank's rows and the prefix, [T, H]; with an empty bank the prefix itself."""

    def __init__(self, frozen: FrozenWeights, name: str):
        super().__init__()
        self.norm = frozen.parameter(name + "_norm.weight")
        self.proj = frozen.parameter(name + "_proj.weight")

    def forward(self, prefix_TH: Tensor, bank: Bank) -> Tensor:
        if not bank:
            return prefix_TH
        return attn_res(self.norm.float() * self.proj.float().reshape(-1), (*bank, prefix_TH))


class K3Layer(nn.Module):
    """(prefix, bank) -> (prefix, bank)."""

    def __init__(self, frozen: FrozenWeights, factory: Factory, layer: int, recompute: Recompute | None = None):
        super().__init__()
        p, k3 = layer_prefix(layer), frozen.k3
        self.recompute = Recompute() if recompute is None else recompute
        self.starts_block = k3.starts_block(layer)
        self.attention_res, self.mlp_res = (AttnRes(frozen, p + name) for name in ("self_attention_res", "mlp_res"))
        self.input_norm, self.mlp_norm = (
            frozen.norm(p + name) for name in ("input_layernorm", "post_attention_layernorm")
        )
        self.attention = (MlaAttention if k3.is_mla(layer) else KdaAttention)(frozen, factory, layer)
        self.moe = LatentMoe(frozen, factory, layer) if k3.is_moe(layer) else None
        self.mlp = None if k3.is_moe(layer) else Mlp(frozen, factory, mlp_prefix(k3, layer))

    def forward(self, prefix_TH: Tensor, bank: Bank, stream: Stream) -> tuple[Tensor, Bank]:
        a_TH = self.recompute.sublayer("attention", self._attend, prefix_TH, bank, stream)
        if self.starts_block:
            bank, prefix_TH = (*bank, prefix_TH), a_TH
        else:
            prefix_TH = prefix_TH + a_TH
        return prefix_TH + self.recompute.sublayer("mlp", self._expand, prefix_TH, bank, stream), bank

    def _attend(self, prefix_TH: Tensor, bank: Bank, stream: Stream) -> Tensor:
        return self.attention(self.input_norm(self.attention_res(prefix_TH, bank)), stream)

    def _expand(self, prefix_TH: Tensor, bank: Bank, stream: Stream) -> Tensor:
        y_TH = self.mlp_norm(self.mlp_res(prefix_TH, bank))
        return self.moe(y_TH, stream) if self.moe is not None else self.mlp(y_TH)  # pyright: ignore[reportOptionalCall]
