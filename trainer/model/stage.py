"""A contiguous run of K3 layers: the whole model, or one pipeline stage of it.

Between stages the prefix and the bank travel as one tensor [T, 1, (1 + rows) * H] (spec 4.3).
Shape legend: T tokens of this rank between sublayers, H hidden, V vocabulary of this rank, m predictions that the loss
wants of this rank's context-parallel share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miles_k3.k3.config import K3Config
from miles_k3.k3.params import LM_HEAD, TEXT
from miles_k3.k3.weights import ResidentBase
from miles_k3.trainer.lora import Factory
from miles_k3.trainer.mcore import MegatronModule, ModelType, TransformerConfig
from miles_k3.trainer.model.collectives import enter
from miles_k3.trainer.model.frozen import FrozenWeights
from miles_k3.trainer.model.head import head_logprobs
from miles_k3.trainer.model.layer import AttnRes, Bank, K3Layer
from miles_k3.trainer.model.recompute import Recompute
from miles_k3.trainer.model.stream import Stream, Wanted


class K3Stage(MegatronModule):
    """Layers `layers` of the model; the first stage embeds, the last one ends in log-probabilities."""

    # What the schedules and the gradient reduction ask of a model.
    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False

    def __init__(
        self,
        config: TransformerConfig,
        k3: K3Config,
        base: ResidentBase,
        factory: Factory,
        layers: range | None = None,
        recompute: Recompute | None = None,
        mla_attention: str = "torch",
    ):
        super().__init__(config)
        layers = range(k3.num_hidden_layers) if layers is None else layers
        self.ranks = factory.ranks
        frozen = FrozenWeights(base, k3, config, self.ranks, mla_attention)
        self.k3, self.switch = k3, factory.switch
        self.recompute = Recompute() if recompute is None else recompute
        self.first, self.last = layers.start == 0, layers.stop == k3.num_hidden_layers
        self.pre_process, self.post_process = self.first, self.last  # their names for it
        self.rows_in = k3.bank_rows(layers.start)
        self.input_tensor: Tensor | None = None
        if self.first:
            self.embedding = frozen.embedding(TEXT + "embed_tokens.weight")
        self.layers = nn.ModuleDict({str(i): K3Layer(frozen, factory, i, self.recompute) for i in layers})
        if self.last:
            self.output_res = AttnRes(frozen, TEXT + "output_attn_res")
            self.norm = frozen.norm(TEXT + "norm")
            self.head = frozen.linear(LM_HEAD.removesuffix(".weight"))

    def set_input_tensor(self, input_tensor: Sequence[Tensor | None]) -> None:
        """Called by the schedules with what the previous stage sent; [None] on the first stage."""
        self.input_tensor = input_tensor[0]

    def forward(self, stream: Stream, wanted: Wanted | None = None) -> Tensor:
        """Last stage: [2, m], log-probabilities and entropies of what is wanted. Others: [T, 1, (1 + rows) * H]."""
        prefix_TH, bank = self._run(stream)
        if not self.last:
            return pack_boundary(prefix_TH, bank)
        assert wanted is not None
        logprobs_m, entropies_m = head_logprobs(
            self._final(prefix_TH, bank, wanted), self._parameter(self.head), wanted.targets_m, wanted.temperature,
            entropy_gradient=wanted.entropy_gradient, tp=self.ranks.tp,
        )  # fmt: skip
        return torch.stack([logprobs_m, entropies_m])

    def logits(self, stream: Stream) -> Tensor:
        """All logits, [T, V]: for comparison with other implementations; training never holds them."""
        prefix_TH, bank = self._run(stream)
        return self.head(enter(self.norm(self.output_res(prefix_TH, bank)), self.ranks))

    def _final(self, prefix_TH: Tensor, bank: Bank, wanted: Wanted) -> Tensor:
        """Normalised hidden states of all wanted tokens, [m, H], on every tensor-parallel rank: only those travel."""
        rows = wanted.rows_m[wanted.own] - self.ranks.sp.rank * prefix_TH.shape[0]
        x_mH = self.norm(self.output_res(prefix_TH[rows], tuple(row[rows] for row in bank)))
        if self.ranks.sp.size == 1:
            return enter(x_mH, self.ranks)
        most = max(wanted.counts)
        gathered = enter(F.pad(x_mH, (0, 0, 0, most - x_mH.shape[0])), self.ranks)
        return torch.cat([part[:n] for part, n in zip(gathered.chunk(len(wanted.counts)), wanted.counts, strict=True)])

    def _run(self, stream: Stream) -> tuple[Tensor, Bank]:
        if self.first:
            prefix_TH, bank = self.embedding(stream.tokens_L.unsqueeze(0)).reshape(-1, self.k3.hidden_size), ()
        else:
            assert self.input_tensor is not None, "a later stage runs on what the previous one sent"
            prefix_TH, bank = unpack_boundary(self.input_tensor, self.rows_in)
        for layer in self.layers.values():
            prefix_TH, bank = self.recompute.layer(layer, prefix_TH, bank, stream)
        return prefix_TH, bank

    @staticmethod
    def _parameter(linear: nn.Module) -> Tensor:
        weight = linear.weight
        assert isinstance(weight, Tensor)
        return weight


def pack_boundary(prefix_TH: Tensor, bank: Bank) -> Tensor:
    """[T, 1, (1 + rows) * H]."""
    return torch.cat([prefix_TH, *bank], dim=-1).unsqueeze(1)


def unpack_boundary(payload: Tensor, rows: int) -> tuple[Tensor, Bank]:
    """The inverse, as views, so that the gradient of every row flows back in the one tensor."""
    prefix_TH, *bank = payload.squeeze(1).chunk(1 + rows, dim=-1)
    return prefix_TH, tuple(bank)
