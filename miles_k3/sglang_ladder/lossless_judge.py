"""What the answers of an engine with a draft must have in common with those of one without."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from miles_k3.losslessness import RARE, SHIFT, SIGMAS, Answer, Distribution, against_exact
from miles_k3.sglang_ladder.dspark import common_start
from miles_k3.sglang_ladder.measures import closeness, common_tokens
from miles_k3.sglang_ladder.report import Report
from miles_k3.types import Completion

TIE_FLOOR, NOISE = 0.01, 0.5  # log-probabilities: what is a tie at least, and what noise leaves ties worth the name
SAME = 0.5  # of the greedy answers at least, or their ties prove nothing
COMMITTED_FLOOR = 0.005
LEAST_ACCEPTED, MOST_ACCEPTED = 1.3, 3.5  # tokens of a verify: draws have to be accepted and refused
MAIN = "adapter"  # the kind that is drawn often enough to see a shift of SHIFT by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """An engine's answers by kind. `drawn`: for each sampled prompt how often each beginning came."""

    greedy: dict[str, list[Completion]] = field(default_factory=dict)
    drawn: dict[str, list[Counter[Answer]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the plain engine says of one kind: its greedy answers once more at another batch size, log-probabilities of
    both engines' greedy answers as prompts, how far those of the two tokens at each parting are apart, and
    probabilities of drawn beginnings. `off`: of each of its own draws, how far that is from its log-probability when
    drawn."""

    again: list[Completion]
    rescored: list[Tensor]
    drafted_rescored: list[Tensor]
    gaps: dict[int, float]
    exact: list[dict[Answer, float]]
    off: list[float]


def partings(ours: Sequence[Completion], theirs: Sequence[Completion]) -> Iterator[tuple[int, int]]:
    """(answer, token) where two engines' answers part; the token may be one behind the shorter answer."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.token_ids != b.token_ids:
            yield i, common_tokens(a.token_ids, b.token_ids)


def judge(plain: Heard, drafted: Heard, references: Mapping[str, Reference], report: Report) -> None:
    for kind, reference in references.items():
        _greedy(kind, plain.greedy[kind], drafted.greedy[kind], reference, report)
    for kind, reference in references.items():
        _drawn(kind, plain.drawn[kind], drafted.drawn[kind], reference, report)
    groups = [pair for kind, r in references.items() for pair in zip(drafted.drawn[kind], r.exact, strict=True)]
    _distribution("all kinds: draws with a draft", against_exact(groups), report, shows=True)


def accepted(name: str, found: Mapping[str, float], tokens: int, report: Report) -> None:
    """Tokens of a verify by kind, of answers of `tokens`: the draft has to be right, and wrong, often enough for both
    to be tried.

    SGLang divides all tokens by the verifies, the first one, of no verify, too: where nothing is accepted it says
    tokens / (tokens - 1).
    """
    report.note(**{f"accepted_{name}": dict(found)})
    least = LEAST_ACCEPTED * tokens / (tokens - 1)
    report.check(f"tokens of a verify, {name}, base", found["base"], limit=least, at_least=True)
    report.check(f"tokens of a verify, {name}, least of all kinds", min(found.values()), limit=MOST_ACCEPTED)


def _greedy(
    kind: str, plain: Sequence[Completion], drafted: Sequence[Completion], reference: Reference, report: Report
) -> None:
    own = closeness([torch.tensor(a.logprobs) for a in plain], reference.rescored)
    theirs = closeness([torch.tensor(a.logprobs) for a in drafted], reference.drafted_rescored)
    again = common_start(reference.again, plain)
    noise = max(own["max"], again["max"])
    limit = max(2 * noise, TIE_FLOOR)  # either of two tokens may be off by it
    apart = {i: max(reference.gaps[i], _committed_apart(drafted[i], plain[i], n)) for i, n in partings(drafted, plain)}
    found: dict[str, Any] = {
        "answers": len(plain), "same": len(plain) - len(apart), "largest_gap": max(apart.values(), default=0.0),
        "plain_same": len(plain) - sum(1 for _ in partings(reference.again, plain)), "tie": limit,
        "common_start": common_start(drafted, plain), "committed": theirs, "plain_committed": own,
    }  # fmt: skip
    report.note(**{f"{kind}_greedy": found})
    report.check(f"{kind}: largest difference of plain decoding from itself", noise, limit=NOISE)
    wrong = sum(gap > limit for gap in apart.values())
    report.check(f"{kind}: greedy answers that part from plain decoding's where there is no tie", wrong, limit=0)
    report.check(
        f"{kind}: greedy answers that are plain decoding's", found["same"], limit=SAME * len(plain), at_least=True
    )
    report.check(
        f"{kind}: committed against the same tokens as a prompt, mean", theirs["mean"],
        limit=max(2 * own["mean"], COMMITTED_FLOOR),
    )  # fmt: skip


def _committed_apart(a: Completion, b: Completion, n: int) -> float:
    """Between the log-probabilities of the two tokens where answers part, each by its own engine."""
    return abs(a.logprobs[n] - b.logprobs[n]) if n < min(len(a.logprobs), len(b.logprobs)) else math.inf


def _drawn(
    kind: str,
    plain: Sequence[Counter[Answer]],
    drafted: Sequence[Counter[Answer]],
    reference: Reference,
    report: Report,
) -> None:
    off = torch.tensor(reference.off, dtype=torch.float64)
    report.note(**{f"{kind}_reference_off": {"mean": off.mean().item(), "max": off.max().item()}})
    for name, counts in ((f"{kind}: draws without a draft", plain), (f"{kind}: draws with a draft", drafted)):
        found = against_exact(list(zip(counts, reference.exact, strict=True)))
        _distribution(name, found, report, shows=kind == MAIN and counts is drafted)
    report.check(f"{kind}: draws with against without a draft, sigmas", two_samples(drafted, plain), limit=SIGMAS)


def _distribution(name: str, found: Distribution, report: Report, *, shows: bool) -> None:
    """`shows`: it has to be able to show a shift."""
    report.note(**{name.replace(": ", "_").replace(" ", "_"): asdict(found)})
    report.check(f"{name}, chi-square, sigmas", found.chi_square, limit=SIGMAS)
    report.check(f"{name}, worst cell, sigmas", found.worst_cell, limit=SIGMAS)
    if shows:
        report.check(f"{name}: shift that is seen", found.visible, limit=SHIFT)


def two_samples(ours: Sequence[Counter[Answer]], theirs: Sequence[Counter[Answer]]) -> float:
    """Chi-square, in its standard deviations, of two engines' counts coming from one distribution, prompt by prompt."""
    chi, freedom = 0.0, 0
    for a, b in zip(ours, theirs, strict=True):
        n, m = sum(a.values()), sum(b.values())
        often = [x for x in a | b if (a[x] + b[x]) * min(n, m) >= RARE * (n + m)]
        pairs = [(a[x], b[x]) for x in often]
        pairs.append((n - sum(x for x, _ in pairs), m - sum(y for _, y in pairs)))
        pairs = [(x, y) for x, y in pairs if x + y]
        chi += sum((x * (m / n) ** 0.5 - y * (n / m) ** 0.5) ** 2 / (x + y) for x, y in pairs)
        freedom += max(1, len(pairs) - 1)
    return (chi - freedom) / (2 * freedom) ** 0.5
