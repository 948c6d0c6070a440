"""The ladder's own code, over a stand-in for SGLang: it runs to its end, and its checks can fail."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sglang_stand_in import CONFIG, StandIn

from miles_k3.rollout.sglang.backend import OnProgress
from miles_k3.rollout.sglang.engine import SglangEngine
from miles_k3.sglang_ladder import control, dspark, golden, measures, wide
from miles_k3.sglang_ladder.measures import closeness, zero_b
from miles_k3.sglang_ladder.report import Report
from miles_k3.sglang_ladder.steps import steps
from miles_k3.types import Completion, FinishReason, SamplingParams

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    backend = StandIn()
    monkeypatch.setattr(golden, "started", lambda arguments, config: backend)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(golden, "_free_bytes", lambda: 0)
    monkeypatch.setattr(golden, "_embedded", lambda *_: None)
    monkeypatch.setattr(golden, "STEPS_OF_LEAK", 2)
    for name in ("SETTLE_S", "PAUSED_S"):
        monkeypatch.setattr(measures, name, 0.05)
    monkeypatch.setattr(wide, "_used_bytes", lambda: 0)
    return backend


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the steps' checkpoints are made once."""
    return tmp_path_factory.mktemp("work")


def test_the_golden_step_goes_through(no_gpu: StandIn, work: Path, tmp_path: Path) -> None:
    report = Report(tmp_path / "golden.json")
    golden.golden(work, report)
    said = json.loads((tmp_path / "golden.json").read_text())
    assert said["noise"]["mean"] == 0
    assert said["errors"] == {}
    assert set(said["part_s"]) == {"scores", "decode", "versions", "sleep", "leaks", "embedded", "pauses"}
    names = {check["name"]: check["ok"] for check in said["checks"]}
    assert names["zero-B adapter against base, mean"]
    assert not names["base against SGLang's stored scores, mean"], "it gives -1 for everything"
    assert not names["base, correlation"], "NaN holds no limit"
    assert not names["sleep frees memory, bytes"]
    assert ("close",) in no_gpu.told
    assert [told[1] for told in no_gpu.told if told[0] == "pause"] == ["in_place", "retract"]
    assert {"mixed_batch", "prefix_hits", "swap_small_adapter", "lost_bytes"} <= set(said)


def test_the_wide_steps_go_through(no_gpu: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.tiny import tiny_adapter, tiny_config

    monkeypatch.setattr(wide.K3Config, "from_folder", lambda _: tiny_config(vocab_size=163840))
    monkeypatch.setattr(wide, "arguments_for", lambda *_, **__: {"enable_lora": True, "tp_size": 1})
    monkeypatch.setattr(wide, "random_adapter", lambda config, _: tiny_adapter(config, wide.ADAPTER))
    report = Report(tmp_path / "wide.json")
    wide.wide_base(tmp_path, report)
    wide.wide_lora(tmp_path, report)
    assert set(report.content["decode_ms_lora"]) == set(wide.BATCHES)
    assert len(report.content["checks"]) == 2 * len(wide.BATCHES) + 1
    assert no_gpu.told.count(("close",)) == 2


def test_the_steps_with_a_draft_go_through(
    no_gpu: StandIn, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dspark, "DRAWS", 4)
    report = Report(tmp_path / "dspark.json")
    dspark.dspark(work, report)
    assert report.content["errors"] == {}
    assert set(report.content["part_s"]) == {"plain", "answers", "one batch", "prefix hits", "sleep"}
    checks = {check["name"]: check["ok"] for check in report.content["checks"]}
    for kind in dspark.KINDS:
        assert report.content[f"{kind}_drafted_against_plain"]["tokens"] == 4 * dspark.NEW
        assert checks[f"{kind}: log-probabilities of the common start, mean"]
    assert not checks["tokens of a verify, where the draft knows them"], "a stand-in verifies nothing"
    said = json.loads((tmp_path / "dspark.json").read_text(), parse_constant=pytest.fail)
    assert said["drafted_adapter_accepted"] is None, "JSON has no NaN"
    assert "drafted_adapter_accepted: null\n" in (tmp_path / "dspark.txt").read_text()
    assert not checks["committed against the same tokens as a prompt, mean"], "it scores prompts otherwise"
    assert no_gpu.told.count(("close",)) == 2
    again = Report(tmp_path / "dspark-eager.json")
    dspark.dspark_eager(work, again)
    assert "plain" not in again.content["part_s"], "the answers are kept"
    assert len(again.content["checks"]) == len(report.content["checks"])


def test_answers_that_part_are_compared_up_to_there() -> None:
    ours = [a_completion((1, 2, 3), (-1.0, -1.0, -2.0)), a_completion((5, 6, 7), (-1.0, -1.5, -1.0))]
    theirs = [a_completion((1, 2, 3), (-1.0, -1.0, -2.0)), a_completion((5, 9, 7), (-1.0, -1.25, -8.0))]
    found = dspark.common_start(ours, theirs)
    assert (found["tokens"], found["parted"], found["tie"], found["max"]) == (4, 1, 0.25, 0.0)


def a_completion(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Completion:
    return Completion(
        token_ids=tokens, logprobs=logprobs, text="", finish_reason=FinishReason.LENGTH, adapter_version=0
    )


class Slow(StandIn):
    """A token each 5 ms; `deaf`: also while it is paused."""

    def __init__(self, *, deaf: bool) -> None:
        super().__init__()
        self._deaf, self._free = deaf, threading.Event()
        self._free.set()

    async def generate(
        self, tokens: Sequence[int], sampling: Mapping[str, Any], *, on_progress: OnProgress | None, **_: Any
    ) -> Mapping[str, Any]:
        rows = [(self.logprob, token, None) for token in range(sampling["max_new_tokens"])]
        assert on_progress is not None
        for i in range(len(rows)):
            while not self._deaf and not self._free.is_set():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.005)
            on_progress([row[1] for row in rows[: i + 1]], rows[: i + 1])
        return {
            "output_ids": [row[1] for row in rows],
            "meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": rows},
        }

    def pause(self, mode: str) -> None:
        self._free.clear()

    def unpause(self) -> None:
        self._free.set()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("deaf", [False, True])
def test_what_comes_during_a_pause_is_counted(deaf: bool) -> None:
    engine = SglangEngine(
        Slow(deaf=deaf), CONFIG, tokenizer=None, adapter_config=None, max_lora_rank=4, max_sequence_tokens=64
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=40)
    answer, moved = measures.paused(engine, [1, 2], params, retract=False)
    assert len(answer.token_ids) == 40
    assert (moved > 0) == deaf


@pytest.mark.usefixtures("no_gpu")
def test_a_part_that_fails_costs_only_itself(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(golden, "_versions", fails)
    report = Report(tmp_path / "golden.json")
    golden.golden(work, report)
    assert report.content["errors"] == {"versions": "RuntimeError: no kernel image\nand more"}
    assert "lost_bytes" in report.content
    assert "FAIL versions: RuntimeError: no kernel image\n" in (tmp_path / "golden.txt").read_text()
    assert not control.passed(report.content)


def test_every_step_has_its_times() -> None:
    assert set(control.TIMINGS) == set(steps())
    for timing in control.TIMINGS.values():
        assert timing.expected_s < timing.limit_s < 600, "a step ends within ten minutes"
    assert sum(timing.expected_s for timing in control.TIMINGS.values()) < 3 * 560, "three calls of ten minutes"


SCRIPT = """
import sys, time
from pathlib import Path
from miles_k3.sglang_ladder.report import Report
report = Report(Path(sys.argv[2]))
kind = sys.argv[1]
report.note(of=kind, number=1.23456)
if kind == "crash":
    raise SystemExit(3)
if kind == "hang":
    time.sleep(600)
if kind == "wrong":
    report.check("too much", 2.0, limit=1.0)
"""


def ladder(
    tmp_path: Path, steps: list[str], budget_s: float | None = None, **times: float
) -> dict[str, dict[str, Any]]:
    script = tmp_path / "step.py"
    script.write_text(SCRIPT)
    usual = {"expected_s": 0.0, "limit_s": 60.0, **times}
    timings = {
        step: control.Timing(
            **usual, needs=("no_such_module.x",) if step == "lacks" else (), instead="fine" if step == "crash" else None
        )
        for step in steps
    }
    return control.run_ladder(
        steps, lambda step, report: [sys.executable, str(script), step, str(report)], out=tmp_path / "out",
        work=tmp_path / "work", budget_s=budget_s, timings=timings,
    )  # fmt: skip


@pytest.fixture
def found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("found_by_children")
def test_steps_go_on_behind_those_that_fail(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = ladder(tmp_path, ["crash", "wrong", "lacks", "fine"])
    assert found["crash"]["error"] == "the step ended with 3; see crash.log"
    assert found["crash"]["number"] == 1.23456, "what it had is kept"
    assert found["lacks"]["error"] == "needs no_such_module.x, which can't be imported here"
    assert [control.passed(found[step]) for step in ("crash", "wrong", "lacks", "fine")] == [False, False, False, True]
    said = capfd.readouterr().out
    for line in ("crash  number: 1.235\n", "wrong  FAIL too much: 2 (<= 1)\n", "fine: passed after"):
        assert line in said, said
    assert list(found) == ["crash", "fine", "wrong", "lacks"], "what leaves out the likely fault comes next"
    ladder(tmp_path, ["wrong"])
    whole = json.loads((tmp_path / "out" / "gpu_sglang.json").read_text())
    assert set(whole) == {"crash", "wrong", "lacks", "fine"}, "an earlier call's steps stay"


@pytest.mark.usefixtures("found_by_children")
def test_a_budget_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CLOSING_S", 0.0)
    kept: list[str] = []
    replace = control._replace
    monkeypatch.setattr(control, "_replace", lambda path, text: (kept.append(text), replace(path, text)))
    start = time.monotonic()
    found = ladder(tmp_path, ["hang", "fine"], budget_s=3.0, expected_s=2.0)
    assert time.monotonic() - start < 10.0
    assert found["hang"]["error"] == "the step was ended: its time was over; see hang.log"
    assert found["hang"]["of"] == "hang"
    assert found["fine"]["skipped"].endswith("it takes about 2")
    assert control.passed(found["fine"]), "nothing failed"
    assert '"of": "hang"' in kept[0], "its figures are in the file while it runs"
    assert "hang: at most 3 s" in capfd.readouterr().out


def test_differences_are_told() -> None:
    found = closeness([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [torch.tensor([1.0, 2.5]), torch.tensor([3.0])])
    assert found["mean"] == pytest.approx(0.5 / 3)
    assert found["max"] == 0.5
    assert found["correlation"] < 1
    zeroed = zero_b({"a.lora_A.weight": torch.ones(2), "a.lora_B.weight": torch.ones(2)})
    assert zeroed["a.lora_A.weight"].sum() == 2
    assert zeroed["a.lora_B.weight"].sum() == 0
