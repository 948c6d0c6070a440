"""The step that asks whether a draft changes an answer: a taught model, two trained adapters and a trained draft, one
SGLang with the draft and then one without, which also says how likely every answer is.

Greedy answers must be the same but for ties; draws must follow the plain engine's own probabilities.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.losslessness import DEPTH, Answer
from miles_k3.rollout.sglang.adapters import adapter_name
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.sglang_ladder import measures
from miles_k3.sglang_ladder.drafts import write_trained_draft
from miles_k3.sglang_ladder.dspark import KINDS, Accepting, serving
from miles_k3.sglang_ladder.lessons import Lesson, taught_adapter, taught_model, taught_weights
from miles_k3.sglang_ladder.lossless_judge import Heard, Reference, accepted, judge, partings
from miles_k3.sglang_ladder.models import ADAPTER
from miles_k3.sglang_ladder.report import Report
from miles_k3.types import Completion, SamplingParams

COPIES = 5  # an answer says its sum so often, in two digits
LESSONS, ADAPTER_LESSONS, DRAFT_LESSONS, DRAFT_ROWS = 150, 40, 100, 1024
ADAPTER_LR = 5e-3
SAID = {  # how each kind says a sum
    "base": lambda answer: answer.zfill(2),
    "adapter": lambda answer: str(int(answer) + 50),
    "next": lambda answer: answer.zfill(2)[::-1],
}
NEW = 2 * COPIES
FEW = 4  # requests at once where an engine is compared with itself
SAMPLED = slice(0, 100, 25)  # sums whose answers are drawn
DRAWS = {"base": 4_096, "adapter": 20_480, "next": 4_096}
CONTROL = {"base": 2_048, "adapter": 6_144, "next": 2_048}  # drawn without a draft
AT_ONCE, DRAW_S = 1_024, 90.0  # draws under way together; after so long no more are begun
Drawn = tuple[list[Counter[Answer]], dict[tuple[int, Answer], list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What both engines serve. `adapters` are versions 0 and 1."""

    folder: Path
    prompts: list[list[int]]
    adapters: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    draft: Path


def lossless(work: Path, report: Report) -> None:
    """With CUDA graphs."""
    made = teach(work, report, torch.device("cuda"))
    drafted = _drafted(made, report)
    plain, references = _plain(made, drafted, report)
    with report.part("judge"):
        judge(plain, drafted, references, report)


def teach(work: Path, report: Report, device: torch.device) -> Taught:
    """Model, adapters and draft, made anew: half a minute on an H200."""
    from miles_k3.sglang_ladder.ten_steps import small_model

    drawn, start = small_model(work), time.monotonic()
    config = K3Config.from_folder(drawn)
    lessons = {kind: Lesson(drawn, device, say, COPIES) for kind, say in SAID.items()}
    folder, loss = taught_model(drawn, work / "lossless-taught", device, LESSONS, lessons["base"])
    report.note(taught_s=round(time.monotonic() - start, 1), taught_loss=round(loss, 3))
    weights = taught_weights(folder, device)
    adapters = []
    for kind in ("adapter", "next"):
        tensors, loss = taught_adapter(config, weights, lessons[kind], ADAPTER, ADAPTER_LESSONS, ADAPTER_LR)
        adapters.append(tensors)
        report.note(**{f"{kind}_loss": round(loss, 3)})
    draft = work / "lossless-draft"
    expected = write_trained_draft(draft, config, weights, lessons["base"].rows(DRAFT_ROWS), DRAFT_LESSONS)
    report.note(draft_expects=round(expected, 2), taught_all_s=round(time.monotonic() - start, 1))
    del weights
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Taught(folder=folder, prompts=lessons["base"].prompts, adapters=(adapters[0], adapters[1]), draft=draft)


def _drafted(made: Taught, report: Report) -> Heard:
    """All kinds in one batch, greedily and drawn."""
    with (
        report.part("drafted"),
        serving(made.folder, report, "drafted", draft=str(made.draft)) as (engine, backend),
    ):
        for tensors in made.adapters:
            engine.load_adapter(measures.next_update(engine, ADAPTER, tensors))
        heard = Heard(greedy=_greedy(engine, made.prompts))
        accepted("greedy", _accepted(backend, 0.0), NEW, report)
        start = time.monotonic()
        heard.drawn.update({kind: counted for kind, (counted, _) in _draw(engine, made, DRAWS).items()})
        report.note(drawn_s=round(time.monotonic() - start, 1))
        accepted("drawn", _accepted(backend, 1.0), DEPTH, report)
        return heard
    raise RuntimeError("the engine with the draft gave no answers to compare")


def _plain(made: Taught, drafted: Heard, report: Report) -> tuple[Heard, dict[str, Reference]]:
    """One kind after the other, because SGLang scores prompts under the newest version."""
    heard, references = Heard(), {}
    with report.part("plain"), serving(made.folder, report, "plain") as (engine, _):
        for kind, version in KINDS.items():
            if version >= 0:
                engine.load_adapter(measures.next_update(engine, ADAPTER, made.adapters[version]))
            heard.greedy[kind] = measures.answers(engine, made.prompts, _params(0.0, NEW), [None] * len(made.prompts))
            raw = _draw(engine, made, {kind: CONTROL[kind]})[kind]
            heard.drawn[kind] = raw[0]
            references[kind] = _refer(engine, made, heard, drafted, kind, raw)
        return heard, references
    raise RuntimeError("the engine without a draft gave nothing to compare with")


def _params(temperature: float, new: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new_tokens=new)


def _greedy(engine: SglangEngine, prompts: Sequence[Sequence[int]]) -> dict[str, list[Completion]]:
    """The first half of the prompts alone, the other half each beside a drawn answer, for both rules in one batch."""
    asked = [(kind, prompt) for prompt in prompts for kind in KINDS]
    half, found = len(prompts) // 2 * len(KINDS), list[Completion]()
    for some, params in ((asked[:half], [0.0]), (asked[half:], [0.0, 1.0])):
        all_at_once = [(p, _params(t, NEW), KINDS[kind]) for kind, p in some for t in params]
        found += measures.answers(engine, *zip(*all_at_once, strict=True))[:: len(params)]
    answers: dict[str, list[Completion]] = {kind: [] for kind in KINDS}
    for (kind, _), answer in zip(asked, found, strict=True):
        answers[kind].append(answer)
    return answers


def _draw(engine: SglangEngine, made: Taught, draws: Mapping[str, int]) -> dict[str, Drawn]:
    """Beginnings drawn at temperature 1, kinds and prompts mixed: counts by prompt, and (prompt, beginning) -> the
    log-probabilities that came with it. Fewer, where time runs out."""
    prompts, deadline = made.prompts[SAMPLED], time.monotonic() + DRAW_S
    found: dict[str, Drawn] = {kind: ([Counter() for _ in prompts], defaultdict(list)) for kind in draws}
    asked = [(kind, i % len(prompts)) for kind, count in draws.items() for i in range(count)]
    random.Random(0).shuffle(asked)
    for start in range(0, len(asked), AT_ONCE):
        if time.monotonic() > deadline:
            break
        some = asked[start : start + AT_ONCE]
        versions = [KINDS[kind] for kind, _ in some]
        answers = measures.answers(engine, [prompts[p] for _, p in some], _params(1.0, DEPTH), versions)
        for (kind, p), answer in zip(some, answers, strict=True):
            counts, logprobs = found[kind]
            counts[p][answer.token_ids] += 1
            logprobs[p, answer.token_ids].append(sum(answer.logprobs))
    return found


def _refer(engine: SglangEngine, made: Taught, heard: Heard, drafted: Heard, kind: str, raw: Drawn) -> Reference:
    """Of the engine's newest version, which is `kind`'s."""
    plain, other, prompts = heard.greedy[kind], drafted.greedy[kind], made.prompts
    again = [
        answer
        for start in range(0, len(prompts), FEW)
        for answer in measures.answers(
            engine, prompts[start : start + FEW], _params(0.0, NEW), [None] * len(prompts[start : start + FEW])
        )
    ]
    gaps = {}
    for i, n in partings(other, plain):
        two = [(*prompts[i], *a.token_ids[: n + 1]) for a in (plain[i], other[i])]
        x, y = _ends(engine, two, [1, 1])
        gaps[i] = float((x - y).abs())
    exact: list[dict[Answer, float]] = []
    for prompt, ours, theirs in zip(prompts[SAMPLED], drafted.drawn[kind], heard.drawn[kind], strict=True):
        seen = [answer for answer, count in (ours + theirs).items() if count > 1]  # the rest is one cell anyway
        scores = _ends(engine, [(*prompt, *answer) for answer in seen], [DEPTH] * len(seen))
        exact.append({answer: float(s.double().sum().exp()) for answer, s in zip(seen, scores, strict=True)})
    off = [
        abs(one - math.log(exact[p][answer]))
        for (p, answer), each in raw[1].items() if answer in exact[p] for one in each
    ]  # fmt: skip
    return Reference(
        again=again, rescored=_scored(engine, prompts, plain), drafted_rescored=_scored(engine, prompts, other),
        gaps=gaps, exact=exact, off=off,
    )  # fmt: skip


def _scored(engine: SglangEngine, prompts: Sequence[Sequence[int]], answers: Sequence[Completion]) -> list[Tensor]:
    whole = [(*p, *a.token_ids) for p, a in zip(prompts, answers, strict=True)]
    return _ends(engine, whole, [len(a.token_ids) for a in answers])


def _ends(engine: SglangEngine, sequences: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[Tensor]:
    """Log-probabilities of each sequence's last tokens as a prompt's."""
    scores = [s for i in range(0, len(sequences), AT_ONCE) for s in engine.score(sequences[i : i + AT_ONCE])]
    return [s[len(s) - n :] for s, n in zip(scores, tokens, strict=True)]


def _accepted(backend: Accepting, temperature: float) -> dict[str, float]:
    found = backend.take_each(temperature)
    return {kind: found.get(adapter_name(version), float("nan")) for kind, version in KINDS.items()}
