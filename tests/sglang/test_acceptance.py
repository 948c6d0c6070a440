"""What SGLang's own kernel commits under a draft is distributed as the target says, whatever the draft proposes."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_a_token_behind_an_anchor_follows_the_target() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE / "stubs"), str(HERE.parents[1])])}
    script = HERE / "real_acceptance.py"
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    for found in json.loads(line.removeprefix("FOUND ")):
        assert found == pytest.approx([0.5, 0.2, 0.3], abs=1e-6)


def test_no_threshold_makes_it_more_willing() -> None:
    """The worker calls it with both at 1, not with the server's options; the kernel doesn't look at them."""
    from sglang.kernels.ops.speculative import reject_sampling
    from sglang.kernels.ops.speculative.dspark import dspark_accept

    called = inspect.getsource(dspark_accept._accept_sampling_core)
    assert "threshold_single=1.0" in called
    assert "threshold_acc=1.0" in called
    assert "threshold" not in inspect.getsource(reject_sampling.speculative_sampling_classic_kernel.fn)
