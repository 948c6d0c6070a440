"""The row-wise LoRA kernels in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[3]


def test_rows_are_the_formula() -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "helpers.row_lora_cases"], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["many tokens are SGLang's affair"]
    assert set(said["differences"]) == {"rank 3", "rank 16", "experts elsewhere"}
    assert all(part < 1e-5 for parts in said["differences"].values() for part in parts), said
