"""The whole loop with trainer and engine on one CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.runs import read_results, train_here

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_short_run(tmp_path: Path, dtype: str, limit: float) -> None:
    result = train_here(tmp_path, "run.steps=4", "eval.prompts=64", "model.device=cuda", f"model.dtype={dtype}",
                        "rollout.sleep_while_training=true")  # fmt: skip
    lines = read_results(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["train/mismatch_abs"] <= limit for line in lines[1:] if "train/mismatch_abs" in line)
    assert result.after is not None
