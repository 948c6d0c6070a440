"""The Trainer on megatron-core: frozen resident base, trainable adapter, policy loss.

All public methods are collective: every rank calls them alike, with the same arguments, and gets the same results.
Shape legend: T tokens of a packed stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from miles_k3.config import AlgorithmSection, TrainerSection
from miles_k3.errors import MilesError
from miles_k3.k3.config import K3Config
from miles_k3.k3.weights import ResidentBase
from miles_k3.trainer import distributed, lora
from miles_k3.trainer.adapter_export import export, whole_tensors
from miles_k3.trainer.adapter_shards import exported_pieces, load_adapter
from miles_k3.trainer.build import build_model
from miles_k3.trainer.checkpoint import Checkpoints, Writing
from miles_k3.trainer.loss import LossOutput, finalize_metrics, merge_sums, policy_loss
from miles_k3.trainer.memory import Sleeper, base_tensors, gradient_buffers, optimizer_tensors
from miles_k3.trainer.model.kda_context import pick_kernel
from miles_k3.trainer.model.stage import K3Stage
from miles_k3.trainer.optim import Optimizer, learning_rate
from miles_k3.trainer.schedule import Priced, Work, Worker
from miles_k3.types import AdapterConfig, AdapterUpdate, MicroBatch, MiniBatch, StepStats, TrainBatch
from miles_k3.world import World, world_of


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
    ):
        """`total_steps`: harvests of the whole run, where the learning rate's decay ends.

        Raises LaunchError for a layout that can't run here.
        """
        self.ranks = distributed.initialize(config, section, device=base.device, seed=seed)
        distributed.check_shard(base, section.parallel, self.ranks)
        self.world: World = world_of()
        self.adapter, self.section, self.algorithm = adapter, section, algorithm
        self.total_steps = total_steps
        self.base, self.config, self.device = base, config, base.device
        self._factory = lora.Factory(
            config, adapter, seed=seed, dtype=base.dtype, device=base.device, ranks=self.ranks
        )  # fmt: skip
        self._chunks = build_model(config, base, self._factory, section)
        self._optimizer = Optimizer(self._chunks, section, base.dtype)
        self._checkpoints = Checkpoints(
            self._optimizer, self.stages, self._factory.layout, adapter=adapter, parallel=section.parallel,
            ranks=self.ranks, world=self.world,
        )  # fmt: skip
        kernel = pick_kernel(section.kda_kernel, base.device, base.dtype)
        self._worker = Worker(k3=config, chunks=self._chunks, ranks=self.ranks, device=base.device, kernel=kernel)
        self._version = 0
        self._sleeper: Sleeper | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def stages(self) -> list[K3Stage]:
        """This rank's layers, without megatron's wrapper."""
        return [cast(K3Stage, chunk.module) for chunk in self._chunks]

    @property
    def model(self) -> K3Stage:
        """The only stage of a rank without virtual ones."""
        (stage,) = self.stages
        return stage

    def adapter_off(self) -> AbstractContextManager[None]:
        """Within it the model is the base alone, bit for bit."""
        return self._factory.switch.off()

    def step(self, batch: TrainBatch) -> StepStats:
        """One optimizer step per mini-batch of the global batch, of which each rank computes its share.

        Raises MilesError, with the adapter as it was before the update, when a gradient is not finite.
        """
        lr = learning_rate(self.section, self._version, self.total_steps)
        works = [self._works(mini.micro_batches, batch.temperature) for mini in batch.mini_batches]
        old = self._old_logprobs(works)
        norms, losses, sums = [], [], []
        for mini, own_works, old_logprobs in zip(batch.mini_batches, works, old, strict=True):
            outputs = self._mini_batch(mini, own_works, old_logprobs)
            losses.append(math.fsum(float(out.loss) for out in outputs))
            sums += [out.sums for out in outputs]
            norms.append(self._optimizer.grad_norm())
            self._check_finite(norms)
            self._optimizer.step(lr)
        self._version += 1
        return StepStats(loss=_mean(losses), grad_norm=_mean(norms), lr=lr, metrics=finalize_metrics(sums))

    def gradients(self, mini: MiniBatch, temperature: float = 1.0) -> tuple[float, dict[str, Tensor]]:
        """The loss of one mini-batch and its whole gradient by exported name, fp32, as a step would take it."""
        outputs = self._mini_batch(mini, self._works(mini.micro_batches, temperature), force_all_reduce=True)
        like = {p: vars(p)["main_grad"] for stage in self.stages for p in stage.parameters() if p.requires_grad}
        pieces = exported_pieces(self.stages, self.ranks, like)
        whole = whole_tensors(pieces, self._factory.layout, self.world)
        return math.fsum(float(out.loss) for out in outputs), whole

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[Tensor]:
        """Log-probabilities of tokens 1.. of each sequence: fp32 [len - 1] each, on the CPU."""
        if not 0.0 < temperature < math.inf:
            raise MilesError(f"temperature is {temperature}; logits are divided by it, so it must be above 0")
        result = [torch.zeros(0)] * len(sequences)
        packs = self._worker.score_works(
            sequences, temperature=temperature, micro_batch_tokens=self.section.micro_batch_tokens
        )
        if not packs:
            return result
        works = [work for _, work in packs]
        priced = self._price(works)[: len(works)]
        scored = self._from_last_stage([part.logprobs_T.cpu() for part in priced])
        for (indices, _), logprobs_T in zip(packs, scored, strict=True):
            parts = logprobs_T.split([len(sequences[i]) - 1 for i in indices])
            for index, part in zip(indices, parts, strict=True):
                result[index] = part.clone()
        return result

    def export_adapter(self, experts: range | None = None) -> AdapterUpdate:
        """The whole adapter, put together from all ranks' parts, or the shard with the factors of `experts`; see
        `adapter_export.export`."""
        pieces = exported_pieces(self.stages, self.ranks)
        return export(
            pieces, self._factory.layout, self.world, version=self._version, config=self.adapter, experts=experts
        )

    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill every rank's factors from a whole adapter; see `adapter_shards.load_adapter`."""
        load_adapter(exported_pieces(self.stages, self.ranks), self._factory.layout, self.adapter, tensors)
        self._optimizer.reload_masters()

    def sleep(self, *, base: bool = False) -> None:
        """Give back the device memory of masters, moments and gradients until `wake`; nothing when it is given back.

        `base`: that of the frozen weights too, where no engine of this process reads them. Between the two only
        `export_adapter` may be called.
        """
        if self._sleeper is None:
            kept = optimizer_tensors(self._chunks, self._optimizer.megatron)
            kept += base_tensors(self.base) if base else []
            self._sleeper = Sleeper(kept, gradient_buffers(self._chunks))

    def wake(self) -> None:
        """Take the memory again; what was in it is as before. Nothing when awake."""
        if self._sleeper is not None:
            self._sleeper.wake()
            self._sleeper = None

    def save(self, folder: Path) -> Writing | None:
        """With `trainer.async_checkpoint` this rank's file is still being written; see `Checkpoints.save`."""
        return self._checkpoints.save(folder, self._version, background=self.section.async_checkpoint)

    def load(self, folder: Path) -> None:
        """Bring back what `save` wrote at any layout; see `Checkpoints.load`."""
        self._version = self._checkpoints.load(folder)

    def _old_logprobs(self, works: Sequence[Sequence[Work]]) -> list[list[Tensor] | None]:
        """The policy's log-probabilities before the harvest's first update; None where they are the current ones."""
        if len(works) < 2:
            return [None] * len(works)
        return [[priced.logprobs_T for priced in self._price(own)] for own in works]

    def _mini_batch(
        self, mini: MiniBatch, works: Sequence[Work], old: list[Tensor] | None = None, *, force_all_reduce: bool = False
    ) -> list[LossOutput]:
        """Fill the parameters' `main_grad` with the gradient of one mini-batch; the losses of all ranks' micro-batches.

        `works`: what `_works` made of it, once for all passes. `old`: log-probabilities [T] of each of this rank's
        micro-batches before the harvest's first update; None: the current ones.
        """
        micros = self._share(mini.micro_batches)
        reference: list[Priced] = []
        if self.algorithm.kl_coef > 0:
            with self.adapter_off():
                reference = self._price(works)

        def loss(index: int, priced: Priced) -> LossOutput:
            return self._loss(
                mini, micros[index], priced,
                old=None if old is None else old[index],
                reference=reference[index].logprobs_T if reference else None,
            )  # fmt: skip

        self._optimizer.zero_grad()
        return self._everyone(self._worker.forward_backward(works, loss, force_all_reduce=force_all_reduce))

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

    def _share(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches, and blank ones: ranks must run equally many, as experts and stages
        make them wait for each other, and virtual stages take them by groups of the pipeline's length."""
        dp, group = self.ranks.dp, self.ranks.pp.size if len(self._chunks) > 1 else 1
        count = max(1, -(-len(micro_batches) // dp.size))
        own = list(micro_batches[dp.rank :: dp.size])
        return own + [_BLANK] * (-(-count // group) * group - len(own))

    def _works(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Work]:
        return [
            self._worker.train_work(
                micro, temperature, entropy_gradient=self.algorithm.entropy_coef > 0,
                routing_replay=self.algorithm.routing_replay,
            )
            for micro in self._share(micro_batches)
        ]  # fmt: skip

    def _price(self, works: Sequence[Work]) -> list[Priced]:
        """On the last stage; blank works fill up what virtual stages need."""
        group = self.ranks.pp.size if len(self._chunks) > 1 else 1
        missing = -len(works) % group
        blanks = [self._worker.train_work(_BLANK, 1.0)] * missing
        return self._worker.forward_only([*works, *blanks])

    def _everyone(self, outputs: list[LossOutput]) -> list[LossOutput]:
        """One merged output for each data-parallel rank, on every rank; the last stage's first member speaks for it."""
        if self.world.size == 1:
            return outputs
        own = None
        if outputs and self.ranks.tp.rank == self.ranks.cp.rank == 0:
            sums = merge_sums(out.sums for out in outputs)
            own = math.fsum(float(out.loss) for out in outputs), {name: float(v) for name, v in sums.items()}
        return [
            LossOutput(
                loss=torch.tensor(loss, dtype=torch.float64),
                sums={name: torch.tensor(v, dtype=torch.float64) for name, v in sums.items()},
            )
            for loss, sums in (found for found in self.world.gather(own) if found is not None)
        ]

    def _from_last_stage(self, found: list[Tensor]) -> list[Tensor]:
        if self.ranks.pp.size == 1:
            return found
        return next(parts for parts in self.world.gather(found) if parts)

    def _check_finite(self, norms: Sequence[float]) -> None:
        if not math.isfinite(norms[-1]):
            raise MilesError(
                f"the gradient norm is {norms[-1]} in update {len(norms)} of step {self._version + 1}; the adapter is "
                "as before this update: look at the metrics of the steps before, lower trainer.lr in the run's "
                "recipe.yaml, and go on with train RUN --resume"
            )


_BLANK = MicroBatch(
    tokens=torch.zeros(1, dtype=torch.int64),
    cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
    targets=torch.zeros(1, dtype=torch.int64),
    loss_mask=torch.zeros(1),
    advantages=torch.zeros(1),
    rollout_logprobs=torch.zeros(1),
    sequence_ids=torch.zeros(0, dtype=torch.int64),
)  # without a prediction that counts


def _mean(values: Sequence[float]) -> float:
    """0 for none: a harvest without a usable group takes no update."""
    return math.fsum(values) / len(values) if values else 0.0
