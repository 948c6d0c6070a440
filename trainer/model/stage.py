"""A contiguous run of K3 layers: the whole model, or one pipeline stage of it.

Between stages the prefix and the bank travel as one tensor [T, 1, (1 + rows) * H] (spec 4.3).
Shape legend: T tokens, H hidden, V vocabulary, M tokens whose log-probability is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import LM_HEAD, TEXT
from miles_k3.k3.weights import ResidentBase
from miles_k3.trainer.lora import Factory
from miles_k3.trainer.mcore import MegatronModule, ModelType, TransformerConfig
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.head import head_logprobs
from miles_k3.trainer.model.layer import AttnRes, Bank, K3Layer
from miles_k3.trainer.model.stream import Stream, Wanted


class K3Stage(MegatronModule):
    """Layers `layers` of the model; the first stage embeds, the last one ends in log-probabilities."""

    model_type = ModelType.encoder_or_decoder  # the schedules ask

    def __init__(
        self,
        config: TransformerConfig,
        k3: K3Config,
        base: ResidentBase,
        factory: Factory,
        layers: range | None = None,
    ):
        super().__init__(config)
        layers = range(k3.num_hidden_layers) if layers is None else layers
        frozen = FrozenWeights(base, k3, config)
        self.k3, self.switch = k3, factory.switch
        self.first, self.last = layers.start == 0, layers.stop == k3.num_hidden_layers
        self.rows_in = k3.bank_rows(layers.start)
        self.input_tensor: Tensor | None = None
        if self.first:
            self.embedding = frozen.embedding(TEXT + "embed_tokens.weight")
        self.layers = nn.ModuleDict({str(i): K3Layer(frozen, factory, i) for i in layers})
        if self.last:
            self.output_res = AttnRes(frozen, TEXT + "output_attn_res")
            self.norm = frozen.norm(TEXT + "norm")
            self.head = frozen.linear(LM_HEAD.removesuffix(".weight"))
            self.head_weight = frozen.base[LM_HEAD]

    def set_input_tensor(self, input_tensor: Sequence[Tensor | None]) -> None:
        """Called by the schedules with what the previous stage sent; [None] on the first stage."""
        self.input_tensor = input_tensor[0]

    def forward(self, stream: Stream, wanted: Wanted | None = None) -> Tensor:
        """Last stage: [2, M], log-probabilities and entropies of what is wanted. Others: [T, 1, (1 + rows) * H]."""
        prefix_TH, bank = self._run(stream)
        if not self.last:
            return pack_boundary(prefix_TH, bank)
        assert wanted is not None
        x_TH = self.output_res(prefix_TH[wanted.places_M], tuple(row[wanted.places_M] for row in bank))
        logprobs_M, entropies_M = head_logprobs(
            self.norm(x_TH), self.head_weight, wanted.targets_M, wanted.temperature,
            entropy_gradient=wanted.entropy_gradient,
        )  # fmt: skip
        return torch.stack([logprobs_M, entropies_M])

    def logits(self, stream: Stream) -> Tensor:
        """All logits, [T, V / tp]: for comparison with other implementations; training never holds them."""
        prefix_TH, bank = self._run(stream)
        return self.head(self.norm(self.output_res(prefix_TH, bank)))

    def _run(self, stream: Stream) -> tuple[Tensor, Bank]:
        if self.first:
            prefix_TH, bank = self.embedding(stream.tokens_T), ()
        else:
            assert self.input_tensor is not None, "a later stage runs on what the previous one sent"
            prefix_TH, bank = unpack_boundary(self.input_tensor, self.rows_in)
        for layer in self.layers.values():
            prefix_TH, bank = layer(prefix_TH, bank, stream)
        return prefix_TH, bank


def pack_boundary(prefix_TH: Tensor, bank: Bank) -> Tensor:
    """[T, 1, (1 + rows) * H]."""
    return torch.cat([prefix_TH, *bank], dim=-1).unsqueeze(1)


def unpack_boundary(payload: Tensor, rows: int) -> tuple[Tensor, Bank]:
    """The inverse, as views, so that the gradient of every row flows back in the one tensor."""
    prefix_TH, *bank = payload.squeeze(1).chunk(1 + rows, dim=-1)
    return prefix_TH, tuple(bank)
