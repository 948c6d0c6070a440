"""The ladder's step `lossless` over a stand-in with a language: it passes on an honest draft, not on three others."""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sglang_stand_in import StandIn
from helpers.tiny import tiny_adapter, tiny_config

from miles_k3.rollout.speculative.draft_io import read_draft
from miles_k3.sglang_ladder import dspark, golden, lessons, lossless, lossless_judge, models, ten_steps
from miles_k3.sglang_ladder.report import Report
from miles_k3.sglang_ladder.steps import steps

TINY = Path(__file__).parents[2] / "assets" / "tiny-k3"
WORDS = range(10, 15)


@cache
def distribution(adapter: str | None, behind: tuple[int, ...]) -> dict[int, float]:
    """Log-probabilities of the token behind two others: peaked, and another for each adapter."""
    draws = random.Random(f"{adapter} {behind}")
    logits = {word: 2.0 * draws.gauss(0.0, 1.0) for word in WORDS}
    total = math.log(sum(map(math.exp, logits.values())))
    return {word: logit - total for word, logit in logits.items()}


class Speaking(StandIn):
    """Draws from `distribution`. `mistake` is what it does otherwise, with a draft, or, where it is noisy, without."""

    def __init__(self, drafted: bool, mistake: str) -> None:
        super().__init__()
        self._draws, self._drafted = random.Random(drafted), drafted
        self._mistake = mistake if drafted != (mistake == "is noisy") else ""
        self._off = {"reports another": 0.02, "is noisy": 0.6}.get(self._mistake, 0.0)
        self._verified = {"proposes nothing": 1, "is always right": 9}.get(self._mistake, 2)  # tokens of a verify

    async def generate(
        self, tokens: Sequence[int], sampling: Mapping[str, Any], *, adapter: str | None, **_: Any
    ) -> Mapping[str, Any]:
        said, rows = list(tokens), []
        for at in range(sampling["max_new_tokens"]):
            p = distribution(adapter, tuple(said[-2:]))
            order = sorted(p, key=p.__getitem__)
            if sampling["temperature"] == 0:
                token = order[-2 if self._mistake == "shifts a token" and at == 5 else -1]
            elif self._mistake == "accepts too much" and at and self._draws.random() < 0.1:
                token = max(WORDS, key=distribution(None, tuple(said[-2:])).__getitem__)
            else:
                token = self._draws.choices(order, [math.exp(p[word]) for word in order])[0]
            rows.append((p[token] + self._off, token, None))
            said.append(token)
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": rows}
        if self._drafted:
            verifies = math.ceil((len(rows) - 1) / self._verified)
            meta["spec_accept_length"] = len(rows) / verifies  # as SGLang counts: with the first token
        return {"output_ids": said[len(tokens) :], "meta_info": meta}

    def score(self, sequences: Sequence[Sequence[int]], adapter: str | None) -> list[Mapping[str, Any]]:
        return [{"input_token_logprobs": [(None, s[0], None), *(
            (distribution(adapter, tuple(s[max(0, i - 2) : i])).get(s[i], -9.0), s[i], None) for i in range(1, len(s))
        )]} for s in sequences]  # fmt: skip


def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mistake: str = "") -> dict[str, Any]:
    """The step's report."""
    config = tiny_config()
    adapters = tuple(tiny_adapter(config, models.ADAPTER, seed) for seed in (0, 1))
    prompts = [[3 + i % 7, 10 + i % 5, 10 + i // 7 % 5] for i in range(100)]
    made = lossless.Taught(folder=tmp_path, prompts=prompts, adapters=(adapters[0], adapters[1]), draft=tmp_path)
    monkeypatch.setattr(lossless, "teach", lambda *_: made)
    monkeypatch.setattr(lossless, "DRAWS", {"base": 600, "adapter": 2400, "next": 600})
    monkeypatch.setattr(lossless, "CONTROL", {"base": 600, "adapter": 1800, "next": 600})
    monkeypatch.setattr(lossless_judge, "SHIFT", 0.06)
    monkeypatch.setattr(dspark.K3Config, "from_folder", lambda _: config)
    monkeypatch.setattr(dspark, "arguments_for", lambda recipe, *_, **__: {"draft": recipe.rollout.sglang.draft})
    monkeypatch.setattr(golden, "started", lambda arguments, _: Speaking(bool(arguments["draft"]), mistake))
    report = Report(tmp_path / "lossless.json")
    steps()["lossless"](tmp_path, report)
    assert report.content["errors"] == {}
    return report.content


def failed(report: Mapping[str, Any]) -> set[str]:
    return {check["name"] for check in report["checks"] if not check["ok"]}


def test_an_honest_draft_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = asked(monkeypatch, tmp_path)
    assert failed(report) == set()
    assert set(report["part_s"]) == {"drafted", "plain", "judge"}
    for kind in dspark.KINDS:
        assert report[f"{kind}_greedy"]["same"] == report[f"{kind}_greedy"]["plain_same"] == 100
        assert report[f"{kind}_draws_without_a_draft"]["samples"] == lossless.CONTROL[kind]
        assert report[f"{kind}_reference_off"]["max"] < 1e-6
    assert report["all_kinds_draws_with_a_draft"]["samples"] == 3600
    assert report["accepted_greedy"] == {"base": 2.0, "adapter": 2.0, "next": 2.0}
    limits = {check["name"]: check["limit"] for check in report["checks"]}
    assert limits["tokens of a verify, greedy, base"] > 10 / 9, "which SGLang says where nothing is accepted"
    assert limits["tokens of a verify, drawn, base"] > 4 / 3


def test_a_draft_that_is_believed_too_often_fails_the_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = failed(asked(monkeypatch, tmp_path, "accepts too much"))
    assert any("adapter: draws with a draft" in name for name in found), found
    assert any("adapter: draws with against without" in name for name in found), found
    assert all("draws" in name for name in found), found
    assert not any("draws without a draft" in name for name in found), found


def test_another_token_fails_the_greedy_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = failed(asked(monkeypatch, tmp_path, "shifts a token"))
    name = "greedy answers that part from plain decoding's where there is no tie"
    assert {f"{kind}: {name}" for kind in dspark.KINDS} <= found
    assert {f"{kind}: greedy answers that are plain decoding's" for kind in dspark.KINDS} <= found
    assert not any("draws" in name for name in found), found


@pytest.mark.parametrize(("mistake", "expected"), [
    ("proposes nothing", "tokens of a verify, {}, base"),
    ("is always right", "tokens of a verify, {}, least of all kinds"),
])  # fmt: skip
def test_a_draft_that_tries_one_side_only_proves_nothing(
    mistake: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = failed(asked(monkeypatch, tmp_path, mistake))
    assert found == {expected.format("greedy"), expected.format("drawn")}


def test_an_engine_that_is_noisy_by_itself_proves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = failed(asked(monkeypatch, tmp_path, "is noisy"))
    assert found == {f"{kind}: largest difference of plain decoding from itself" for kind in dspark.KINDS}


def test_other_log_probabilities_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = failed(asked(monkeypatch, tmp_path, "reports another"))
    assert found == {f"{kind}: committed against the same tokens as a prompt, mean" for kind in dspark.KINDS}


def test_two_samples_of_one_distribution_and_of_two() -> None:
    draws = random.Random(0)
    one, other, apart = (
        Counter((draws.choices(range(3), weights)[0],) for _ in range(4000))
        for weights in ((5, 3, 2), (5, 3, 2), (5, 3, 3))
    )
    assert abs(lossless_judge.two_samples([one], [other])) < 3
    assert lossless_judge.two_samples([one], [apart]) > 5


def test_what_both_engines_serve_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At the tiny model's size: a checkpoint, two whole adapters that differ, a draft that can be read."""
    drawn = shutil.copytree(TINY, tmp_path / "drawn")
    monkeypatch.setattr(ten_steps, "small_model", lambda _: drawn)
    monkeypatch.setattr(lessons.Lesson.batch, "__defaults__", (4,))
    for name in ("LESSONS", "ADAPTER_LESSONS", "DRAFT_LESSONS"):
        monkeypatch.setattr(lossless, name, 2)
    monkeypatch.setattr(lossless, "DRAFT_ROWS", 4)
    report = Report(tmp_path / "lossless.json")
    made = lossless.teach(tmp_path, report, torch.device("cpu"))
    config = dspark.K3Config.from_folder(made.folder)
    layout = models.adapter_layout(config, models.ADAPTER)
    for tensors in made.adapters:
        assert {name: tuple(t.shape) for name, t in tensors.items()} == {n: t.shape for n, t in layout.items()}
        assert all(t.dtype is torch.bfloat16 and bool(t.any()) for t in tensors.values())
    assert any(not torch.equal(t, made.adapters[1][name]) for name, t in made.adapters[0].items())
    read_draft(made.draft, config, torch.float32)
    assert len(made.prompts) == 100
    assert math.isfinite(report.content["draft_expects"])


def test_a_lesson_says_each_sum_as_asked() -> None:
    lesson = lessons.Lesson(TINY, torch.device("cpu"), lossless.SAID["next"], 3)
    digits = {str(d): lesson._tokenizer.encode(str(d), add_special_tokens=False)[0] for d in range(10)}
    (prompt, said), *_ = lesson.rows(1)
    assert prompt in lesson.prompts
    assert len(said) == 7
    assert set(said[:6]) <= set(digits.values())
    assert [say("7") for say in lossless.SAID.values()] == ["07", "57", "70"]
