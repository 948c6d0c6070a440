"""Micro-batches through megatron's schedules: forward and backward, or forward only.

Shape legend: T tokens of a packed stream, M of them priced.
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
from miles_k3.trainer.loss import LossOutput
from miles_k3.trainer.mcore import DistributedDataParallel, get_forward_backward_func
from miles_k3.trainer.model.stream import Stream, Wanted
from miles_k3.types import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One micro-batch on the model's device, ready to run."""

    stream: Stream
    wanted: Wanted

    @property
    def num_tokens(self) -> int:
        return self.stream.tokens_T.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """Log-probabilities and entropies of one micro-batch, fp32 [T], 0 where nothing was wanted."""

    logprobs_T: Tensor
    entropies_T: Tensor


def train_work(micro: MicroBatch, k3: K3Config, *, device: torch.device, temperature: float,
               entropy_gradient: bool = False, routing_replay: bool = False) -> Work:  # fmt: skip
    """The predictions where the loss mask is 1."""
    places_M = micro.loss_mask.nonzero().squeeze(1)
    return Work(
        stream=Stream.of(
            micro.tokens,
            micro.cu_seqlens.diff().tolist(),
            k3,
            device,
            micro.routed_experts if routing_replay else None,
        ),
        wanted=Wanted(
            places_M=places_M.to(device),
            targets_M=micro.targets[places_M].to(device),
            temperature=temperature,
            entropy_gradient=entropy_gradient,
        ),
    )


def forward_backward(
    model: DistributedDataParallel, works: Sequence[Work], loss: Callable[[int, Priced], LossOutput]
) -> list[LossOutput]:
    """Gradients of the sum of all micro-batches' losses into the model's buffers, reduced over ranks.

    `loss(i, priced)` is micro-batch i's share of the mini-batch loss: shares add up, so nothing is divided by their
    number (megatron's `calculate_per_token_loss`, with its division by tokens left out).
    """

    def forward_step(queue: Iterator[tuple[int, Work]], stage: Any):
        index, work = next(queue)

        def calc_loss(output: Tensor):
            result = loss(index, _priced(output, work))
            return result.loss, torch.ones((), dtype=torch.int), LossOutput(loss=result.loss.detach(), sums=result.sums)

        return stage(work.stream, work.wanted), calc_loss

    return _run(model, works, forward_step, forward_only=False)


def forward_only(model: DistributedDataParallel, works: Sequence[Work]) -> list[Priced]:
    """Price every micro-batch without a graph."""

    def forward_step(queue: Iterator[tuple[int, Work]], stage: Any):
        _, work = next(queue)
        return stage(work.stream, work.wanted), lambda output, non_loss_data: _priced(output, work)

    with torch.no_grad():
        return _run(model, works, forward_step, forward_only=True)


def _run(model: DistributedDataParallel, works: Sequence[Work], forward_step: Any, *, forward_only: bool) -> list[Any]:
    with cpu_shim.on_cpu():
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(enumerate(works)),
            model=[model],
            num_microbatches=len(works),
            seq_length=max(work.num_tokens for work in works),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def _priced(output_2M: Tensor, work: Work) -> Priced:
    blank_T = output_2M.new_zeros(work.num_tokens)
    logprobs_T, entropies_T = (blank_T.index_copy(0, work.wanted.places_M, row) for row in output_2M)
    return Priced(logprobs_T=logprobs_T, entropies_T=entropies_T)


def score_works(
    sequences: Sequence[Sequence[int]],
    k3: K3Config,
    *,
    device: torch.device,
    temperature: float,
    micro_batch_tokens: int,
) -> list[tuple[list[int], Work]]:
    """Pack whole sequences into micro-batches; each with the indices of its sequences.

    A sequence's last token predicts nothing and is left out; one of a single token takes no part. One that is longer
    than a micro-batch gets its own.
    """
    scored = [index for index, sequence in enumerate(sequences) if len(sequence) > 1]
    lengths = [min(len(sequences[index]) - 1, micro_batch_tokens) for index in scored]
    packs = [[scored[i] for i in pack] for pack in pack_lengths(lengths, micro_batch_tokens)]
    return [(pack, _score_work([sequences[i] for i in pack], k3, device, temperature)) for pack in packs]


def _score_work(sequences: list[Sequence[int]], k3: K3Config, device: torch.device, temperature: float) -> Work:
    whole = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in sequences]
    lengths = [len(s) - 1 for s in whole]
    return Work(
        stream=Stream.of(torch.cat([s[:-1] for s in whole]), lengths, k3, device),
        wanted=Wanted(
            places_M=torch.arange(sum(lengths), device=device),
            targets_M=torch.cat([s[1:] for s in whole]).to(device),
            temperature=temperature,
        ),
    )
