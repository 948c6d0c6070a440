"""Tokens a second of an engine that doesn't speculate, verifies all, or trims: in one process, turn by turn.

Each mode has an engine of its own on the same base. Every round asks each of them, in an order that moves on, for as
many answers as the batch, with the same seeds: what differs is time. Spreads are over the rounds, and modes are
compared within each of them, since what else a machine does changes from round to round.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from miles_k3.adapters.peft_io import load_peft
from miles_k3.adapters.transport import publish
from miles_k3.adapters.update import make_update
from miles_k3.assemble import (
    DTYPES,
    Model,
    adapter_config,
    load_model,
    longest_sequence,
    make_embedded_engine,
    model_config,
)
from miles_k3.bench.engine import random_update
from miles_k3.config import Recipe
from miles_k3.config_speculative import SpeculativeSection
from miles_k3.drafting import new_draft_config
from miles_k3.errors import ConfigError
from miles_k3.files import write_text
from miles_k3.k3.random_weights import random_base
from miles_k3.launch import pick_device, refuse_other_engine
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.proposal import Speculative
from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.draft_train import initial_weights
from miles_k3.rollout.speculative.engine_costs import measure_engine
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.tasks.registry import make_task
from miles_k3.speculating import speculative_of
from miles_k3.types import SamplingParams
from miles_k3.world import ALONE

MODES = (PlanMode.OFF, PlanMode.VERIFY_ALL, PlanMode.TRIM)
WARM_UPS = 8  # at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One mode at one batch: generated tokens a second, prompts included in the time, and how many times those of a
    plain engine in the same round; accepted tokens a verify."""

    batch: int
    mode: str
    median: float
    lowest: float
    highest: float
    beside: float
    beside_lowest: float
    beside_highest: float
    accepted: float
    verified: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """`known`: pretend that each drafted token is accepted with this chance, whatever draft and policy say; None
    goes by the rule. `random_draft`: weights of no use and the shapes of a real one, for costs. `cpu_clock`:
    seconds of the process instead of the wall's, for an engine on a CPU that others use too. `learning`: rounds at each
    batch that don't count, for `trim` finds out what pays there."""

    batches: Sequence[int]
    new_tokens: int
    rounds: int
    known: float | None
    random_draft: bool
    random_weights: bool
    temperature: float
    past_stop: bool
    cpu_clock: bool = False
    learning: int = 0

    @property
    def clock(self) -> Callable[[], float]:
        return time.process_time if self.cpu_clock else time.perf_counter


def bench_modes(
    recipe: Recipe, adapter: Path | None, plan: BenchPlan, out: Path, told: Callable[[Rate], None]
) -> list[Rate]:
    """Measure, write speculative.json and costs.json (what `rollout.speculative.costs` takes) into `out`."""
    refuse_other_engine(recipe, "bench speculative", "measures the embedded engine, the only one that drafts")
    _refuse(recipe.rollout.speculative, plan)
    model = _random_model(recipe) if plan.random_weights else load_model(recipe, ALONE)
    speculative = _speculative(recipe, model, plan)
    engines = {mode: _engine(recipe, model, plan, speculative, mode) for mode in MODES}
    for engine in engines.values():
        engine.runner.clock = plan.clock
    for engine in engines.values():
        if plan.random_weights:
            engine.load_adapter(random_update(engine, adapter_config(recipe)))
        elif adapter is not None:
            publish(make_update(0, *load_peft(adapter, model.config)), engine)
    prompts = _prompts(recipe, model, max(plan.batches), plan)
    profile = measure_engine(engines[PlanMode.TRIM], loads=list(plan.batches))
    engines[PlanMode.TRIM].speculator.planner.profile = profile  # type: ignore[union-attr]
    out.mkdir(parents=True, exist_ok=True)
    profile.save(out / "costs.json")
    rates: list[Rate] = []
    for batch in plan.batches:
        for rate in _rates(engines, prompts[:batch], plan):
            told(rate)
            rates.append(rate)
        content = {"plan": asdict(plan), "rates": [asdict(r) for r in rates]}
        write_text(out / "speculative.json", json.dumps(content, indent=1) + "\n")  # what an end at the next leaves
    for engine in engines.values():
        engine.close()
    return rates


def markdown(rates: Sequence[Rate]) -> str:
    """A line for each batch and mode."""
    lines = ["| batch | mode | tokens/s, median (range) | beside off (range) | accepted a verify | verified a verify |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    lines += [
        f"| {r.batch} | {r.mode} | {r.median:,.0f} ({r.lowest:,.0f}-{r.highest:,.0f}) | "
        f"{r.beside:.2f} ({r.beside_lowest:.2f}-{r.beside_highest:.2f}) | {r.accepted:.2f} | {r.verified:.2f} |"
        for r in rates
    ]
    return "\n".join(lines)


# --- measuring ------------------------------------------------------------------------------------------------------
def _rates(engines: dict[PlanMode, EmbeddedEngine], prompts: Sequence[Sequence[int]], plan: BenchPlan) -> list[Rate]:
    _warm_up(engines, prompts, plan)
    for turn in range(plan.rounds, plan.rounds + plan.learning):
        _round(engines, prompts, plan, turn)
    before = {mode: _counts(engine) for mode, engine in engines.items()}
    rounds = [_round(engines, prompts, plan, turn) for turn in range(plan.rounds)]
    rates = []
    for mode in MODES:
        verifies, accepted, drafted = (a - b for a, b in zip(_counts(engines[mode]), before[mode], strict=True))
        found, pairs = [each[mode] for each in rounds], [each[mode] / each[PlanMode.OFF] for each in rounds]
        rates.append(Rate(
            batch=len(prompts), mode=str(mode), median=statistics.median(found), lowest=min(found), highest=max(found),
            beside=statistics.median(pairs), beside_lowest=min(pairs), beside_highest=max(pairs),
            accepted=accepted / max(1, verifies), verified=drafted / max(1, verifies),
        ))  # fmt: skip
    return rates


def _round(
    engines: dict[PlanMode, EmbeddedEngine], prompts: Sequence[Sequence[int]], plan: BenchPlan, turn: int
) -> dict[PlanMode, float]:
    """Tokens a second of each engine, which take turns at being the first."""
    found = {}
    for mode in (MODES[(i + turn) % len(MODES)] for i in range(len(MODES))):
        seconds, tokens = _ask(engines[mode], prompts, plan, turn)
        found[mode] = tokens / seconds
    return found


def _warm_up(engines: dict[PlanMode, EmbeddedEngine], prompts: Sequence[Sequence[int]], plan: BenchPlan) -> None:
    """Rounds that don't count, until one records nothing: graphs are recorded at their first use."""
    first = plan.learning + plan.rounds  # of turns that are nobody else's
    for turn in range(first, first + WARM_UPS):
        before = _num_recorded(engines)
        _round(engines, prompts, plan, turn)
        if _num_recorded(engines) == before:
            return


def _num_recorded(engines: dict[PlanMode, EmbeddedEngine]) -> int:
    return sum(0 if e.runner.graphs is None else e.runner.graphs.num_recorded for e in engines.values())


def _ask(engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], plan: BenchPlan, turn: int) -> tuple[float, int]:
    """Seconds, and the tokens of the answers."""
    stop = () if plan.past_stop or plan.random_weights else (engine.config.eos_token_id,)

    async def run() -> int:
        params = [
            SamplingParams(
                temperature=plan.temperature,
                max_new_tokens=plan.new_tokens,
                seed=1000 * turn + i,
                stop_token_ids=stop,
            )
            for i in range(len(prompts))
        ]
        got = await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, params, strict=True)))
        return sum(len(answer.token_ids) for answer in got)

    started = plan.clock()
    tokens = asyncio.run(run())
    return plan.clock() - started, tokens


def _counts(engine: EmbeddedEngine) -> tuple[int, int, int]:
    if engine.speculator is None:
        return 0, 0, 0
    stats = engine.speculator.stats()
    verifies = sum(n for name, n in stats.items() if name.startswith("verifies_accepting_"))
    return verifies, stats["accepted_tokens"], stats["drafted_tokens"]


# --- parts ----------------------------------------------------------------------------------------------------------
def _engine(recipe: Recipe, model: Model, plan: BenchPlan, speculative: Speculative, mode: PlanMode) -> EmbeddedEngine:
    off = recipe.rollout.speculative.model_copy(update={"mode": "off", "train": False})
    most = max(plan.batches)
    rollout = recipe.rollout.model_copy(update={"speculative": off, "max_running": most, "num_pages": 0})
    sampling = recipe.rollout.sampling.model_copy(update={"max_new_tokens": plan.new_tokens})
    recipe = recipe.model_copy(update={"rollout": rollout.model_copy(update={"sampling": sampling})})
    how = None
    if mode is not PlanMode.OFF:
        how = Speculative(
            config=speculative.config, weights=speculative.weights, mode=mode, accept=speculative.accept,
            num_draft_tokens=speculative.num_draft_tokens, verify_tokens=speculative.verify_tokens,
            supposed_acceptance=plan.known,
        )  # fmt: skip
    return make_embedded_engine(recipe, model, longest_sequence(recipe, model.config), speculative=how)


def _refuse(section: SpeculativeSection, plan: BenchPlan) -> None:
    """Raises ConfigError before a model is loaded for nothing."""
    if section.draft is None and not plan.random_draft:
        raise ConfigError(
            "rollout.speculative.draft is null; name one with --set rollout.speculative.draft=FOLDER, or measure with "
            "--random-draft"
        )


def _speculative(recipe: Recipe, model: Model, plan: BenchPlan) -> Speculative:
    section = recipe.rollout.speculative.model_copy(update={"mode": "verify_all", "costs": None})
    if plan.random_draft:
        config = new_draft_config(model.config)
        return Speculative(
            config=config, weights=initial_weights(config, seed=0), accept=AcceptMode(section.accept),
            num_draft_tokens=section.num_draft_tokens, verify_tokens=section.verify_tokens,
        )  # fmt: skip
    found = speculative_of(section, model.config)
    assert found is not None  # refused otherwise
    return found


def _prompts(recipe: Recipe, model: Model, count: int, plan: BenchPlan) -> list[Sequence[int]]:
    if plan.random_weights:
        rng = np.random.default_rng(0)
        return [rng.integers(0, model.config.vocab_size, 32).tolist() for _ in range(count)]
    return [p.token_ids for p in make_task(recipe.task, model.tokenizer, seed=recipe.run.seed).next(count)]


def _random_model(recipe: Recipe) -> Model:
    """The recipe's shapes with random weights, made on the device."""
    config = model_config(recipe)
    device = pick_device(recipe.model.device)
    base = random_base(config, dtype=DTYPES[recipe.model.dtype], device=device, base_dtype=recipe.model.base_dtype)
    return Model(config=config, base=base, tokenizer=None)
