"""Replays of traces: the books balance, and the numbers mean what the table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from miles_k3.bench import cache as bench
from miles_k3.cli import app
from miles_k3.errors import ConfigError
from miles_k3.k3.config import K3Config
from miles_k3.rollout.cache.contract import TOKEN_BYTES, num_tokens
from miles_k3.rollout.cache.radix import RadixCache
from miles_k3.rollout.cache.replay import Budget, Replay
from miles_k3.rollout.cache.traces import TRACES, Call

ASSETS = Path(__file__).parents[4] / "assets"


def published() -> K3Config:
    return K3Config.from_folder(ASSETS / "kimi-k3")


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("policy", range(4))
def test_nothing_is_lost_and_every_token_counts(trace: str, policy: int) -> None:
    chosen = list(bench.policies(published(), tp=8, num_bytes=12 << 30))[policy]
    calls = list(TRACES[trace](300, 1))
    report = Replay(chosen.cache, chosen.budget, max_running=32).run(calls)
    served = sum(num_tokens(c.prompt) for c in calls)
    assert report.refused or report.hit_tokens + report.computed_tokens == served
    assert report.peak_bytes <= 12 << 30
    chosen.cache.evict(pages=10**9, slots=10**9)
    assert (chosen.budget.used_pages, chosen.budget.used_slots) == (0, 0)


def test_traces_are_functions_of_their_seed() -> None:
    for make in TRACES.values():
        one, again, other = (list(make(40, seed)) for seed in (0, 0, 1))
        assert [(c.prompt, c.answer) for c in one] == [(c.prompt, c.answer) for c in again]
        assert [c.prompt for c in one] != [c.prompt for c in other]


def group(wave: int, samples: int, length: int) -> list[Call]:
    prompt = bytes(range(wave * 7, wave * 7 + 7)) * 4 * length
    return [Call(wave, 0, prompt[: length * TOKEN_BYTES], bytes([i] * 40)) for i in range(samples)]


@pytest.mark.parametrize("length", [63, 64, 65, 100, 128])
def test_a_group_computes_its_prompt_once(length: int) -> None:
    """64 prompts of 8 samples: the first sample computes all of it, the seven others its last token."""
    budget = Budget(num_bytes=1 << 40, page_bytes=1, slot_bytes=1)
    calls = [call for wave in range(36) for call in group(wave, 8, length)]
    report = Replay(RadixCache(budget, page_size=64), budget).run(calls)
    assert report.computed_tokens == 36 * (length + 7)


def test_a_unified_pool_admits_at_least_what_a_split_one_does() -> None:
    reports = {}
    for policy in list(bench.policies(published(), tp=8, num_bytes=24 << 30))[:2]:
        reports[policy.name] = Replay(policy.cache, policy.budget).run(TRACES["drifting"](600, 0))
    unified, split = reports["radix/unified"], reports["radix/split"]
    assert unified.failed_admissions < split.failed_admissions
    assert unified.most_tokens > split.most_tokens


def test_the_table_and_the_files(tmp_path: Path) -> None:
    told: list[dict] = []
    rows = bench.bench_cache(published(), ["grpo"], requests=60, tp=8, budget_gib=80.0, told=told.append)
    assert rows == told
    assert bench.markdown(rows).count("\n") == 1 + len(rows) == 5
    data, picture = bench.write(rows, {"requests": 60}, tmp_path / "new")
    assert json.loads(data.read_text())["rows"] == rows
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_an_unknown_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown trace grpoo; known are grpo"):
        bench.bench_cache(published(), ["grpoo"], requests=1, tp=8, budget_gib=1.0)


def test_the_command_writes_where_every_bench_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "cache", "--trace", "grpo", "--requests", "20"], catch_exceptions=False)
    assert result.exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert sorted(path.name for path in (tmp_path / "runs" / "bench").iterdir()) == ["cache.json", "cache.png"]
