"""A checkpoint that several ranks wrote is exported by one process as the run itself exports its adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.runs import start, torchrun_command

from miles_k3.export.origin import open_origin
from miles_k3.export.peft import export_peft
from miles_k3.export.verify import verify_peft

pytestmark = pytest.mark.parallel
RUN = ("run.steps=1", "rollout.prompts_per_step=4", "trainer.parallel.tp=2", "trainer.parallel.ep=2")


def test_two_ranks(tmp_path: Path) -> None:
    done = start(torchrun_command(2, tmp_path, *RUN), OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    said, _ = done.communicate(timeout=600)
    assert done.returncode == 0, said
    run = tmp_path / "tiny-cpu"
    assert len(list(run.glob("checkpoints/step-000001/trainer/*.safetensors"))) == 2
    with open_origin(run) as origin:
        assert origin.version == 1
        export_peft(origin, tmp_path / "exported", resume=False)
        assert verify_peft(tmp_path / "exported", origin.config, origin.adapter, origin.sha256) > 100
    for path in (run / "adapter").iterdir():
        assert path.read_bytes() == (tmp_path / "exported" / path.name).read_bytes(), path.name
