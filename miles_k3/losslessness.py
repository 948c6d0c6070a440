"""Whether speculation changes nothing: answers, their distribution, and the state that every commit leaves.

Both engines serve from one base: one plain, one as the recipe says. Written to FOLDER/report.md and report.json.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from miles_k3.adapters.peft_io import load_peft
from miles_k3.adapters.transport import publish
from miles_k3.adapters.update import make_update
from miles_k3.assemble import load_model, longest_sequence, make_embedded_engine, model_config
from miles_k3.config import Recipe
from miles_k3.config_speculative import SpeculativeSection
from miles_k3.errors import ConfigError
from miles_k3.files import write_text
from miles_k3.launch import refuse_draft, refuse_other_engine
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.speculative.audit import CommitAudit
from miles_k3.rollout.speculative.taps import target_states
from miles_k3.rollout.tasks.registry import make_task
from miles_k3.types import Completion, SamplingParams
from miles_k3.world import ALONE

log = logging.getLogger(__name__)

DEPTH = 4  # first tokens of an answer whose joint distribution is tested; the first is never drafted
SIGMAS = 5.0  # that a statistic may be off
TIES = {"float32": 1e-3, "bfloat16": 0.25}  # logits this close may be rounded either way by a batch of other rows
SHIFT = 0.02  # that the distribution test has to see
RARE = 5.0  # expected answers below which cells are one
Answer = tuple[int, ...]  # its first tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """Answers of both engines. `ties`: first differences where the two likeliest tokens are as close as rounding."""

    prompts: int
    tokens: int
    same: int
    ties: int
    largest_gap: float
    logprob_diff: float

    @property
    def passed(self) -> bool:
        return self.same + self.ties == self.prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Sampled answers' first tokens against their exact probabilities. Statistics in standard deviations; `visible`: by
    how much the likeliest answer's probability (of several prompts: their mean) may be off before it is seen; `enough`:
    the samples that would see SHIFT of it."""

    samples: int
    cells: int
    likeliest: float
    chi_square: float
    worst_cell: float
    visible: float
    enough: int

    @property
    def differs(self) -> bool:
        return max(self.chi_square, self.worst_cell) >= SIGMAS

    @property
    def blind(self) -> bool:
        return self.visible > SHIFT

    @property
    def passed(self) -> bool:
        return not (self.differs or self.blind)


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Commits, and requests in them by the positions that they kept; `wrong` left another state than decode does."""

    commits: int
    kept: dict[int, int]
    wrong: int

    @property
    def passed(self) -> bool:
        return self.commits > 0 and self.wrong == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of it, with what the draft was worth: accepted tokens of a verify."""

    greedy: Greedy
    distributions: tuple[Distribution, ...]
    states: States
    mean_accepted: float

    @property
    def passed(self) -> bool:
        return self.greedy.passed and self.states.passed and all(d.passed for d in self.distributions)

    @property
    def differs(self) -> bool:
        """Whether anything was found that plain decoding does otherwise."""
        return not self.greedy.passed or self.states.wrong > 0 or any(d.differs for d in self.distributions)

    @property
    def missing(self) -> list[str]:
        """What this run can't tell, one sentence each with what would."""
        found = []
        if any(d.blind for d in self.distributions):
            enough = max(d.enough for d in self.distributions)
            found.append(
                f"{self.distributions[0].samples} samples can't show a shift of {SHIFT:.0%}: take --samples {enough} "
                "or more"
            )
        if not self.states.commits:
            found.append("nothing was drafted, so no state was compared: take rollout.speculative.mode=verify_all")
        return found


def verify_lossless(
    recipe: Recipe, adapter: Path | None, out: Path, *, num_prompts: int, samples: int, sampled_prompts: int
) -> Report:
    """Ask both engines, compare, and write the report. Raises ConfigError where the recipe doesn't speculate."""
    refuse_other_engine(recipe, "verify-lossless", "compares the embedded engine with and without speculation")
    if recipe.rollout.speculative.mode == "off":
        raise ConfigError(
            "rollout.speculative.mode is off: nothing to verify; add --set rollout.speculative.mode=verify_all and "
            "--set rollout.speculative.draft=FOLDER"
        )
    refuse_draft(recipe.rollout.speculative, model_config(recipe))
    out.mkdir(parents=True, exist_ok=True)  # or minutes of work have nowhere to go
    model = load_model(recipe, ALONE)
    off = recipe.rollout.model_copy(update={"speculative": SpeculativeSection()})
    longest = longest_sequence(recipe, model.config)
    plain = make_embedded_engine(recipe.model_copy(update={"rollout": off}), model, longest)
    speculating = make_embedded_engine(recipe, model, longest)
    if adapter is not None:
        config, tensors = load_peft(adapter, model.config)
        for engine in (plain, speculating):
            publish(make_update(0, config, tensors), engine)
    task = make_task(recipe.task, model.tokenizer, seed=recipe.run.seed)
    prompts = [p.token_ids for p in task.next(num_prompts)]
    room = plain.max_sequence_tokens - max(map(len, prompts))
    assert speculating.speculator is not None
    if (needed := DEPTH + speculating.speculator.at.config.block_size) > room:
        raise ConfigError(
            f"sampled answers take {needed} tokens, for whole blocks, and the longest prompt leaves {room}; add "
            f"--set rollout.sampling.max_new_tokens={recipe.rollout.sampling.max_new_tokens + needed - room}"
        )
    most = min(recipe.rollout.sampling.max_new_tokens, room)
    report = compare(
        plain, speculating, prompts, max_new_tokens=most, samples=samples, sampled_prompts=sampled_prompts,
        tie=TIES[recipe.model.dtype],
    )  # fmt: skip
    plain.close()
    speculating.close()
    write_text(out / "report.json", json.dumps({"passed": report.passed, **asdict(report)}, indent=1) + "\n")
    write_text(out / "report.md", markdown(report))
    return report


def compare(
    plain: EmbeddedEngine, speculating: EmbeddedEngine, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
    samples: int, sampled_prompts: int, tie: float,
) -> Report:  # fmt: skip
    """Every commit of `speculating` is audited. Answers go on past their ends, so that there is something to draft."""
    speculator = speculating.speculator
    assert speculator is not None
    audit = speculator.audit = CommitAudit(speculating.runner.model.conv_weights())
    params = [SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens) for _ in prompts]
    expected = _answers(plain, prompts, params)
    log.info("comparing %d greedy answers of both engines", len(prompts))
    greedy = _compare_greedy(plain, prompts, expected, _answers(speculating, prompts, params), tie)
    chosen = _uncertain(plain, prompts, expected, sampled_prompts)
    log.info("sampling %d answers to each of %d prompts", samples, len(chosen))
    longest = DEPTH + speculator.at.config.block_size
    found = tuple(_distribution(plain, speculating, prompt, samples, longest) for prompt in chosen)
    stats = speculator.stats()
    verifies = sum(count for name, count in stats.items() if name.startswith("verifies_accepting_"))
    return Report(
        greedy=greedy, distributions=found,
        states=States(commits=audit.commits, kept=dict(sorted(audit.kept.items())), wrong=audit.wrong),
        mean_accepted=stats["accepted_tokens"] / max(1, verifies),
    )  # fmt: skip


def _answers(
    engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, params, strict=True)))

    return asyncio.run(run())


def _compare_greedy(
    plain: EmbeddedEngine, prompts: Sequence[Sequence[int]], expected: Sequence[Completion],
    found: Sequence[Completion], tie: float,
) -> Greedy:  # fmt: skip
    same, gaps, diff = 0, [], 0.0
    for prompt, a, b in zip(prompts, expected, found, strict=True):
        pairs = list(zip(a.token_ids, b.token_ids, strict=False))
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        for x, y in list(zip(a.logprobs, b.logprobs, strict=False))[:at]:
            diff = max(diff, abs(x - y))
        if at is None and len(a.token_ids) == len(b.token_ids):
            same += 1
        else:
            cut = len(pairs) if at is None else at
            gaps.append(_gap(plain, [*prompt, *a.token_ids[:cut]], a.token_ids[cut:], b.token_ids[cut:]))
    return Greedy(
        prompts=len(prompts), tokens=sum(len(a.token_ids) for a in expected), same=same,
        ties=sum(gap <= tie for gap in gaps), largest_gap=max(gaps, default=0.0), logprob_diff=diff,
    )  # fmt: skip


def _gap(plain: EmbeddedEngine, sequence: Sequence[int], a: Sequence[int], b: Sequence[int]) -> float:
    """How far apart the logits of two tokens are that both engines took for the likeliest."""
    if not a or not b:
        return float("inf")
    state = target_states(plain, [sequence], [0])[0]
    logits_V = plain.runner.model.head(state.final_TH[-1:])[0]
    return float((logits_V[a[0]] - logits_V[b[0]]).abs())


# --- distribution ---------------------------------------------------------------------------------------------------
def _uncertain(
    plain: EmbeddedEngine, prompts: Sequence[Sequence[int]], expected: Sequence[Completion], count: int
) -> list[Sequence[int]]:
    """Prompts whose likeliest answer begins about as often as not: a shift shows there."""
    able = [(p, e.token_ids[:DEPTH]) for p, e in zip(prompts, expected, strict=True)][:256]
    found = plain.score([[*p, *tokens] for p, tokens in able])
    chances = [float(s[len(p) - 1 :].sum().exp()) for s, (p, _) in zip(found, able, strict=True)]
    order = sorted(range(len(able)), key=lambda i: abs(chances[i] - 0.5))
    return [able[i][0] for i in order[:count]]


def _distribution(
    plain: EmbeddedEngine, speculating: EmbeddedEngine, prompt: Sequence[int], samples: int, longest: int
) -> Distribution:
    """Answers go on behind the tokens that count, so that blocks are whole."""
    params = [SamplingParams(max_new_tokens=longest, seed=i) for i in range(samples)]
    counts = Counter(a.token_ids[:DEPTH] for a in _answers(speculating, [prompt] * samples, params))
    seen = list(counts)
    scores = plain.score([[*prompt, *tokens] for tokens in seen])
    exact = {tokens: float(s[len(prompt) - 1 :].double().sum().exp()) for tokens, s in zip(seen, scores, strict=True)}
    return against_exact([(counts, exact)])


def against_exact(groups: Sequence[tuple[Mapping[Answer, int], Mapping[Answer, float]]]) -> Distribution:
    """Counts of answers, and the exact probabilities of all of them that are frequent, for each of some prompts."""
    chi, freedom, cells, worst = 0.0, 0, 0, 0.0
    tops: list[tuple[float, float, float]] = []  # of each likeliest answer: expected count, variance, excess
    for counts, exact in groups:
        samples = sum(counts.values())
        p = torch.tensor([exact[answer] for answer in exact], dtype=torch.float64)
        n = torch.tensor([counts.get(answer, 0) for answer in exact], dtype=torch.float64)
        often = p * samples >= RARE
        p = torch.cat([p[often], (1 - p[often].sum()).clamp(min=0.0)[None]])  # the rest, seen or not, is one cell
        n = torch.cat([n[often], (samples - n[often].sum())[None]])
        if often.any():
            top = int(p[:-1].argmax())
            expected = samples * float(p[top])
            tops.append((expected, expected * (1 - float(p[top])), float(n[top]) - expected))
        p, n = p[p * samples >= 1.0], n[p * samples >= 1.0]
        deviation = (n - samples * p) / (samples * p * (1 - p)).clamp(min=1e-12).sqrt()
        worst = max(worst, float(deviation.abs().max()))
        chi += float(((n - samples * p) ** 2 / (samples * p)).sum())
        freedom, cells = freedom + max(1, len(p) - 1), cells + len(p)
    total = sum(sum(counts.values()) for counts, _ in groups)
    expected, variance, excess = (sum(column) for column in zip(*tops, strict=True)) if tops else (0.0, 0.0, 0.0)
    return Distribution(
        samples=total, cells=cells, likeliest=expected / total, chi_square=(chi - freedom) / (2 * freedom) ** 0.5,
        worst_cell=max(worst, abs(excess) / max(variance, 1e-12) ** 0.5),
        visible=SIGMAS * variance**0.5 / total if tops else 1.0,
        enough=max(enough_samples(max(exact.values())) for _, exact in groups),
    )  # fmt: skip


def enough_samples(likeliest: float) -> int:
    """How many show a shift of SHIFT of an answer with this probability, and have it often enough to be a cell."""
    return math.ceil(max(RARE / max(likeliest, 1e-300), likeliest * (1 - likeliest) * (SIGMAS / SHIFT) ** 2))


# --- report ---------------------------------------------------------------------------------------------------------
def markdown(report: Report) -> str:
    """One page."""
    g, s = report.greedy, report.states
    lines = [
        f"# Lossless speculation: {_word(report.passed, report.differs)}", "",
        *(f"{sentence[0].upper()}{sentence[1:]}.\n" for sentence in report.missing),
        f"Mean accepted length {report.mean_accepted:.2f} drafted tokens a verify.", "",
        f"## Greedy answers: {_word(g.passed)}", "",
        f"{g.same} of {g.prompts} answers ({g.tokens} tokens) are plain decoding's, token for token; {g.ties} of the "
        f"others differ first where two logits are as close as rounding (largest gap {g.largest_gap:.2g}). "
        f"Log-probabilities differ by up to {g.logprob_diff:.2g}.", "",
        "## Distribution at temperature 1: "
        f"{_word(all(d.passed for d in report.distributions), any(d.differs for d in report.distributions))}", "",
        f"The first {DEPTH} tokens of sampled answers against their exact probabilities; {SIGMAS:g} standard "
        f"deviations are the limit, and a shift of {SHIFT:.0%} has to be visible.", "",
        "| samples | cells | likeliest answer | chi-square | worst cell | visible shift |", "|---|---|---|---|---|---|",
        *(f"| {d.samples} | {d.cells} | {d.likeliest:.3f} | {d.chi_square:+.2f} | {d.worst_cell:.2f} | "
          f"{d.visible:.2%} |" for d in report.distributions), "",
        f"## State after each commit: {_word(s.passed, s.wrong > 0)}", "",
        f"{s.commits} commits; states and windows of all KDA layers bit for bit those of decoding the kept tokens one "
        f"by one, but for {s.wrong} requests.", "",
        "| kept positions | " + " | ".join(map(str, s.kept)) + " |", "|---" * (len(s.kept) + 1) + "|",
        "| requests | " + " | ".join(map(str, s.kept.values())) + " |",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _word(passed: bool, differs: bool = True) -> str:
    return "passed" if passed else "FAILED" if differs else "NOT SHOWN"
