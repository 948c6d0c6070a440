"""Each hook on SGLang's own classes: the fault without it, and that it is gone with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_k3.rollout.sglang.hooks import hook_names

HERE = Path(__file__).parent
# hook -> what SGLang's own code gives without it, and with it
EXPECTED: dict[str, tuple[Any, Any]] = {
    "config_aliases": ("AttributeError", [16, 2]),
    "hidden_dims": ([[7168, 6144], [3072, 7168], [12288, 7168]], [[3584, 6144], [3072, 3584], [8192, 7168]]),
    "output_gate": ([[1.0, 1.0]], [[0.5, 0.5]]),
    "moe_front": (True, False),
    "reduce_fusion": (True, False),
    "expert_lora": ("AssertionError", ["MarlinSituExperts", False, True, ["the base", "the base", "RowHooks"]]),
    "graph_buffers": ("AttributeError", [[24, 2, 256], [48, 128], [24, 2, 256]]),
    "expert_capture": (None, 7),
    "report": (None, list(hook_names())),
    "draft_runner": (None, False),
    "verify_batch": (
        "TypeError",
        {
            "eager": [[8, 8, 8], [0, 8, 16, 24], [2] * 8 + [0] * 8 + [1] * 8],
            "graph": [[0, 8, 16, 24, 32], [2, 0, 1, 0], [2] * 8 + [0] * 8 + [1] * 8],
            "left": None,
            "apart": 0.0,
            "ragged": "RuntimeError: a batch verifies 24 tokens of 3 requests with 8 each at most; adapters need as "
            "many of every request: unset SGLANG_RAGGED_VERIFY_MODE",
        },
    ),
    "draft_logprobs": (
        "ValueError: DSpark speculative decoding does not support return_logprob",
        {"request": None, "apart": 0.0, "shape": [2, 3], "prompt saw": True, "left": True},
    ),
    "draft_allowed": (
        "ValueError: Currently LoRA is only compatible with NGRAM",
        [
            "DSPARK",
            "ValueError: SGLANG_RAGGED_VERIFY_MODE is compact",
            "ValueError: SGLANG_SIMULATE_ACC_LEN is 2.5",
            "ValueError: Currently LoRA",
        ],
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """From one process that puts the hooks in one after the other: importing SGLang takes half a minute."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE / "stubs"), str(HERE.parents[1])])}
    script = HERE / "real_hooks.py"
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


def test_every_hook_is_tried(found: dict[str, list[Any]]) -> None:
    assert set(found) == set(hook_names()) == {*EXPECTED, "direct_swap"}


@pytest.mark.parametrize("name", hook_names())
def test_a_hook_and_its_absence(name: str, found: dict[str, list[Any]]) -> None:
    without, with_hook = found[name]
    if name == "direct_swap":  # copies, what lies in the slot afterwards, and beside it; then the same once more
        assert (without[0], with_hook[0]) == (2 + 4 + 4 + 1, 0)
        assert with_hook[1] == without[1]
        assert (without[2], with_hook[2]) == (4, 0)
        assert without[3] is None
        assert with_hook[3].startswith("RuntimeError: adapter id lost its slot")
        return
    expected_without, expected_with = EXPECTED[name]
    if isinstance(expected_without, str):
        assert str(without).startswith(expected_without), without
    else:
        assert without == expected_without
    assert with_hook == expected_with
