"""Steps with a DSpark draft beside adapters on the golden checkpoint: what is committed against plain decoding.

The draft knows the plain engine's answers under the golden adapter, so that it is right about most of those, and about
few of the base's: both ends of a verify are tried, and neither may change an answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from miles_k3.k3.config import K3Config
from miles_k3.rollout.sglang.backend import Backend
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.sglang_ladder import golden, measures
from miles_k3.sglang_ladder.drafts import write_telling_draft
from miles_k3.sglang_ladder.models import (
    ADAPTER,
    arguments_for,
    golden_adapter,
    golden_checkpoint,
    golden_scores,
    recipe_for,
)
from miles_k3.sglang_ladder.report import Report
from miles_k3.types import Completion, SamplingParams

REQUESTS = 32  # above 16, a verify has more rows than our expert LoRA kernels take, and SGLang's own compute it
NEW, DRAWS, DRAWN = 48, 512, 4
KINDS = {"base": -1, "adapter": 0, "next": 1}  # versions; the next one is the golden adapter at half strength
ACCEPTED = 1.5  # tokens of a verify that the draft knows; 1 is what plain decoding has
COMMON = 8  # tokens of four answers that two engines share at least; random weights part early
TIE = 0.15  # between the log-probabilities of two tokens of which either may come first
DEVIATIONS = 4.0


class Accepting(golden.Recorded):
    """Remembers, too, how many tokens each answer got of a verify."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.accepted: list[tuple[str | None, float, float]] = []  # adapter, temperature, tokens

    async def generate(self, *arguments: Any, **options: Any) -> Mapping[str, Any]:
        answer = await super().generate(*arguments, **options)
        length = answer["meta_info"].get("spec_accept_length")
        if length is not None:
            _, sampling = arguments
            self.accepted.append((options["adapter"], sampling["temperature"], float(length)))
        return answer

    def take(self) -> float:
        """The mean of the answers since it was last taken; NaN where nothing was verified."""
        known = [length for *_, length in self.accepted]
        self.accepted.clear()
        return sum(known) / len(known) if known else float("nan")

    def take_each(self, temperature: float) -> dict[str | None, float]:
        """The same for each adapter's answers at `temperature`; the others are forgotten."""
        by_adapter: dict[str | None, list[float]] = {}
        for adapter, at, length in self.accepted:
            if at == temperature:
                by_adapter.setdefault(adapter, []).append(length)
        self.accepted.clear()
        return {adapter: sum(lengths) / len(lengths) for adapter, lengths in by_adapter.items()}


@contextmanager
def serving(folder: Path, report: Report, name: str, **sglang: Any) -> Iterator[tuple[SglangEngine, Accepting]]:
    """A started engine, which closes behind the block; `sglang` are keys of the recipe's section."""
    config = K3Config.from_folder(folder)
    recipe = recipe_for(folder, max_running=REQUESTS, prompt=512, new=256, **sglang)
    start = time.monotonic()
    arguments = arguments_for(recipe, config, enable_memory_saver=True, enable_weights_cpu_backup=True)
    backend = Accepting(golden.started(arguments, config))
    report.note(**{f"{name}_start_s": round(time.monotonic() - start, 1)})
    engine = SglangEngine(
        cast("Backend", backend), config, tokenizer=None, adapter_config=ADAPTER, max_lora_rank=ADAPTER.rank,
        max_sequence_tokens=768, memory_saver=True,
    )  # fmt: skip
    try:
        yield engine, backend
    finally:
        engine.close()


def dspark(work: Path, report: Report) -> None:
    """With CUDA graphs."""
    plain = _plain(work, report)
    _drafted(work, report, plain, cuda_graphs=True)


def dspark_eager(work: Path, report: Report) -> None:
    """Without CUDA graphs, against the plain answers of an earlier step where they are kept."""
    kept = work / "dspark-plain.pt"
    plain = torch.load(kept, weights_only=False) if kept.exists() else _plain(work, report)
    _drafted(work, report, plain, cuda_graphs=False)


def _plain(work: Path, report: Report) -> dict[str, Any]:
    """What an engine without a draft answers; kept in `work`."""
    with report.part("plain"), serving(golden_checkpoint(work), report, "plain") as (engine, backend):
        found = _answers(engine, backend, work, report, "plain")
        torch.save(found, work / "dspark-plain.pt")
        return found
    raise RuntimeError("there is nothing to compare a draft's answers with")


def _drafted(work: Path, report: Report, plain: Mapping[str, Any], *, cuda_graphs: bool) -> None:
    folder = golden_checkpoint(work)
    known = [answer.token_ids for answer in plain["adapter"]]
    draft = write_telling_draft(work / "golden-draft", K3Config.from_folder(folder), known)
    with serving(folder, report, "drafted", draft=str(draft), cuda_graphs=cuda_graphs) as (engine, backend):
        with report.part("answers"):
            drafted = _answers(engine, backend, work, report, "drafted")
            _compare(plain, drafted, report)
        with report.part("one batch"):
            _one_batch(engine, report)
        with report.part("prefix hits"):
            _prefix_hits(engine, backend, work, report)
        with report.part("sleep"):
            _sleeps(engine, backend, report)


def _answers(engine: SglangEngine, backend: Accepting, work: Path, report: Report, name: str) -> dict[str, Any]:
    """Greedy answers of each kind; log-probabilities of the adapter's once more as a prompt's; draws at temperature 1.

    Loads versions 0 and 1.
    """
    prompts, tensors = golden_scores("base")[0], golden_adapter(golden_checkpoint(work))
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW)
    found: dict[str, Any] = {}
    for kind, version in KINDS.items():
        if version >= 0:
            halved = {n: t / 2 if ".lora_B." in n else t for n, t in tensors.items()}
            engine.load_adapter(measures.next_update(engine, ADAPTER, halved if kind == "next" else tensors))
        backend.take()
        start = time.monotonic()
        found[kind] = measures.answers(engine, prompts, greedy, [version] * len(prompts))
        report.note(**{f"{name}_{kind}_s": time.monotonic() - start, f"{name}_{kind}_accepted": backend.take()})
        if kind == "adapter":
            found["rescored"] = rescored = _rescored(engine, prompts, found[kind])
            report.note(**{f"{name}_committed_against_prefill": rescored})
            found["drawn"] = _drawn(engine, prompts[0])
            report.note(**{f"{name}_drawn_logprob": found["drawn"], f"{name}_drawn_accepted": backend.take()})
    return found


def _rescored(
    engine: SglangEngine, prompts: Sequence[Sequence[int]], answers: Sequence[Completion]
) -> dict[str, float]:
    """How far the log-probabilities of answers are from those of the same tokens as a prompt, under one version."""
    scores = engine.score([[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)])
    ends = [s[len(s) - len(a.token_ids) :] for s, a in zip(scores, answers, strict=True)]
    return measures.closeness([torch.tensor(a.logprobs) for a in answers], ends)


def _drawn(engine: SglangEngine, prompt: Sequence[int]) -> dict[str, float]:
    """Mean log-probability of tokens drawn at temperature 1, without the first, which no draft proposes, and its error.

    Taking too much, or too little, of what a draft proposes moves it.
    """
    params = SamplingParams(temperature=1.0, max_new_tokens=DRAWN)
    drawn = measures.answers(engine, [prompt] * DRAWS, params, [None] * DRAWS)
    each = torch.tensor([sum(a.logprobs[1:]) / (DRAWN - 1) for a in drawn], dtype=torch.float64)
    return {"mean": each.mean().item(), "error": (each.std() / DRAWS**0.5).item()}


def _compare(plain: Mapping[str, Any], drafted: Mapping[str, Any], report: Report) -> None:
    for kind in KINDS:
        found = common_start(drafted[kind], plain[kind])
        report.note(**{f"{kind}_drafted_against_plain": found})
        report.check(f"{kind}: log-probabilities of the common start, mean", found["mean"], limit=golden.MEAN)
        report.check(f"{kind}: tokens in common with plain decoding", found["tokens"], limit=COMMON, at_least=True)
        if found["parted"]:
            report.check(f"{kind}: of the tokens that part them, mean difference", found["tie"], limit=TIE)
    limit = min(max(2 * plain["rescored"]["mean"], golden.SELF_MEAN), golden.MEAN)
    report.check("committed against the same tokens as a prompt, mean", drafted["rescored"]["mean"], limit=limit)
    accepted = report.content["drafted_adapter_accepted"]
    report.check("tokens of a verify, where the draft knows them", accepted, limit=ACCEPTED, at_least=True)
    a, b = plain["drawn"], drafted["drawn"]
    apart = abs(a["mean"] - b["mean"]) / math.hypot(a["error"], b["error"], 1e-9)
    report.check("mean log-probability of drawn tokens, standard errors apart", apart, limit=DEVIATIONS)


def common_start(ours: Sequence[Completion], theirs: Sequence[Completion]) -> dict[str, float]:
    """Greedy answers of two engines up to where they part: closeness, tokens, how many part, and the mean difference
    between the log-probabilities of the two tokens there, which is noise where both are as likely."""
    starts, ties, tokens = [], [], 0
    for a, b in zip(ours, theirs, strict=True):
        n = measures.common_tokens(a.token_ids, b.token_ids)
        tokens += n
        starts.append((torch.tensor(a.logprobs[:n]), torch.tensor(b.logprobs[:n])))
        if n < min(len(a.token_ids), len(b.token_ids)):
            ties.append(abs(a.logprobs[n] - b.logprobs[n]))
    closeness = measures.closeness([a for a, _ in starts], [b for _, b in starts])
    return {**closeness, "tokens": tokens, "parted": len(ties), "tie": sum(ties) / len(ties) if ties else 0.0}


def _one_batch(engine: SglangEngine, report: Report) -> None:
    """Base, adapter and the next version at once, each prompt twice: 24 requests, in which more rows are verified than
    our own expert kernels take."""
    prompts: Sequence[list[int]] = golden_scores("base")[0] * 2
    mixed = measures.mixed_batch(engine, prompts, NEW)
    report.note(mixed_batch=mixed)
    report.check("kinds in one batch against alone, mean", mixed["mean"], limit=golden.MEAN)
    report.check("kinds in one batch, right versions", float(mixed["versions_right"]), limit=1, at_least=True)
    most = NEW * len(prompts) - 1
    report.check("tokens that two versions share", mixed["common_tokens_of_two_versions"], limit=most)


def _prefix_hits(engine: SglangEngine, backend: Accepting, work: Path, report: Report) -> None:
    tensors = golden_adapter(golden_checkpoint(work))
    long = [token for prompt in golden_scores("base")[0][:3] for token in prompt]  # states are kept every 256 tokens
    hits = measures.prefix_hits(
        engine, lambda: backend.cached_tokens, long, lambda: measures.next_update(engine, ADAPTER, tensors)
    )
    report.note(prefix_hits=hits)
    report.check("prompt tokens from the cache, the same version", hits["again"], limit=1, at_least=True)
    report.check("prompt tokens from the cache, the next version", hits["next_version"], limit=0)


def _sleeps(engine: SglangEngine, backend: Accepting, report: Report) -> None:
    """The golden adapter is the current one again; the draft still knows its answers, if its weights came back."""
    prompts, greedy = golden_scores("base")[0], SamplingParams(temperature=0.0, max_new_tokens=NEW)
    before = measures.answers(engine, prompts, greedy, [None] * len(prompts))
    engine.sleep()
    engine.wake()
    backend.take()
    after = common_start(measures.answers(engine, prompts, greedy, [None] * len(prompts)), before)
    accepted = backend.take()
    report.note(after_wake=after, after_wake_accepted=accepted)
    report.check("after sleep and wake: log-probabilities, mean", after["mean"], limit=golden.MEAN)
    report.check("after sleep and wake: tokens of a verify", accepted, limit=ACCEPTED, at_least=True)
