"""The real SGLang with a DSpark draft beside adapters: both runners are made, the adapters are the target's alone."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.sglang_cpu import RANK, drafted_recipe, write_small_draft

from miles_k3.k3.config import K3Config
from miles_k3.k3.draft_params import draft_params
from miles_k3.plan.engine import BF16, engine_bytes
from miles_k3.plan.sglang import SLOTS, Split, slot_numbers
from miles_k3.rollout.sglang.hooks import hook_names

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("drafted")
    paths = os.pathsep.join([str(HERE / "stubs"), str(HERE.parent), str(HERE.parents[1])])
    ended = subprocess.run(
        [sys.executable, HERE / "drafted.py", folder], env={**os.environ, "PYTHONPATH": paths}, capture_output=True,
        text=True, timeout=1200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


def test_adapters_are_the_targets_alone(found: dict[str, Any], config: K3Config) -> None:
    assert found["hooks"] == list(hook_names())
    of_draft, of_target = found["draft"]["wrapped"]
    assert (found["draft"]["pool"], of_draft) == (False, 0)
    assert of_target > 0
    assert found["bytes"]["adapter slots"] == SLOTS * slot_numbers(config, RANK, Split(tp=1, ep=1)) * BF16


def test_each_request_that_is_verified_has_its_adapter_on_all_its_rows(found: dict[str, Any]) -> None:
    """The base, and the two versions that are loaded, in a batch that SGLang itself prepares."""
    verify = found["draft"]["verify"]
    assert sorted(verify["slots"]) == [0, 1, 2]
    assert verify["lengths"] == [8, 8, 8]
    assert verify["of_tokens"] == [slot for slot in verify["slots"] for _ in range(8)]
    assert verify["left"] is None, "for a prompt is what the model would take it"


def test_what_lies_in_memory_is_what_the_planner_says(found: dict[str, Any], config: K3Config, tmp_path: Path) -> None:
    draft = write_small_draft(tmp_path / "draft")
    planned, held = engine_bytes(drafted_recipe(tmp_path / "draft"), config, BF16), found["draft"]
    matrices = sum(math.prod(p.shape) for p in draft_params(draft) if len(p.shape) > 1 and "confidence" not in p.name)
    assert held["weights"] == matrices * BF16
    assert held["weights"] == pytest.approx(planned.draft, rel=0.01)
    assert held["kv"] + found["bytes"]["kv"] == planned.kv
    assert held["replay"] == planned.replay
