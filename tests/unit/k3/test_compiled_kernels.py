"""Every kernel compiles at Kimi K3's widths for the GPUs that people have, on a machine that has none of them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[3] / "scripts" / "compile_kernels.py"
SHARED_BYTES = 227 << 10  # that a block may take, on Hopper and Blackwell
KERNELS = {
    "_attn_res_norm", "_norm_rows", "_gated", "_mla_norms", "_kda_decode", "_verify", "_fold", "_roll", "_conv",
    "_read_split", "_merge", "_choose", "_dispatch", "_reorder", "gate_up_kernel", "down_kernel", "_combine",
    "_low_kernel", "_forward", "_backward", "_skinny", "_expand", "_situ",
    "_block_attention", "_shrink", "_expand_sum", "_prepare", "_sum_parts", "_pick",
}  # fmt: skip

NEVER_DEPENDENT = {  # no part of a plain decode step of ours
    "_verify", "_fold", "_roll", "_conv", "_forward", "_backward", "_block_attention", "_shrink", "_expand_sum",
    "_prepare",
}  # fmt: skip


def test_each_form_of_a_tile_is_looked_at() -> None:
    """A form that no case picks would be looked at by nobody: not for spills, not for hazards."""
    from miles_k3.k3.kernels.grouped_mxfp4 import forward_shape

    (line,) = (line for line in SCRIPT.read_text().splitlines() if line.startswith("EXPERT_LOADS"))
    loads = ast.literal_eval(line.split("=")[1].split("#")[0].strip())
    forms = {forward_shape(rows, 896) for rows in range(1, 896 * 300, 64)}
    assert {forward_shape(load * 896, 896) for load in loads} == forms


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dependent"), [(90, False), (100, False), (103, False), (90, True)])
def test_all_forms_fit(capability: int, dependent: bool, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = tmp_path / "kernels.json"
    line = [sys.executable, str(SCRIPT), "--capability", str(capability), "--json", str(out)]
    line += ["--dependent"] if dependent else []
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())
    assert {row["kernel"] for row in rows} == KERNELS
    assert {row["kernel"] for row in rows if row["waits"]} == (KERNELS - NEVER_DEPENDENT if dependent else set())
    assert [row for row in rows if row["hazards"]] == []
    assert [row for row in rows if row["shared"] > SHARED_BYTES or row["spilled"] > 400] == []
