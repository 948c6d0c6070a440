"""The ring: prompts, rollouts, rewards, batch, step, sync. One RL step reads from top to bottom.

Every rank of a run goes through the same lines. Rollouts are shared by prompts and then gathered, so that each rank has
the whole harvest and makes the same batch of it; rank 0 alone writes files and speaks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from miles_k3.adapters.peft_io import load_peft
from miles_k3.adapters.transport import publish
from miles_k3.adapters.update import make_update
from miles_k3.assemble import DTYPES, EngineMaker, Parts, adapter_config, assembled
from miles_k3.batch import make_batch
from miles_k3.config import Recipe
from miles_k3.cotraining import DraftFollower, SpeculationMeter
from miles_k3.device_memory import device_memory
from miles_k3.errors import AdapterError, CheckpointError
from miles_k3.export.origin import trainer_adapter
from miles_k3.export.peft import write_adapter
from miles_k3.harvest import eval_metrics, harvest, held_out_quality
from miles_k3.launch import train_command
from miles_k3.metrics import MetricsLog, SilentLog, StepTimer, peak_memory_bytes
from miles_k3.plot import plot_finished_run
from miles_k3.protocols import Trainer
from miles_k3.rollout.collect import EvalResult
from miles_k3.rollout.sglang.span import held_experts
from miles_k3.run_folder import RunFolder
from miles_k3.saving import TRAINER, Saver
from miles_k3.stop import stop_signal
from miles_k3.sync import AdapterSync, make_canary
from miles_k3.types import Group
from miles_k3.wandb_sink import WandbSink
from miles_k3.world import ALONE, World


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. `before` and `after` evaluate the first and the last adapter, None where nothing was evaluated.

    `steps` counts the adapter's steps; `stopped_by` is the signal that ended the run early, with a checkpoint. Pictures
    are rank 0's; memory is that of the rank with most.
    """

    steps: int
    before: EvalResult | None
    after: EvalResult | None
    adapter: Path
    plots: tuple[Path, ...]
    seconds: float
    peak_memory_bytes: int
    stopped_by: signal.Signals | None


def run_training(
    recipe: Recipe, run: RunFolder, *, resume: bool = False, new_engine: EngineMaker | None = None
) -> RunResult:
    """Train as the recipe says, into `run`. With `resume`, go on from the newest checkpoint, or from the start.

    `new_engine` gives this rank's engine where it is not in this process. Collective: every rank of `run.world` trains
    here, and all end after the same step.
    """
    started, world, last = time.perf_counter(), run.world, recipe.run.steps
    with assembled(recipe, training=True, world=world, new_engine=new_engine) as parts, stop_signal() as stop:
        ring = Ring(recipe, run, parts)
        first = ring.restore() if resume else ring.begin()
        run.keep_recipe()
        with world.together(lambda: _open_log(recipe, run)) as metrics, ring.saver.outlives():
            if first and first >= last:
                metrics.note(_nothing_left(first, recipe))
            before = ring.first_sync(first, metrics)
            step, after = first, before if last == 0 else None
            stopped = _agreed(stop.signal, world)
            while step < last and stopped is None:
                step += 1
                after = ring.step(step, metrics)
                stopped = _agreed(stop.signal, world) if step < last else None
                ring.save(step, now=stopped is not None or step == last)
            if stopped is not None:
                metrics.note(_how_to_go_on(step, stopped, run))
            adapter = ring.end()
        plots = world.once(lambda: plot_finished_run(run.path))
        return RunResult(
            steps=step, before=before, after=after, adapter=adapter, plots=plots,
            seconds=time.perf_counter() - started, peak_memory_bytes=max(world.gather(peak_memory_bytes())),
            stopped_by=stopped,
        )  # fmt: skip


def run_eval(recipe: Recipe, adapter: Path | None, world: World = ALONE) -> EvalResult:
    """Held-out quality of the base, or with the adapter of a PEFT folder. Collective."""
    with assembled(recipe, training=False, world=world) as parts:
        if adapter is not None:
            config, tensors = load_peft(adapter, parts.model.config)
            if config != adapter_config(recipe):
                raise AdapterError(
                    f"{adapter} is {config}, the recipe says {adapter_config(recipe)}; set lora.rank, lora.alpha and "
                    "lora.share_gate_up_a to the adapter's"
                )
            publish(make_update(0, config, tensors), parts.engine)
        return held_out_quality(recipe, parts)


class Ring:
    """The parts of one run and the verbs that move them on by a step."""

    def __init__(self, recipe: Recipe, run: RunFolder, parts: Parts) -> None:
        assert parts.trainer is not None
        assert parts.model.base is not None  # a trainer computes with it
        self.recipe, self.run, self.parts, self.world = recipe, run, parts, parts.world
        self.trainer: Trainer = parts.trainer
        canary = make_canary(recipe, parts.task, parts.model.tokenizer, parts.model.config.eos_token_id)
        experts = held_experts(recipe, parts.model.config, parts.world.rank, parts.world.size)
        self.sync = AdapterSync(recipe, canary, parts.trainer, parts.engine, parts.world, experts)
        self.follower = DraftFollower.of(
            recipe.rollout.speculative, parts.engine, parts.model.base, parts.world, recipe.run.seed
        )
        self.saver = Saver(
            run, parts.trainer, parts.task, keep=recipe.run.keep_checkpoints, follower=self.follower
        )  # fmt: skip
        self.speculation = SpeculationMeter(parts.engine, parts.world)
        self.timer = StepTimer(memory=device_memory(parts.model.base.device))

    # --- one step -----------------------------------------------------------------------------------------------
    def step(self, step: int, metrics: MetricsLog) -> EvalResult | None:
        """Harvest, train, hand over; the evaluation where one is due. Writes the step's line of metrics."""
        recipe, timer = self.recipe, self.timer
        prompts = self.parts.task.next(recipe.rollout.prompts_per_step)
        with self._trainer_asleep(), self._draft_listens(), self.speculation.measuring():
            groups = harvest(recipe, self.parts, prompts, step, timer)
        with timer.phase("checkpoint"):
            self.saver.poll()  # written by now, and a failure of this step must not cost it
        batch = make_batch(
            groups, recipe.algorithm, micro_batch_tokens=recipe.trainer.micro_batch_tokens,
            updates_per_rollout=recipe.trainer.updates_per_rollout, temperature=recipe.rollout.sampling.temperature,
        )  # fmt: skip
        with timer.phase("train"), self._engine_asleep():
            stats = self.trainer.step(batch)
        drafted: Mapping[str, float] = {}
        if self.follower is not None:
            with timer.phase("draft"):
                drafted = self.follower.step(self.trainer.version)
        with timer.phase("sync"):
            synced = self.sync()
        evaluated = self._evaluate_if_due(step)
        memory = {"memory/peak_bytes": peak_memory_bytes(), **timer.lap_memory()}
        seconds, ranks = timer.lap(), self.world.gather(memory)
        metrics.write(step, {
            **_prefixed("rollout", batch.metrics),
            **_prefixed("data/skipped", self.parts.task.skipped),
            **_prefixed("train", {**stats.metrics, "loss": stats.loss, "grad_norm": stats.grad_norm, "lr": stats.lr}),
            **self.speculation.metrics, **drafted, **synced, **eval_metrics(evaluated), **seconds,
            "time/tokens_per_s": _num_tokens(groups) / max(seconds["time/step_s"], 1e-9),
            **{name: max(rank[name] for rank in ranks) for name in memory},
        })  # fmt: skip
        return evaluated

    def _draft_listens(self) -> AbstractContextManager[None]:
        """Hidden states of the rollouts are kept, where the draft is trained on them."""
        return nullcontext() if self.follower is None else self.follower.listening()

    @contextmanager
    def _engine_asleep(self) -> Iterator[None]:
        """The engine without its caches while the trainer needs the memory, where the recipe says so."""
        if not self.recipe.rollout.sleep_while_training:
            yield
            return
        engine = self.parts.engine
        # Another rank may speak for the engine on this one's GPU, so all wait until all are asleep.
        self.world.together(engine.sleep)
        try:
            yield
        finally:
            engine.wake()

    @contextmanager
    def _trainer_asleep(self) -> Iterator[None]:
        """The trainer without its optimizer's memory while the engine samples, where the recipe says so."""
        if not self.recipe.trainer.sleep_while_rollout:
            yield
            return
        self.trainer.sleep()
        try:
            yield
        finally:
            self.trainer.wake()

    def _evaluate_if_due(self, step: int) -> EvalResult | None:
        every, last = self.recipe.eval.every, step == self.recipe.run.steps
        if not self.recipe.eval.prompts or not (last or step == 0 or (every and step % every == 0)):
            return None
        with self.timer.phase("eval"), self._trainer_asleep():
            return held_out_quality(self.recipe, self.parts)

    # --- begin, save, resume ------------------------------------------------------------------------------------
    def begin(self) -> int:
        """A new run: from B = 0, or from `lora.init_from`."""
        if self.recipe.lora.init_from is not None:
            config, tensors = load_peft(self.recipe.lora.init_from, self.parts.model.config)
            wanted = adapter_config(self.recipe)
            if (config.rank, config.alpha) != (wanted.rank, wanted.alpha):
                raise AdapterError(
                    f"lora.init_from has rank {config.rank} and alpha {config.alpha}, the recipe rank {wanted.rank} "
                    f"and alpha {wanted.alpha}; set lora.rank and lora.alpha to the adapter's"
                )
            self.trainer.load_adapter(tensors)
        return 0

    def restore(self) -> int:
        """The step to go on from: the newest whole checkpoint's, or 0 when the run was killed before its first."""
        newest = self.run.latest_checkpoint()
        self.world.once(lambda: self.run.truncate_metrics(newest[0] if newest else -1))
        if newest is None:
            return self.begin()
        self.saver.restore(*newest)
        return newest[0]

    def first_sync(self, step: int, metrics: MetricsLog) -> EvalResult | None:
        """Publish the present version before anything is sampled, so that a broken path fails at the start."""
        synced = self.sync()
        evaluated = self._evaluate_if_due(0) if step == 0 else None
        if step == 0:
            metrics.write(0, {**synced, **eval_metrics(evaluated), **self.timer.lap()})
        return evaluated

    def save(self, step: int, *, now: bool) -> None:
        """The checkpoint of `step` where one is due, or `now`; otherwise the one under way, if it is ready."""
        every = self.recipe.run.save_every
        with self.timer.phase("checkpoint"):
            if now or (every and step % every == 0):
                self.saver.save(step)
            else:
                self.saver.poll()

    def end(self) -> Path:
        """The last checkpoint is whole, and the adapter is there as a PEFT folder, written from it a part at a time."""
        self.saver.finish()
        if self.trainer.version == 0:  # no step has been taken, so none has been saved
            self.saver.save(0)
            self.saver.finish()
        newest = self.run.latest_checkpoint()
        self.world.once(lambda: self._write_adapter(newest))
        follower = self.follower
        if follower is not None:
            self.world.once(lambda: follower.write(self.run.path / "draft"))
        return self.run.adapter

    def _write_adapter(self, checkpoint: tuple[int, Path] | None) -> None:
        step, folder = checkpoint or (None, self.run.path)
        if step != self.trainer.version:
            raise CheckpointError(
                f"{folder} has the checkpoint of step {step}, expected {self.trainer.version}, which was written just "
                "now: its files were changed or lost; go on with --resume"
            )
        model = self.parts.model
        with trainer_adapter(folder / TRAINER, model.config, DTYPES[self.recipe.model.dtype]) as adapter:
            write_adapter(self.run.adapter, adapter, adapter.verify(), self.recipe.model.path, overwrite=True)


def _agreed(asked: signal.Signals | None, world: World) -> signal.Signals | None:
    """The signal that ends the run, as soon as any rank has one: all end after the same step."""
    return next((found for found in world.gather(asked) if found is not None), None)


def _nothing_left(step: int, recipe: Recipe) -> str:
    way = "raise run.steps to go on"
    if recipe.trainer.lr_decay != "constant":  # such a run keeps its length
        way = "go on in a new run, with --set run.name=OTHER --set lora.init_from=ADAPTER"
    return f"the run is at step {step} and run.steps is {recipe.run.steps}, so no step is left; {way}"


def _how_to_go_on(step: int, stopped: signal.Signals, run: RunFolder) -> str:
    kept = "with a checkpoint" if step else "before the first checkpoint"
    command = train_command(str(run.path), run.world.size, run.world.local_size, run.world.launcher)
    return f"stopped by {stopped.name} after step {step}, {kept}; go on with {command} --resume"


def _open_log(recipe: Recipe, run: RunFolder) -> MetricsLog:
    if not run.world.first:
        return SilentLog()
    sink = WandbSink.start(
        run.path, mode=recipe.run.wandb, project=recipe.run.wandb_project, name=recipe.run.name,
        config=recipe.model_dump(mode="json"),
    )  # fmt: skip
    return MetricsLog(run.metrics_path, total_steps=recipe.run.steps, sink=sink)


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _num_tokens(groups: Sequence[Group]) -> int:
    return sum(sample.num_tokens for group in groups for sample in group.samples)
