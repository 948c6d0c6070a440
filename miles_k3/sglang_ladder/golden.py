"""Steps on the golden checkpoint: SGLang against its stored figures, itself, and the embedded engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from miles_k3.k3.config import K3Config
from miles_k3.rollout.sglang.backend import Backend
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.sglang_ladder import measures
from miles_k3.sglang_ladder.models import (
    ADAPTER,
    arguments_for,
    golden_adapter,
    golden_checkpoint,
    golden_scores,
    recipe_for,
    with_released_dtypes,
)
from miles_k3.sglang_ladder.report import Report
from miles_k3.types import SamplingParams

MEAN, CORRELATION = 0.05, 0.998  # of a right fp32 implementation against the stored figures
SELF_MEAN = 0.02  # of SGLang against the stored figures of itself: twice what it repeated itself within then, 0.010
STEPS_OF_LEAK, LEAK_BYTES = 20, 64 << 20
PAUSED_NEW = 256  # tokens of an answer that is paused: most of a second


class Recorded:
    """A backend that remembers how many prompt tokens the last request took from the cache."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.cached_tokens = backend, -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def generate(self, *arguments: Any, **options: Any) -> Mapping[str, Any]:
        answer = await self._backend.generate(*arguments, **options)
        self.cached_tokens = int(answer["meta_info"].get("cached_tokens", -1))
        return answer


def started(arguments: Mapping[str, Any], config: K3Config) -> Backend:
    from miles_k3.rollout.sglang.running import RunningSglang

    return RunningSglang(arguments, config)


@contextmanager
def golden_engine(
    work: Path, report: Report, *, graphs: bool
) -> Iterator[tuple[SglangEngine, Recorded, K3Config, Path]]:
    folder = golden_checkpoint(work)
    config = K3Config.from_folder(folder)
    recipe = recipe_for(folder, max_running=16, prompt=512, new=256, cuda_graphs=graphs)
    arguments = arguments_for(recipe, config, enable_memory_saver=True, enable_weights_cpu_backup=True)
    start = time.monotonic()
    backend = Recorded(started(arguments, config))
    report.note(start_s=round(time.monotonic() - start, 1))
    engine = SglangEngine(
        cast("Backend", backend), config, tokenizer=None, adapter_config=ADAPTER, max_lora_rank=ADAPTER.rank,
        max_sequence_tokens=768, memory_saver=True,
    )  # fmt: skip
    try:
        yield engine, backend, config, folder
    finally:
        engine.close()


def golden(work: Path, report: Report) -> None:
    """With CUDA graphs: everything that this checkpoint can show."""
    with golden_engine(work, report, graphs=True) as (engine, backend, config, folder):
        tensors, scores = golden_adapter(folder), dict[str, list[Tensor]]()
        parts: dict[str, Callable[[], None]] = {
            "scores": lambda: scores.update(_scores(engine, tensors, report)),
            "decode": lambda: _decode(engine, report),
            "versions": lambda: _versions(engine, backend, tensors, report),
            "sleep": lambda: _sleeps(engine, report),
            "leaks": lambda: _leaks(engine, tensors, report),
            "embedded": lambda: _embedded(work, config, tensors, scores, report),
            "pauses": lambda: _pauses(engine, report),
        }
        for name, part in parts.items():
            with report.part(name):
                part()


def golden_eager(work: Path, report: Report) -> None:
    """Without CUDA graphs: the same figures again."""
    with golden_engine(work, report, graphs=False) as (engine, _, config, folder):
        tensors, scores = golden_adapter(folder), dict[str, list[Tensor]]()
        with report.part("scores"):
            scores.update(_scores(engine, tensors, report))
        with report.part("decode"):
            _decode(engine, report)
        with report.part("embedded"):
            _embedded(work, config, tensors, scores, report)


def _scores(engine: SglangEngine, tensors: measures.Adapter, report: Report) -> dict[str, list[Tensor]]:
    """Of base and adapter, too. Leaves the golden adapter loaded."""
    prompts, _, base, _ = golden_scores("base")
    lora = golden_scores("lora")[2]
    noise = measures.noise(engine, prompts)
    report.note(noise=noise)
    scores = measures.scores_of_versions(engine, ADAPTER, tensors, prompts)
    zero = measures.closeness(scores["zero_b"], scores["base"])
    report.note(zero_b=zero, moved=measures.closeness(scores["adapter"], scores["base"]))
    limit = max(2 * noise["mean"], SELF_MEAN)  # the noise of this machine counts, too
    report.check("zero-B adapter against base, mean", zero["mean"], limit=limit)
    for name, ours, theirs in (("base", scores["base"], base), ("adapter", scores["adapter"], lora)):
        found = measures.closeness(ours, theirs)
        report.note(**{f"{name}_against_stored": found})
        report.check(f"{name} against SGLang's stored scores, mean", found["mean"], limit=limit)
        report.check(f"{name}, correlation", found["correlation"], limit=CORRELATION, at_least=True)
    return scores


def _decode(engine: SglangEngine, report: Report) -> None:
    """Greedy answers under the golden adapter, which is the current one."""
    prompts, continuations, _, lora_decode = golden_scores("lora")
    greedy = SamplingParams(temperature=0.0, max_new_tokens=len(continuations[0]))
    answers = measures.answers(engine, prompts, greedy, [None] * len(prompts))
    same = [
        next((i for i, (a, b) in enumerate(zip(ours.token_ids, theirs, strict=True)) if a != b), len(theirs))
        for ours, theirs in zip(answers, continuations, strict=True)
    ]
    starts = [(a.logprobs[:n], t[:n]) for a, t, n in zip(answers, lora_decode, same, strict=True) if n]
    decode = measures.closeness([torch.tensor(a) for a, _ in starts], [t for _, t in starts])
    report.note(decode_against_stored=decode, decode_common_tokens=same)
    report.check("adapter, decoded tokens in common with the stored", sum(same), limit=8, at_least=True)
    report.check("adapter, their log-probabilities, mean", decode["mean"], limit=MEAN)


def _embedded(
    work: Path, config: K3Config, tensors: measures.Adapter, scores: Mapping[str, list[Tensor]], report: Report
) -> None:
    """SGLang's scores against our own engine's on the same GPU in fp32, where an adapter equals the weights merged."""
    from miles_k3.adapters.update import make_update
    from miles_k3.k3.weights import load_base
    from miles_k3.rollout.embedded.engine import EmbeddedEngine

    prompts, folder = golden_scores("base")[0], with_released_dtypes(golden_checkpoint(work), work / "golden-released")
    base = load_base(folder, config, dtype=torch.float32, device=torch.device("cuda"), base_dtype="bf16")
    own = EmbeddedEngine(base, config, max_lora_rank=ADAPTER.rank, max_sequence_tokens=768, max_running=8)
    for name in ("base", "adapter"):
        if name == "adapter":
            own.load_adapter(make_update(0, ADAPTER, dict(tensors)))
        found = measures.closeness(scores[name], own.score(prompts))
        report.note(**{f"{name}_against_embedded_fp32": found})
        report.check(f"{name} against the embedded engine in fp32, mean", found["mean"], limit=MEAN)
        report.check(
            f"{name} against the embedded engine, correlation", found["correlation"], limit=CORRELATION, at_least=True
        )
    own.close()
    del own, base
    torch.cuda.empty_cache()


def _versions(engine: SglangEngine, backend: Recorded, tensors: measures.Adapter, report: Report) -> None:
    prompts: Sequence[list[int]] = golden_scores("base")[0]
    on_gpu = {name: t.cuda() for name, t in tensors.items()}

    def another(scale: float = 1.0) -> Any:
        chosen = {n: t * scale if ".lora_B." in n else t for n, t in on_gpu.items()}
        return measures.next_update(engine, ADAPTER, chosen)

    engine.load_adapter(another(0.5))
    mixed = measures.mixed_batch(engine, prompts, 16)
    report.note(mixed_batch=mixed)
    report.check("versions in one batch against alone, mean", mixed["mean"], limit=MEAN)
    report.check("versions in one batch, right ones", float(mixed["versions_right"]), limit=1, at_least=True)
    report.check("tokens that two versions share", mixed["common_tokens_of_two_versions"], limit=16 * len(prompts) - 1)
    long = [token for prompt in prompts[:3] for token in prompt]  # states are kept every 256 tokens
    hits = measures.prefix_hits(engine, lambda: backend.cached_tokens, long, lambda: another(2.0))
    report.note(prefix_hits=hits)
    report.check("prompt tokens from the cache, the same version", hits["again"], limit=1, at_least=True)
    report.check("prompt tokens from the cache, the next version", hits["next_version"], limit=0)
    report.note(swap_small_adapter=measures.swap_seconds(engine, another, prompts[0], 5))


def _sleeps(engine: SglangEngine, report: Report) -> None:
    prompts = golden_scores("base")[0]
    before = engine.score(prompts)
    awake = _free_bytes()
    engine.sleep()
    asleep = _free_bytes()
    engine.wake()
    again = measures.closeness(engine.score(prompts), before)
    report.note(sleep_frees_bytes=asleep - awake, scores_after_wake=again)
    report.check("sleep frees memory, bytes", asleep - awake, limit=64 << 20, at_least=True)
    report.check("scores after sleep and wake, mean", again["mean"], limit=SELF_MEAN)


def _pauses(engine: SglangEngine, report: Report) -> None:
    """A greedy answer that is held in the midst, with its memory and without, against the same one undisturbed."""
    prompt, params = golden_scores("base")[0][0], SamplingParams(temperature=0.0, max_new_tokens=PAUSED_NEW)
    (whole,) = measures.answers(engine, [prompt], params, [None])
    for name, retract in (("in place", False), ("retracted", True)):
        answer, moved = measures.paused(engine, prompt, params, retract=retract)
        n = measures.common_tokens(answer.token_ids, whole.token_ids)
        found = measures.closeness([torch.tensor(answer.logprobs[:n])], [torch.tensor(whole.logprobs[:n])])
        report.note(**{f"paused_{name.replace(' ', '_')}": {**found, "tokens": n, "while_paused": moved}})
        report.check(f"paused {name}: tokens that come all the same", moved, limit=0)
        report.check(f"paused {name}: tokens of the answer", len(answer.token_ids), limit=PAUSED_NEW, at_least=True)
        report.check(f"paused {name}: log-probabilities of the common start, mean", found["mean"], limit=MEAN)


def _leaks(engine: SglangEngine, tensors: measures.Adapter, report: Report) -> None:
    on_gpu = {name: t.cuda() for name, t in tensors.items()}
    swap: Callable[[], Any] = lambda: measures.next_update(engine, ADAPTER, on_gpu)  # noqa: E731
    prompt = golden_scores("base")[0][0]
    measures.swap_seconds(engine, swap, prompt, 3)
    before = _free_bytes()
    measures.swap_seconds(engine, swap, prompt, STEPS_OF_LEAK)
    lost = before - _free_bytes()
    report.note(lost_bytes=lost, swaps=STEPS_OF_LEAK)
    report.check(f"bytes lost over {STEPS_OF_LEAK} swaps", lost, limit=LEAK_BYTES)


def _free_bytes() -> int:
    """Of the whole GPU, whichever process holds the rest."""
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
