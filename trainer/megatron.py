"""The Trainer on megatron-core: frozen resident base, trainable adapter, policy loss.

Shape legend: T tokens of a packed stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from miles_k3.adapters.update import make_update
from miles_k3.config import AlgorithmSection, TrainerSection
from miles_k3.errors import MilesError
from miles_k3.k3.config import K3Config
from miles_k3.k3.weights import ResidentBase
from miles_k3.trainer import checkpoint, distributed, lora
from miles_k3.trainer.build import build_model
from miles_k3.trainer.loss import LossOutput, finalize_metrics, policy_loss
from miles_k3.trainer.model.stage import K3Stage
from miles_k3.trainer.optim import Optimizer, learning_rate
from miles_k3.trainer.schedule import Priced, Work, forward_backward, forward_only, score_works, train_work
from miles_k3.types import AdapterConfig, AdapterUpdate, MicroBatch, MiniBatch, StepStats, TrainBatch


class MegatronTrainer:
    """Implements `protocols.Trainer`. Reads the base's own tensors and never writes them."""

    def __init__(
        self,
        base: ResidentBase,
        config: K3Config,
        *,
        adapter: AdapterConfig,
        section: TrainerSection,
        algorithm: AlgorithmSection,
        total_steps: int,
        seed: int,
        routing_replay: bool = False,
    ):
        """`total_steps`: harvests of the whole run, where the learning rate's decay ends. `routing_replay`: force the
        experts that the engine chose, where the batch has them. Raises LaunchError for a layout that can't run here."""
        distributed.initialize(section.parallel, device=base.device, seed=seed)
        self.adapter, self.section, self.algorithm = adapter, section, algorithm
        self.total_steps, self.routing_replay = total_steps, routing_replay
        self.base, self.config, self.device = base, config, base.device
        self._factory = lora.Factory(config, adapter, seed=seed, dtype=base.dtype, device=base.device)
        self._model = build_model(config, base, self._factory, section.parallel)
        self._optimizer = Optimizer(self._model, section, base.dtype)
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def model(self) -> K3Stage:
        """This rank's layers, without megatron's wrapper."""
        return cast(K3Stage, self._model.module)

    def adapter_off(self) -> AbstractContextManager[None]:
        """Within it the model is the base alone, bit for bit."""
        return self._factory.switch.off()

    def step(self, batch: TrainBatch) -> StepStats:
        """One optimizer step per mini-batch. Raises MilesError, with the adapter as it was before the update, when a
        gradient is not finite."""
        lr = learning_rate(self.section, self._version, self.total_steps)
        old = self._old_logprobs(batch)
        norms, outputs = [], []
        for mini, old_logprobs in zip(batch.mini_batches, old, strict=True):
            outputs.append(self.mini_batch_gradients(mini, batch.temperature, old_logprobs))
            norms.append(self._optimizer.grad_norm())
            self._check_finite(norms)
            self._optimizer.step(lr)
        self._version += 1
        losses = [sum(float(out.loss) for out in parts) for parts in outputs]
        metrics = finalize_metrics(out.sums for parts in outputs for out in parts)
        return StepStats(loss=_mean(losses), grad_norm=_mean(norms), lr=lr, metrics=metrics)

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[Tensor]:
        """Log-probabilities of tokens 1.. of each sequence: fp32 [len - 1] each, on the CPU."""
        if not 0.0 < temperature < math.inf:
            raise MilesError(f"temperature is {temperature}; logits are divided by it, so it must be above 0")
        result = [torch.zeros(0)] * len(sequences)
        packs = score_works(
            sequences,
            self.config,
            device=self.device,
            temperature=temperature,
            micro_batch_tokens=self.section.micro_batch_tokens,
        )
        if packs:
            for (indices, work), priced in zip(packs, self._price([work for _, work in packs]), strict=True):
                parts = priced.logprobs_T.cpu().split(work.stream.packed.lengths_B.tolist())
                for index, part in zip(indices, parts, strict=True):
                    result[index] = part.clone()
        return result

    def export_adapter(self) -> AdapterUpdate:
        tensors = lora.export_adapter(self.model, self._factory.layout)
        return make_update(self._version, self.adapter, tensors)

    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        lora.load_adapter(self.model, self._factory.layout, self.adapter, tensors)
        self._optimizer.reload_masters()

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self._optimizer, adapter=self.adapter, version=self._version)

    def load(self, folder: Path) -> None:
        self._version = checkpoint.load(folder, self._optimizer, adapter=self.adapter)

    def _old_logprobs(self, batch: TrainBatch) -> list[list[Tensor] | None]:
        """The policy's log-probabilities before the harvest's first update; None where they are the current ones."""
        if len(batch.mini_batches) < 2:
            return [None] * len(batch.mini_batches)
        return [
            [priced.logprobs_T for priced in self._price(self._works(mini.micro_batches, batch.temperature))]
            for mini in batch.mini_batches
        ]

    def mini_batch_gradients(
        self, mini: MiniBatch, temperature: float, old: list[Tensor] | None = None
    ) -> list[LossOutput]:
        """Fill the parameters' `main_grad` with the gradient of one mini-batch; its loss, micro-batch by micro-batch.

        `old`: log-probabilities [T] of each micro-batch before the harvest's first update; None: the current ones.
        """
        works = self._works(mini.micro_batches, temperature)
        reference: list[Priced] | None = None
        if self.algorithm.kl_coef > 0:
            with self.adapter_off():
                reference = self._price(works)

        def loss(index: int, priced: Priced) -> LossOutput:
            return self._loss(
                mini, mini.micro_batches[index], priced,
                old=None if old is None else old[index],
                reference=None if reference is None else reference[index].logprobs_T,
            )  # fmt: skip

        self._optimizer.zero_grad()
        return forward_backward(self._model, works, loss)

    def _loss(
        self, mini: MiniBatch, micro: MicroBatch, priced: Priced, *, old: Tensor | None, reference: Tensor | None
    ) -> LossOutput:
        return policy_loss(
            priced.logprobs_T,
            priced.logprobs_T.detach() if old is None else old,
            micro.rollout_logprobs.to(self.device),
            micro.advantages.to(self.device),
            micro.loss_mask.to(self.device),
            micro.cu_seqlens.to(self.device),
            algorithm=self.algorithm,
            num_loss_tokens=mini.num_loss_tokens,
            num_sequences=mini.num_sequences,
            ref_logprobs=reference,
            entropy=priced.entropies_T,
        )

    def _works(self, micro_batches: Iterable[MicroBatch], temperature: float) -> list[Work]:
        return [
            train_work(micro, self.config, device=self.device, temperature=temperature,
                       entropy_gradient=self.algorithm.entropy_coef > 0, routing_replay=self.routing_replay)
            for micro in micro_batches
        ]  # fmt: skip

    def _price(self, works: Sequence[Work]) -> list[Priced]:
        return forward_only(self._model, works)

    def _check_finite(self, norms: Sequence[float]) -> None:
        if not math.isfinite(norms[-1]):
            raise MilesError(
                f"the gradient norm is {norms[-1]} in update {len(norms)} of step {self._version}; the adapter is "
                "as before this update: lower trainer.lr or set trainer.grad_clip, and look at the step's metrics"
            )


def _mean(values: Sequence[float]) -> float:
    """0 for none: a harvest without a usable group takes no update."""
    return math.fsum(values) / len(values) if values else 0.0
