"""Micro-batches through megatron's schedules: forward and backward, or forward only.

Shape legend: T tokens of a packed stream, m predictions that the loss wants of this rank's context-parallel share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.packing import pack_lengths
from miles_k3.trainer import cpu_shim
from miles_k3.trainer.distributed import Ranks
from miles_k3.trainer.loss import LossOutput
from miles_k3.trainer.mcore import DistributedDataParallel, get_forward_backward_func
from miles_k3.trainer.model.collectives import gather_for_loss
from miles_k3.trainer.model.kda_context import KdaKernel
from miles_k3.trainer.model.stream import Stream, Wanted
from miles_k3.types import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One micro-batch on the model's device, ready to run. `home_T`: where the caller's tokens are among all ranks'."""

    stream: Stream
    wanted: Wanted
    home_T: Tensor

    @property
    def num_tokens(self) -> int:
        """The caller's, without padding."""
        return self.home_T.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """Log-probabilities and entropies of one micro-batch, fp32 [T], 0 where nothing was wanted."""

    logprobs_T: Tensor
    entropies_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Worker:
    """Turns host batches into `Work` for one rank, and runs them through its stages."""

    k3: K3Config
    chunks: Sequence[DistributedDataParallel]
    ranks: Ranks
    device: torch.device
    kernel: KdaKernel = "torch"

    def work(
        self, tokens_T: Tensor, lengths: Sequence[int], places_M: Tensor, targets_M: Tensor, temperature: float, *,
        entropy_gradient: bool = False, routed: Tensor | None = None,
    ) -> Work:  # fmt: skip
        """From host tensors: predictions at the places `places_M` of the stream."""
        stream = Stream.of(tokens_T, lengths, self.k3, self.device, routed, ranks=self.ranks, kernel=self.kernel)
        wanted = Wanted.of(
            stream.layout, places_M, targets_M, temperature, device=self.device, ranks=self.ranks,
            entropy_gradient=entropy_gradient,
        )  # fmt: skip
        return Work(stream=stream, wanted=wanted, home_T=stream.layout.home_T.to(self.device))

    def train_work(
        self, micro: MicroBatch, temperature: float, *, entropy_gradient: bool = False, routing_replay: bool = False
    ) -> Work:
        """The predictions where the loss mask is 1."""
        places_M = micro.loss_mask.nonzero().squeeze(1)
        return self.work(
            micro.tokens, micro.cu_seqlens.diff().tolist(), places_M, micro.targets[places_M], temperature,
            entropy_gradient=entropy_gradient, routed=micro.routed_experts if routing_replay else None,
        )  # fmt: skip

    def score_works(
        self, sequences: Sequence[Sequence[int]], *, temperature: float, micro_batch_tokens: int
    ) -> list[tuple[list[int], Work]]:
        """Pack whole sequences into micro-batches; each with the indices of its sequences.

        A sequence's last token predicts nothing and is left out; one of a single token takes no part. One that is
        longer than a micro-batch gets its own.
        """
        scored = [index for index, sequence in enumerate(sequences) if len(sequence) > 1]
        lengths = [min(len(sequences[index]) - 1, micro_batch_tokens) for index in scored]
        packs = [[scored[i] for i in pack] for pack in pack_lengths(lengths, micro_batch_tokens)]
        return [(pack, self._score_work([sequences[i] for i in pack], temperature)) for pack in packs]

    def _score_work(self, sequences: list[Sequence[int]], temperature: float) -> Work:
        whole = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in sequences]
        lengths = [len(s) - 1 for s in whole]
        return self.work(
            torch.cat([s[:-1] for s in whole]), lengths, torch.arange(sum(lengths)), torch.cat([s[1:] for s in whole]),
            temperature,
        )  # fmt: skip

    def forward_backward(
        self, works: Sequence[Work], loss: Callable[[int, Priced], LossOutput], *, force_all_reduce: bool = False
    ) -> list[LossOutput]:
        """Gradients of the sum of all micro-batches' losses into the model's buffers, reduced over ranks.

        `loss(i, priced)` is micro-batch i's share of the mini-batch loss: shares add up, so nothing is divided by their
        number (megatron's `calculate_per_token_loss`, with its division by tokens left out). Called on the last stage,
        which alone gets results. `force_all_reduce`: every data-parallel rank gets the whole gradient, not its shard.
        """

        def forward_step(queue: Iterator[tuple[int, Work]], stage: Any):
            index, work = next(queue)

            def calc_loss(output: Tensor):
                result = loss(index, self._priced(output, work))
                detached = LossOutput(loss=result.loss.detach(), sums=result.sums)
                return result.loss, torch.ones((), dtype=torch.int), detached

            return stage(work.stream, work.wanted), calc_loss

        return self._run(works, forward_step, forward_only=False, force_all_reduce=force_all_reduce)

    def forward_only(self, works: Sequence[Work]) -> list[Priced]:
        """Price every micro-batch without a graph; on the last stage, others get nothing."""

        def forward_step(queue: Iterator[tuple[int, Work]], stage: Any):
            _, work = next(queue)
            return stage(work.stream, work.wanted), lambda output, non_loss_data: self._priced(output, work)

        with torch.no_grad():
            return self._run(works, forward_step, forward_only=True)

    def _run(
        self, works: Sequence[Work], forward_step: Any, *, forward_only: bool, force_all_reduce: bool = False
    ) -> list[Any]:
        queues: list[Any] = [iter(enumerate(works)) for _ in self.chunks]
        with cpu_shim.on_cpu():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=queues if len(queues) > 1 else queues[0],
                model=list(self.chunks),
                num_microbatches=len(works),
                seq_length=max(work.num_tokens for work in works),  # not used: lengths are exchanged
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                force_all_reduce=force_all_reduce,
            )

    def _priced(self, output_2m: Tensor, work: Work) -> Priced:
        """To the caller's tokens, from all context-parallel ranks."""
        blank_2L = output_2m.new_zeros(2, work.stream.layout.num_local)
        local_2L = blank_2L.index_copy(1, work.wanted.rows_m, output_2m)
        logprobs_T, entropies_T = gather_for_loss(local_2L, self.ranks.cp).index_select(1, work.home_T)
        return Priced(logprobs_T=logprobs_T, entropies_T=entropies_T)
