"""Each thing that the doctor looks for, broken once: found, named, and with a way out."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.runs import small_recipe
from helpers.tiny import tiny_adapter

from miles_k3 import cli
from miles_k3.adapters.peft_io import save_peft
from miles_k3.adapters.update import make_update
from miles_k3.doctor import diagnosis, machine, reach, storage, versions
from miles_k3.findings import Finding, Findings, Level
from miles_k3.k3.config import K3Config
from miles_k3.run_folder import RunFolder
from miles_k3.types import AdapterConfig

TINY = Path(__file__).parents[3] / "assets" / "tiny-k3"
OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL


def asked(question: Callable[..., None], *arguments: object, **options: object) -> list[Finding]:
    found = Findings()
    question(found, *arguments, **options)
    for finding in found:
        assert finding.fix or finding.level is OK or "; " in finding.text, f"{finding} names no way out"
    return found


def only(findings: list[Finding], level: Level, *parts: str) -> None:
    (finding,) = findings
    assert finding.level is level, finding
    for part in parts:
        assert part in finding.sentence


# --- versions ---------------------------------------------------------------------------------------------------------
def test_versions_as_verified() -> None:
    assert [f.level for f in asked(versions.check_versions)] == [OK, OK]


def test_other_versions_than_verified(tmp_path: Path) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text((versions.ROOT / "constraints.txt").read_text().replace("\npydantic==", "\npydantic==1"))
    only(asked(versions.check_versions, pins)[1:], WARN, "pydantic", "verified: 1", "pip install -c constraints.txt")
    only(asked(versions.check_versions, tmp_path / "none")[1:2], WARN, "isn't there")


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "requires", lambda name: ["no-such-package>=1", "torch>=99", "ray; extra == 'ray'"])
    found = asked(versions.check_versions)
    assert [(f.name, f.level) for f in found[1:]] == [("no-such-package", FAIL), ("torch", FAIL)]
    assert "torch>=99 is needed" in found[2].text


def test_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_installed", lambda name: None)
    only(asked(versions.check_sglang, wanted=False), OK, "embedded engine doesn't need it")
    only(asked(versions.check_sglang, wanted=True), FAIL, "rollout.engine: embedded")
    monkeypatch.setattr(versions, "_installed", lambda name: "0.5.17")
    only(asked(versions.check_sglang, wanted=True), OK, "0.5.17")
    monkeypatch.setattr(versions, "_installed", lambda name: "9.9")
    only(asked(versions.check_sglang, wanted=False), WARN, "0.5.17 was verified")
    only(asked(versions.check_sglang, wanted=True), FAIL, "9.9; 0.5.17 was verified")


# --- machine ----------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(torch.cuda.is_available(), reason="what a host without GPU is told")
def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_driver", list)
    only(asked(machine.check_devices), OK, "no GPU", "CPU cores")
    only(asked(machine.check_devices, "cuda"), FAIL, "model.device is cuda")
    monkeypatch.setattr(machine, "_driver", lambda: [("580.1", "H200", 140000, 10)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    only(asked(machine.check_devices), FAIL, "580.1 has 1 GPUs", "sees none", "install a driver for CUDA")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    only(asked(machine.check_devices), FAIL, "unset CUDA_VISIBLE_DEVICES")


def test_devices_of_a_gpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_available": True, "device_count": 1, "get_device_name": "H200"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(machine, "_driver", lambda: [("580.1", "H200", 140000, 9000)])
    first, second = asked(machine.check_devices)
    assert (first.level, second.level) == (OK, WARN)
    assert "1 x H200 (sm 9.0), driver 580.1" in first.text
    assert "GPU 0: 9000 of 140000 MB" in second.text


def test_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.1, NVIDIA H200, 143771, 12'\necho 'garbage'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine._driver() == [("580.1", "NVIDIA H200", 143771, 12)]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine._driver() == []


def test_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "free total")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 << 20, 64 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    files, memory = asked(machine.check_limits, tmp_path)
    assert (files.level, memory.level) == (WARN, WARN)
    assert "limits.conf" in files.fix
    assert "--shm-size" in memory.fix
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 65536))
    assert "ulimit -n 4096" in asked(machine.check_limits, tmp_path)[0].fix
    only(asked(machine.check_limits, tmp_path / "none")[1:], FAIL, "isn't there")


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({}, OK),
        ({"http_proxy": "http://proxy:3128"}, WARN),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "localhost"}, WARN),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "localhost, 127.0.0.1"}, OK),
        ({"all_proxy": "http://proxy:3128", "no_proxy": "*"}, OK),
    ],
)
def test_proxies(environment: dict[str, str], level: Level) -> None:
    only(asked(machine.check_proxies, environment), level)


# --- reach ------------------------------------------------------------------------------------------------------------
def test_hosts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        only(asked(reach.check_hosts, [f"127.0.0.1:{port}"]), OK, f"answers on port {port}")
    only(asked(reach.check_hosts, [f"127.0.0.1:{port}"]), OK, f"nobody listens on port {port} yet")
    only(asked(reach.check_hosts, ["127.0.0.1:x"]), FAIL, "'x' is no port")
    only(asked(reach.check_hosts, ["no.such.host.invalid"]), FAIL, "doesn't resolve", "/etc/hosts")


def test_a_host_that_swallows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(self: socket.socket, address: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket.socket, "connect", connect)
    only(asked(reach.check_hosts, ["127.0.0.1:9"]), FAIL, "is not reached (timed out)", "open the port")


@pytest.mark.parallel
def test_two_processes_through_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    only(asked(reach.check_reach), OK, "reach one another")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    only(asked(reach.check_reach), FAIL, "nosuch0", "GLOO_SOCKET_IFNAME=lo")


def test_a_sum_that_comes_out_wrong_or_never(monkeypatch: pytest.MonkeyPatch) -> None:
    original = subprocess.Popen

    def dies(command: list[str], **options: object) -> subprocess.Popen[str]:
        return original([sys.executable, "-c", "raise SystemExit('1 + 2 became 5.0')"], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", dies)
    only(asked(reach.check_reach), FAIL, "1 + 2 became 5.0")


# --- storage ----------------------------------------------------------------------------------------------------------
def test_disk_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage, "SLOW_BYTES_S", 0.0)
    only(asked(storage.check_disk_speed, tmp_path / "not" / "yet", size=1 << 20), OK, str(tmp_path), "MB/s")
    monkeypatch.setattr(storage, "SLOW_BYTES_S", 1e15)
    only(asked(storage.check_disk_speed, tmp_path, size=1 << 20), WARN, "choose a faster run.folder")
    assert not list(tmp_path.iterdir())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    only(asked(storage.check_disk_speed, tmp_path, size=1 << 20), FAIL, "No space left on device")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def test_model_files_left_half_copied(model: Path) -> None:
    only(asked(storage.check_model_files, model, hashes=False), OK, "none known")
    (model / "model-00001-of-00002.safetensors").write_bytes(b"")
    (model / "blob.incomplete").write_bytes(b"")
    (model / "tokenizer.model").symlink_to("../../blobs/gone")
    found = asked(storage.check_model_files, model, hashes=False)
    assert [f.level for f in found] == [FAIL, FAIL, FAIL, OK]
    assert "blob.incomplete is an unfinished copy" in found[0].text
    assert "a link to nothing" in found[1].text
    assert "model-00001-of-00002.safetensors: no entry" in found[2].text


@pytest.mark.parametrize("source", ["sums", "export", "download", "cache"])
def test_hashes(model: Path, tmp_path: Path, source: str) -> None:
    path = model / "model.safetensors"
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if source == "sums":
        (model / "SHA256SUMS").write_text(f"{sha256}  ./{path.name}\n{'0' * 64}  not-here\nnonsense\n")
    elif source == "export":
        (model / "export.json").write_text(json.dumps({"files": {path.name: {"size": 1, "sha256": sha256}}}))
    elif source == "download":
        notes = model / ".cache" / "huggingface" / "download"
        notes.mkdir(parents=True)
        (notes / f"{path.name}.metadata").write_text(f"{'a' * 40}\n{sha256}\n1.0\n")
        (notes / "config.json.metadata").write_text(f"{'a' * 40}\n{'b' * 40}\n1.0\n")  # git's hash, not SHA-256
    else:
        blob = tmp_path / "blobs" / sha256
        blob.parent.mkdir()
        path.rename(blob)
        path.symlink_to(blob)
    only(asked(storage.check_model_files, model, hashes=False), OK, "known of 1 files; --hashes compares them")
    only(asked(storage.check_model_files, model, hashes=True), OK, "1 files have the content of their source")
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x99")
    only(
        asked(storage.check_model_files, model, hashes=True), FAIL, "has other content than its source", "copy it again"
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as the loop leaves it, but for the trainer's part of the checkpoints."""
    root = tmp_path_factory.mktemp("runs")
    with RunFolder.create(small_recipe(root)) as run:
        for step in (1, 2):
            draft = run.begin_checkpoint(step)
            assert draft is not None
            (draft.folder / "loop.json").write_text(json.dumps({"step": step}))
            run.commit_checkpoint(draft)
        run.metrics_path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(3)))
        shape = AdapterConfig(rank=8, alpha=16.0)
        tensors = tiny_adapter(K3Config.from_folder(TINY), shape)
        save_peft(run.adapter, make_update(2, shape, tensors), str(TINY))
    return run.path


def test_a_run(finished: Path, tmp_path: Path) -> None:
    assert [f.level for f in asked(storage.check_run_files, finished)] == [OK, OK]
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / "checkpoints" / "step-000001" / "loop.json").write_text("")
    (run / "checkpoints" / ".tmp-step-000003").mkdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "re')
    found = asked(storage.check_run_files, run)
    assert [(f.name, f.level) for f in found] == [("checkpoints", WARN), ("metrics", WARN), ("leftovers", WARN)]
    assert "step-000001: loop.json has 0 bytes" in found[0].text
    (run / "checkpoints" / "step-000002" / "COMPLETE").unlink()
    found = asked(storage.check_run_files, run)
    assert [f.level for f in found[:2]] == [FAIL, FAIL]
    assert "bring one back from a copy" in found[0].fix
    (run / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n')
    assert any(":2 is no line of metrics" in f.text and f.level is FAIL for f in asked(storage.check_run_files, run))


def test_an_adapter(finished: Path, tmp_path: Path) -> None:
    config = K3Config.from_folder(TINY)
    only(asked(storage.check_adapter, finished / "adapter", config), OK, "rank 8, alpha 16", "whole")
    copy = Path(shutil.copytree(finished / "adapter", tmp_path / "adapter"))
    with (copy / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x01")
    only(asked(storage.check_adapter, copy, config), FAIL, "than it was written with")


# --- all of it --------------------------------------------------------------------------------------------------------
@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the processes."""
    monkeypatch.setattr(diagnosis, "check_reach", lambda found, devices: found.add("gloo", True, "asked"))


def doctor(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["miles-k3", "doctor", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.usefixtures("quick")
def test_a_run_through_the_command_line(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert doctor(monkeypatch, str(finished), "--json", "--host", "127.0.0.1") == 0
    said = json.loads(capfd.readouterr().out)
    names = [row["name"] for row in said["findings"]]
    wanted = {"python", "devices", "gloo", "127.0.0.1", "sglang", "disk speed", "weights", "tokenizer", "template"}
    assert said["ok"]
    assert wanted | {"memory", "hashes", "checkpoints", "adapter"} <= set(names)


@pytest.mark.usefixtures("quick")
def test_a_broken_model_through_the_command_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    (model / "tokenizer.json").write_text("{")
    assert doctor(monkeypatch, "tiny-cpu", "--set", f"model.path={model}", "--json") == 1
    said = json.loads(capfd.readouterr().out)
    failed = {row["name"]: row["fix"] for row in said["findings"] if row["level"] == "fail"}
    assert not said["ok"]
    assert {"weights", "tokenizer"} <= set(failed)
    assert all(failed.values()), failed
    assert "copy the file again" in failed["weights"]


@pytest.mark.usefixtures("quick")
def test_the_machine_alone(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert doctor(monkeypatch) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("✓ disk speed") for line in lines)
    assert not any("weights" in line for line in lines)


def test_what_the_check_finds_has_its_fix_apart() -> None:
    finding = diagnosis._with_fix(Finding("x", FAIL, "a; b; do c"))
    assert (finding.text, finding.fix) == ("a; b", "do c")
