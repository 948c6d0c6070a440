"""GPUs and driver, shared memory, file limits, proxies."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from miles_k3.findings import Findings

OPEN_FILES = 4096  # a server with a thousand clients, or a checkpoint of a hundred shards on many ranks
SHARED_MEMORY = 2 * 10**9  # adapters travel through it between processes, and torch's workers too
_QUERY = "driver_version,name,memory.total,memory.used"
BUSY_MB = 500


def check_devices(found: Findings, wanted: str = "auto") -> None:
    """What torch sees beside what the driver says. `wanted`: the recipe's model.device."""
    import torch

    driver, seen = _driver(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not driver and not seen:
        if wanted == "cuda":
            found.fail(
                "devices", "no GPU, but model.device is cuda", "set model.device: auto, or go to a host with one"
            )
        else:
            found.add("devices", True, f"no GPU; {len(os.sched_getaffinity(0))} CPU cores")
        return
    if not seen:
        reason = "CUDA_VISIBLE_DEVICES hides them" if "CUDA_VISIBLE_DEVICES" in os.environ else "torch can't use them"
        found.fail(
            "devices",
            f"the driver {driver[0][0]} has {len(driver)} GPUs, torch {torch.__version__} sees none: {reason}",
            "unset CUDA_VISIBLE_DEVICES" if "hides" in reason else
            f"install a driver for CUDA {torch.version.cuda}, or a torch for the driver's CUDA",
        )  # fmt: skip
        return
    names = sorted({torch.cuda.get_device_name(i) for i in range(seen)})
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    version = f"driver {driver[0][0]}, " if driver else ""
    found.add("devices", True, f"{seen} x {', '.join(names)} (sm {capability}), {version}CUDA {torch.version.cuda}")
    if busy := [f"GPU {i}: {used} of {total} MB" for i, (_, _, total, used) in enumerate(driver) if used > BUSY_MB]:
        found.warn("device memory", f"in use already: {', '.join(busy)}", "end what uses it (nvidia-smi names it)")


def check_limits(found: Findings, shared_memory: Path = Path("/dev/shm")) -> None:
    """Open files and shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        way = f"ulimit -n {OPEN_FILES}" if hard >= OPEN_FILES else "raise nofile in /etc/security/limits.conf"
        found.warn("open files", f"{soft} at most, {OPEN_FILES} are wanted with many clients or ranks", way)
    else:
        found.add("open files", True, f"{soft} at most")
    if not shared_memory.is_dir():
        found.fail(
            "shared memory", f"{shared_memory} isn't there", "mount a tmpfs there; processes hand adapters over in it"
        )
        return
    usage = shutil.disk_usage(shared_memory)
    if usage.free < SHARED_MEMORY:
        found.warn(
            "shared memory", f"{usage.free / 1e9:.2f} GB free of {usage.total / 1e9:.2f} in {shared_memory}",
            "give the container more (docker run --shm-size 16g, or an emptyDir of medium Memory)",
        )  # fmt: skip
    else:
        found.add("shared memory", True, f"{usage.free / 1e9:.1f} GB free in {shared_memory}")


def check_proxies(found: Findings, environment: Mapping[str, str] = os.environ) -> None:
    """A proxy between processes of one host swallows their calls."""
    values = {key.lower(): value for key, value in environment.items()}
    proxies = [key for key in ("http_proxy", "https_proxy", "all_proxy") if values.get(key)]
    spared = [host.strip() for host in values.get("no_proxy", "").split(",")]
    if proxies and "*" not in spared and not {"localhost", "127.0.0.1"} <= set(spared):
        found.warn("proxies", f"{', '.join(proxies)} set, and no_proxy spares not both localhost and 127.0.0.1",
                   "export no_proxy=localhost,127.0.0.1 (and the hosts of the run)")  # fmt: skip
    else:
        found.add("proxies", True, f"{', '.join(proxies)} spare this host" if proxies else "none")


def _driver() -> list[tuple[str, str, int, int]]:
    """(driver, name, MB in all, MB used) of each GPU, from nvidia-smi; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in text.splitlines() if line.count(", ") == 3]
    return [(row[0], row[1], int(row[2]), int(row[3])) for row in rows if row[2].isdigit() and row[3].isdigit()]
