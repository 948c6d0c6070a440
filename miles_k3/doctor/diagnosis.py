"""Every question of the doctor, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from miles_k3.check import check_recipe
from miles_k3.config import Recipe
from miles_k3.doctor.machine import check_devices, check_limits, check_proxies
from miles_k3.doctor.reach import check_hosts, check_reach
from miles_k3.doctor.storage import check_adapter, check_disk_speed, check_model_files, check_run_files
from miles_k3.doctor.versions import check_sglang, check_versions
from miles_k3.findings import Finding, Findings


def diagnose(
    recipe: Recipe | None, run: Path | None = None, *, hosts: Sequence[str] = (), hashes: bool = False
) -> list[Finding]:
    """What `recipe` needs of this machine, or without one what any run does; with `run` also that run's files."""
    found = Findings()
    check_versions(found)
    check_devices(found, recipe.model.device if recipe else "auto")
    check_limits(found)
    check_proxies(found)
    check_reach(found, devices=_devices())
    check_hosts(found, hosts)
    check_sglang(found, wanted=recipe is not None and recipe.rollout.engine == "sglang")
    check_disk_speed(found, Path(recipe.run.folder if recipe else ".").expanduser().absolute())
    if recipe is not None:
        found += check_recipe(recipe)
        if recipe.model.weights == "checkpoint":
            check_model_files(found, Path(recipe.model.path), hashes=hashes)
    if run is not None and recipe is not None:
        check_run_files(found, run)
        if (run / "adapter").is_dir() and any(f.name == "model" and f.ok for f in found):
            from miles_k3.k3.config import K3Config

            check_adapter(found, run / "adapter", K3Config.from_folder(recipe.model.path))
    return [_with_fix(finding) for finding in found]


def _devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _with_fix(finding: Finding) -> Finding:
    """The product's sentences end with what to do, after a semicolon."""
    if finding.ok or finding.fix or "; " not in finding.text:
        return finding
    text, _, fix = finding.text.rpartition("; ")
    return dataclasses.replace(finding, text=text, fix=fix)
