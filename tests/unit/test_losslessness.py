"""`verify-lossless`: passes on what is lossless, and each of its three parts fails on a planted mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.engines import make_engine, random_prompts
from helpers.mutants import mutate
from helpers.speculating import speculating_engine
from typer.testing import CliRunner

from miles_k3 import losslessness
from miles_k3.cli import app
from miles_k3.errors import ConfigError
from miles_k3.losslessness import (
    Distribution,
    Greedy,
    Report,
    States,
    compare,
    enough_samples,
    markdown,
    verify_lossless,
)
from miles_k3.recipe import load_recipe
from miles_k3.rollout.embedded.speculation import Speculator
from miles_k3.rollout.speculative import acceptance

DRAFT = Path(__file__).resolve().parents[2] / "assets" / "tiny-k3-draft"


def small_report(samples: int = 200) -> Report:
    """Of tiny-A and a random draft."""
    return compare(
        make_engine(top_k=8), speculating_engine(top_k=8), random_prompts(10, seed=3), max_new_tokens=8,
        samples=samples, sampled_prompts=1, tie=1e-3,
    )  # fmt: skip


def test_a_report_of_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    report = small_report()
    assert report.greedy.passed
    assert report.greedy.logprob_diff < 1e-4
    assert report.states.passed
    assert sum(report.states.kept.values()) > 300
    text = markdown(report)
    (found,) = report.distributions
    assert (report.passed, report.differs) == (False, False)
    assert f"200 samples can't show a shift of 2%: take --samples {found.enough} or more" in text
    assert text.count("NOT SHOWN") == 2
    assert found.enough > 200
    assert len(text.splitlines()) < 40
    monkeypatch.setattr(losslessness, "SHIFT", 1.0)
    assert report.passed
    assert report.missing == []


@pytest.mark.parametrize("p", [0.05, 0.4, 0.5, 0.95])
def test_enough_samples_are_just_enough(p: float) -> None:
    few, enough = (5 * (p * (1 - p) / n) ** 0.5 for n in (enough_samples(p) - 1, enough_samples(p)))
    assert enough <= 0.02 < few
    assert enough_samples(0.5) == 15625
    assert enough_samples(1e-6) == 5_000_000, "a cell needs five of them"
    assert enough_samples(0.0) > 1e300, "a probability that rounds to 0"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "exit code 1: no difference was found, but it isn't shown either; 200 samples can't show"),
        ({"chi_square": 9.0}, "exit code 1: a difference was found; 200 samples can't show"),
    ],
)
def test_exit_code_1_says_what_it_means(
    wrong: dict[str, float], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"samples": 200, "cells": 2, "likeliest": 0.5, "chi_square": 0.0, "worst_cell": 0.0, "visible": 0.18,
             "enough": 15625, **wrong}  # fmt: skip
    report = Report(
        greedy=Greedy(prompts=1, tokens=1, same=1, ties=0, largest_gap=0.0, logprob_diff=0.0),
        distributions=(Distribution(**found),), states=States(commits=1, kept={1: 1}, wrong=0), mean_accepted=1.0,
    )  # fmt: skip
    monkeypatch.setattr(losslessness, "verify_lossless", lambda *args, **options: report)
    result = CliRunner().invoke(app, ["verify-lossless", "tiny-cpu", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert said in result.stderr


def test_a_fold_that_goes_too_far_fails_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = ("windows, rows, kept", "windows, rows, [min(n + 1, m) for n, m in zip(kept, steps.lengths)]")
    monkeypatch.setattr(Speculator, "_commit", mutate(Speculator._commit, edit))
    report = small_report(100)
    assert report.states.wrong > 0
    assert not report.states.passed


def ask_the_command(out: Path, *more: str) -> tuple[int, dict]:
    """Exit code and report on the tiny recipe; 2,500 samples show a shift of 5 %."""
    arguments = [
        "verify-lossless", "tiny-cpu", "--set", "rollout.speculative.mode=verify_all", "--set",
        f"rollout.speculative.draft={DRAFT}", "--prompts", "48", "--samples", "2500", "--out", str(out), *more,
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, json.loads((out / "report.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_the_command_passes(accept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losslessness, "SHIFT", 0.06)
    code, report = ask_the_command(tmp_path, "--set", f"rollout.speculative.accept={accept}")
    assert (code, report["passed"]) == (0, True)
    assert report["mean_accepted"] > 2
    assert len(report["states"]["kept"]) == 8


@pytest.mark.slow
def test_the_command_fails_where_the_distribution_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refusal drawn from all of the policy's distribution, not from what the draft left of it."""
    monkeypatch.setattr(losslessness, "SHIFT", 0.06)
    edit = ("(p_BV - q_BV).clamp_(min=0.0)", "p_BV.clone()")
    monkeypatch.setattr(acceptance, "_redraw", mutate(acceptance._redraw, edit))
    code, report = ask_the_command(tmp_path, "--set", "rollout.speculative.accept=rejection")
    assert (code, report["passed"]) == (1, False)
    assert report["greedy"]["same"] == 48
    assert report["states"]["wrong"] == 0
    (found,) = report["distributions"]
    assert max(found["chi_square"], found["worst_cell"]) > losslessness.SIGMAS


@pytest.mark.slow
def test_the_command_fails_where_a_token_too_many_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = ("== 0)", "== 0).add(1).minimum(packed.lengths_B - 1)")
    monkeypatch.setattr(acceptance, "_prefix", mutate(acceptance._prefix, edit))
    code, report = ask_the_command(tmp_path)
    assert (code, report["passed"]) == (1, False)
    assert report["greedy"]["same"] + report["greedy"]["ties"] < 48


def test_answers_too_short_for_whole_blocks_are_refused_with_the_length(tmp_path: Path) -> None:
    short = ("task.max_prompt_tokens=24", "rollout.sampling.max_new_tokens=2")
    on = ("rollout.speculative.mode=verify_all", f"rollout.speculative.draft={DRAFT}")
    recipe = load_recipe("tiny-cpu", [*on, *short]).recipe
    with pytest.raises(ConfigError, match=r"take 11 tokens.* leaves 4; add --set rollout.sampling.max_new_tokens=9"):
        verify_lossless(recipe, None, tmp_path, num_prompts=2, samples=100, sampled_prompts=1)


def test_a_recipe_without_speculation_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["verify-lossless", "tiny-cpu", "--out", str(tmp_path)])
    assert "rollout.speculative.mode is off: nothing to verify" in str(result.exception)
