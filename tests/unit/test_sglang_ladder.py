"""The ladder's own code, over a stand-in for SGLang: it runs to its end, and its checks can fail."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from helpers.sglang_stand_in import StandIn

from miles_k3.sglang_ladder import golden, wide
from miles_k3.sglang_ladder.measures import closeness, zero_b
from miles_k3.sglang_ladder.report import Report
from miles_k3.sglang_ladder.steps import steps

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    backend = StandIn()
    monkeypatch.setattr(golden, "started", lambda arguments, config: backend)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(golden, "_free_bytes", lambda: 0)
    monkeypatch.setattr(golden, "_embedded", lambda *_: None)
    monkeypatch.setattr(golden, "STEPS_OF_LEAK", 2)
    monkeypatch.setattr(wide, "_used_bytes", lambda: 0)
    return backend


def test_the_golden_step_goes_through(no_gpu: StandIn, tmp_path: Path) -> None:
    report = Report(tmp_path / "golden.json")
    golden.golden(tmp_path, report)
    said = json.loads((tmp_path / "golden.json").read_text())
    assert said["noise"]["mean"] == 0
    names = {check["name"]: check["ok"] for check in said["checks"]}
    assert names["zero-B adapter against base, mean"]
    assert not names["base against SGLang's stored scores, mean"], "it gives -1 for everything"
    assert not names["base, correlation"], "NaN holds no limit"
    assert not names["sleep frees memory, bytes"]
    assert ("close",) in no_gpu.told
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


def test_every_step_has_a_time_limit() -> None:
    limits = runpy.run_path(str(ROOT / "scripts" / "gpu_sglang.py"), run_name="ladder")["LIMITS"]
    assert set(limits) == set(steps())
    assert max(limits.values()) < 600, "a step ends within ten minutes"


def test_differences_are_told() -> None:
    found = closeness([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [torch.tensor([1.0, 2.5]), torch.tensor([3.0])])
    assert found["mean"] == pytest.approx(0.5 / 3)
    assert found["max"] == 0.5
    assert found["correlation"] < 1
    zeroed = zero_b({"a.lora_A.weight": torch.ones(2), "a.lora_B.weight": torch.ones(2)})
    assert zeroed["a.lora_A.weight"].sum() == 2
    assert zeroed["a.lora_B.weight"].sum() == 0
