"""The ring: prompts, rollouts, rewards, batch, step, sync. One RL step reads from top to bottom."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from miles_k3.adapters.peft_io import load_peft, save_peft
from miles_k3.adapters.transport import publish
from miles_k3.adapters.update import make_update
from miles_k3.assemble import Parts, adapter_config, assembled
from miles_k3.batch import make_batch
from miles_k3.config import Recipe
from miles_k3.errors import AdapterError, CheckpointError
from miles_k3.metrics import MetricsLog, StepTimer, peak_memory_bytes
from miles_k3.plot import plot_run
from miles_k3.protocols import Trainer
from miles_k3.rollout.collect import AnswerGrader, EvalResult, collect, evaluate
from miles_k3.run_folder import RunFolder
from miles_k3.sync import AdapterSync, make_canary
from miles_k3.types import Grade, Group, Prompt
from miles_k3.wandb_sink import WandbSink

log = logging.getLogger(__name__)

EVAL_SEED = 0  # the same draws at every evaluation of every run, so that accuracies compare
STATE_FILE = "loop.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. `before` and `after` evaluate the first and the last adapter, None where nothing was evaluated.

    `steps` counts the adapter's steps; `interrupted` says that a signal ended the run early, with a checkpoint.
    """

    steps: int
    before: EvalResult | None
    after: EvalResult | None
    adapter: Path
    plots: tuple[Path, ...]
    seconds: float
    peak_memory_bytes: int
    interrupted: bool


def run_training(recipe: Recipe, run: RunFolder, *, resume: bool = False) -> RunResult:
    """Train as the recipe says, into `run`. With `resume`, go on from the newest checkpoint, or from the start."""
    started = time.perf_counter()
    with assembled(recipe, training=True) as parts, stop_signal() as stop:
        ring = Ring(recipe, run, parts)
        first = ring.restore() if resume else ring.begin()
        with _open_log(recipe, run) as metrics:
            if first and first >= recipe.run.steps:
                metrics.note(
                    f"the run has made {first} steps already and run.steps is {recipe.run.steps}, so no step is left; "
                    "raise run.steps to go on"
                )
            before = ring.first_sync(first, metrics)
            step, after = first, before if recipe.run.steps == 0 else None
            while step < recipe.run.steps and not stop:
                step += 1
                after = ring.step(step, metrics)
                if stop or step == recipe.run.steps or (recipe.run.save_every and step % recipe.run.save_every == 0):
                    ring.save(step)
            if stop:
                metrics.note(f"stopped by a signal after step {step}; go on with --resume")
            adapter = ring.export()
        return RunResult(
            steps=step, before=before, after=after, adapter=adapter, plots=tuple(plot_run(run.path)),
            seconds=time.perf_counter() - started, peak_memory_bytes=peak_memory_bytes(), interrupted=bool(stop),
        )  # fmt: skip


def run_eval(recipe: Recipe, adapter: Path | None) -> EvalResult:
    """Held-out quality of the base, or with the adapter of a PEFT folder."""
    with assembled(recipe, training=False) as parts:
        if adapter is not None:
            config, tensors = load_peft(adapter, parts.model.config)
            if config != adapter_config(recipe):
                raise AdapterError(
                    f"{adapter} is {config}, the recipe says {adapter_config(recipe)}; set lora.rank, lora.alpha and "
                    "lora.share_gate_up_a to the adapter's"
                )
            publish(make_update(0, config, tensors), parts.engine)
        return _evaluate(recipe, parts)


class Ring:
    """The parts of one run and the verbs that move them on by a step."""

    def __init__(self, recipe: Recipe, run: RunFolder, parts: Parts) -> None:
        assert parts.trainer is not None
        self.recipe, self.run, self.parts = recipe, run, parts
        self.trainer: Trainer = parts.trainer
        canary = make_canary(recipe, parts.task, parts.model.tokenizer, parts.model.config.eos_token_id)
        self.sync = AdapterSync(recipe, canary, parts.trainer, parts.engine)
        self.timer = StepTimer()

    # --- one step -----------------------------------------------------------------------------------------------
    def step(self, step: int, metrics: MetricsLog) -> EvalResult | None:
        """Harvest, train, hand over; the evaluation where one is due. Writes the step's line of metrics."""
        recipe, timer = self.recipe, self.timer
        prompts = self.parts.task.next(recipe.rollout.prompts_per_step)
        groups = self._harvest(prompts, step)
        batch = make_batch(
            groups, recipe.algorithm, micro_batch_tokens=recipe.trainer.micro_batch_tokens,
            updates_per_rollout=recipe.trainer.updates_per_rollout, temperature=recipe.rollout.sampling.temperature,
        )  # fmt: skip
        with timer.phase("train"), self._asleep():
            stats = self.trainer.step(batch)
        with timer.phase("sync"):
            synced = self.sync()
        evaluated = self._evaluate_if_due(step)
        seconds = timer.lap()
        metrics.write(step, {
            **_prefixed("rollout", batch.metrics),
            **_prefixed("data/skipped", self.parts.task.skipped),
            **_prefixed("train", {**stats.metrics, "loss": stats.loss, "grad_norm": stats.grad_norm, "lr": stats.lr}),
            **synced, **_eval_metrics(evaluated), **seconds,
            "time/tokens_per_s": _num_tokens(groups) / max(seconds["time/step_s"], 1e-9),
            "memory/peak_bytes": peak_memory_bytes(),
        })  # fmt: skip
        return evaluated

    def _harvest(self, prompts: Sequence[Prompt], step: int) -> list[Group]:
        """Graded groups. Grading overlaps generation; what is left after the last answer counts as reward time."""
        recipe, parts, timer = self.recipe, self.parts, self.timer
        tail = _Tail(parts.rewards)
        with timer.phase("rollout"):
            groups = asyncio.run(collect(
                parts.engine, prompts, group_size=recipe.rollout.group_size, sampling=recipe.rollout.sampling,
                stop_token_ids=[parts.model.config.eos_token_id], seed=recipe.run.seed, step=step, grader=tail,
                mask_truncated=recipe.algorithm.mask_truncated,
            ))  # fmt: skip
        timer.move("rollout", "reward", tail.seconds())
        return groups

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """The engine without its caches while the trainer needs the memory, where the recipe says so."""
        if not self.recipe.rollout.sleep_while_training:
            yield
            return
        self.parts.engine.sleep()
        try:
            yield
        finally:
            self.parts.engine.wake()

    def _evaluate_if_due(self, step: int) -> EvalResult | None:
        every, last = self.recipe.eval.every, step == self.recipe.run.steps
        if not self.recipe.eval.prompts or not (last or step == 0 or (every and step % every == 0)):
            return None
        with self.timer.phase("eval"):
            return _evaluate(self.recipe, self.parts)

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
        step, folder = newest if newest is not None else (0, None)
        self.run.truncate_metrics(step if folder is not None else -1)
        if folder is None:
            return self.begin()
        self.trainer.load(folder / "trainer")
        try:
            state = json.loads((folder / STATE_FILE).read_text())
            self.parts.task.load_state_dict(state["task"])
        except (OSError, ValueError, KeyError) as e:
            raise CheckpointError(
                f"{folder / STATE_FILE}: no data cursor ({e!r}); resume from another checkpoint"
            ) from e
        if self.trainer.version != step or state["step"] != step:
            raise CheckpointError(
                f"{folder}: trainer is at version {self.trainer.version}, data at step {state['step']}, expected {step}"
            )
        return step

    def first_sync(self, step: int, metrics: MetricsLog) -> EvalResult | None:
        """Publish the present version before anything is sampled, so that a broken path fails at the start."""
        synced = self.sync()
        evaluated = self._evaluate_if_due(0) if step == 0 else None
        if step == 0:
            metrics.write(0, {**synced, **_eval_metrics(evaluated), **self.timer.lap()})
        return evaluated

    def save(self, step: int) -> None:
        def write(folder: Path) -> None:
            (folder / "trainer").mkdir()
            self.trainer.save(folder / "trainer")
            (folder / STATE_FILE).write_text(json.dumps({"step": step, "task": self.parts.task.state_dict()}))

        with self.timer.phase("checkpoint"):
            self.run.write_checkpoint(step, write)
            self.run.prune(self.recipe.run.keep_checkpoints)

    def export(self) -> Path:
        """The adapter as a PEFT folder."""
        update = self.trainer.export_adapter()
        save_peft(self.run.adapter, update, self.recipe.model.path, overwrite=True)
        return self.run.adapter


class _Tail:
    """A grader that notes when the last answer came in, so that waiting for grades can be told from generating."""

    def __init__(self, grader: AnswerGrader) -> None:
        self._grader, self._last = grader, time.perf_counter()

    async def grade(self, prompt: Prompt, text: str) -> Grade:
        self._last = time.perf_counter()
        return await self._grader.grade(prompt, text)

    def seconds(self) -> float:
        return time.perf_counter() - self._last


class Stop:
    """True once a signal has asked for the end."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def stop_signal() -> Iterator[Stop]:
    """SIGINT and SIGTERM end the run after the present step, with a checkpoint; a second one ends it at once."""
    stop = Stop()

    def on_signal(number: int, _frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        log.warning(
            "%s: the run ends after this step, with a checkpoint; once more ends it now", signal.Signals(number).name
        )

    try:
        previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us there handles signals
        previous = {}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _open_log(recipe: Recipe, run: RunFolder) -> MetricsLog:
    sink = WandbSink.start(
        run.path, mode=recipe.run.wandb, project=recipe.run.wandb_project, name=recipe.run.name,
        config=recipe.model_dump(mode="json"),
    )  # fmt: skip
    return MetricsLog(run.metrics_path, total_steps=recipe.run.steps, sink=sink)


def _evaluate(recipe: Recipe, parts: Parts) -> EvalResult:
    return asyncio.run(evaluate(
        parts.engine, parts.task.eval_prompts(recipe.eval.prompts), sampling=recipe.rollout.sampling,
        temperature=recipe.eval.temperature, stop_token_ids=[parts.model.config.eos_token_id], seed=EVAL_SEED,
        grader=parts.rewards,
    ))  # fmt: skip


def _eval_metrics(result: EvalResult | None) -> Mapping[str, float]:
    if result is None:
        return {}
    return {
        "eval/accuracy": result.accuracy, "eval/reward": result.mean_reward, "eval/prompts": result.num_prompts,
        "eval/tokens": result.mean_tokens, "eval/failures": sum(result.failures.values()),
    }  # fmt: skip


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _num_tokens(groups: Sequence[Group]) -> int:
    return sum(sample.num_tokens for group in groups for sample in group.samples)
