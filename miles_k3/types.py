"""The objects that folders hand to one another. Frozen: whoever receives one never changes it.

Shape legend: T tokens of a packed stream, B sequences, E experts, K chosen experts per token, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


Handle = tuple[Callable[..., Any], tuple[Any, ...]]  # of memory that another process opens


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # an end-of-message token or a stop string
    LENGTH = "length"  # max_new_tokens reached
    ABORT = "abort"  # cancelled by the caller
    ERROR = "error"  # the engine refused to go on, e.g. non-finite logits


COLDEST = 1e-10  # the lowest temperature above 0: logits divided by less overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn, and its place among others.

    `temperature` 0 means greedy, else it is at least COLDEST; log-probabilities are those of the processed
    distribution. `seed` fixes the draw of every position of the request, whatever else shares its batch. Requests of
    higher `priority` run first; `protected` ones have memory for their whole length from the start, and are never
    preempted.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps every token
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    return_routed_experts: bool = False
    priority: int = 0
    protected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question of a task. `payload` is whatever the task's own scorer needs to grade an answer."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What an engine made of one request.

    `logprobs[i]` belongs to `token_ids[i]` under the processed sampling distribution (temperature, top-p, top-k).
    `adapter_version` is the version that made every token. `routed_experts` is int16 [tokens - 1, L, K] over prompt
    and answer (the last token is never fed), or None.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    adapter_version: int
    routed_experts: torch.Tensor | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """One score of one answer; `failure` names why a scorer gave none (timeout, NaN, ...), the reward is then 0."""

    reward: float
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One graded answer. `loss_mask[i]` says whether answer token i is trained on."""

    prompt: Prompt
    completion: Completion
    grade: Grade
    loss_mask: tuple[bool, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.completion.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """All samples of one prompt; advantages are taken within it."""

    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Packed sequences. All tensors are [T] and aligned on the *input* token; entry t speaks of predicting token t+1.

    `tokens` int64; `cu_seqlens` int32 [B+1]; `targets` int64, the next token within the sequence (0 at its last);
    `loss_mask` float32, 1 where the prediction of `targets` is trained on (0 at the last token of each sequence);
    `advantages`, `rollout_logprobs` float32, valid where the mask is 1; `sequence_ids` int64 [B], index into the
    batch's samples; `routed_experts` int16 [T, L, K] or None.
    """

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    advantages: torch.Tensor
    rollout_logprobs: torch.Tensor
    sequence_ids: torch.Tensor
    routed_experts: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where every generated sample went; `check()` raises unless the parts add up to the whole."""

    generated: int
    trained: int
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> samples

    def check(self) -> None:
        lost = self.generated - self.trained - sum(self.dropped.values())
        if lost:
            raise AssertionError(f"{lost} of {self.generated} samples are unaccounted for: {self}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MiniBatch:
    """One optimizer step: micro-batches plus the denominators that make the loss independent of their number.

    `num_loss_tokens` and `num_sequences` count the whole mini-batch (all micro-batches, all data-parallel ranks);
    sequences without a single loss token don't count.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_loss_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """One harvest of rollouts, split into the optimizer steps taken on it.

    `temperature` is the one the rollouts were sampled at; the trainer divides its logits by it before the softmax.
    """

    mini_batches: tuple[MiniBatch, ...]
    temperature: float
    ledger: Ledger
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one `Trainer.step` measured, averaged over its optimizer steps; `metrics` are logged under `train/`."""

    loss: float
    grad_norm: float
    lr: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Shape of a LoRA adapter. `share_gate_up_a`: gate and up of dense and shared MLPs use one A (exported twice)."""

    rank: int
    alpha: float
    share_gate_up_a: bool = True

    @property
    def scaling(self) -> float:
        """alpha / rank, applied exactly once, at run time."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """What of an adapter one rank of an engine needs: of the routed experts' own factors those of `experts`, of the
    others everything. `flat` is the memory of all its tensors, in the layout's order without gaps; `sha256` covers
    version, config and what is held."""

    experts: range
    flat: torch.Tensor
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterUpdate:
    """One version of the adapter on its way from trainer to engine: all of it, or one rank's shard.

    `tensors` maps exported names (see `miles_k3.adapters.layout`) to tensors that own their memory, those of a shard
    together; `sha256` covers version, config, and names, shapes, dtypes and bytes, these by their `adapters.checksum`,
    of the whole adapter: it is the same for all its shards.
    """

    version: int
    config: AdapterConfig
    tensors: Mapping[str, torch.Tensor]
    sha256: str
    shard: Shard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LentShard:
    """A shard in BF16 in memory that processes of its host open by a function and its arguments, as `pickle` does.

    `once`: a handle for each process that reads it, one time, perhaps of a GPU's memory; `kept`: of the host's memory,
    for any number of times until the next adapter has been lent, where there is a copy.
    """

    experts: range
    once: tuple[Handle, ...]
    kept: Handle | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LentAdapter:
    """An update whose shards lie with the ranks of an engine, in their order."""

    version: int
    config: AdapterConfig
    sha256: str
    shards: tuple[LentShard, ...]
