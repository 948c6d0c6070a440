"""What `miles-k3 bench moe` and its kin say without a GPU, and their table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from miles_k3.bench import kernels
from miles_k3.bench.measures import Ceilings, Row, markdown, write
from miles_k3.cli import app
from miles_k3.errors import LaunchError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["moe", "kda", "attention"])
def test_a_missing_gpu_is_named(name: str) -> None:
    with pytest.raises(LaunchError, match=f"bench {name} measures Triton kernels and found no CUDA device"):
        kernels.run(name)
    assert CliRunner().invoke(app, ["bench", name]).exit_code != 0


def test_table_and_json(tmp_path: Path) -> None:
    ceilings = Ceilings(device="a GPU", bytes_s=4e12, flops_s=8e14)
    assert ceilings.floor_ms(8e9, 1.0) == pytest.approx(2.0)
    assert ceilings.floor_ms(1.0, 8e12) == pytest.approx(10.0)
    rows = [Row(kernel="k", shape="s", ms=0.5, floor_ms=0.25, peer="torch", peer_ms=2.0), Row(
        kernel="l", shape="t", ms=1.0, floor_ms=1.0
    )]  # fmt: skip
    table = markdown(rows).splitlines()
    assert table[2:] == [
        "| k | s | 500.0 | 250.0 | 50% | torch | 2,000.0 |",
        "| l | t | 1,000.0 | 1,000.0 | 100% |  |  |",
    ]
    found = json.loads(write("moe", ceilings, rows, tmp_path / "new").read_text())
    assert found["device"] == "a GPU"
    assert found["rows"][0]["peer_ms"] == 2.0
