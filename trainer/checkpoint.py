"""Trainer state on disk, bit for bit: fp32 masters, Adam's moments, random states, version.

Two files: `trainer.safetensors` (`<parameter>/master`, `/exp_avg`, `/exp_avg_sq`, `rng/...`) and `trainer.json`.
Written into a folder that the caller publishes by renaming it. The learning rate is a function of the version and needs
no state of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_k3.errors import CheckpointError
from miles_k3.trainer.mcore import get_cuda_rng_tracker
from miles_k3.trainer.optim import Optimizer
from miles_k3.types import AdapterConfig

TENSORS, FACTS = "trainer.safetensors", "trainer.json"
FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(folder: Path, optimizer: Optimizer, *, adapter: AdapterConfig, version: int) -> None:
    """Write both files into an existing folder. Raises CheckpointError or OSError when the disk refuses."""
    tensors: dict[str, Tensor] = {}
    steps: dict[str, float] = {}
    for name, _, master in optimizer.named_masters():
        tensors[name + "/master"] = master.detach()
        if state := optimizer.state_of(master):
            steps[name] = float(state["step"])
            tensors.update((f"{name}/{moment}", state[moment]) for moment in _MOMENTS)
    tensors |= _rng_tensors()
    try:
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, folder / TENSORS)
    except SafetensorError as e:  # its form of an error of the file system
        raise CheckpointError(
            f"{folder / TENSORS} can't be written ({e}); free some space, then go on with --resume"
        ) from None
    facts = {
        "format": FORMAT, "version": version, "steps": steps, "adapter": _adapter_facts(adapter),
        "python_rng": random.getstate(), "numpy_rng": _numpy_rng(),
    }  # fmt: skip
    (folder / FACTS).write_text(json.dumps(facts))


def load(folder: Path, optimizer: Optimizer, *, adapter: AdapterConfig) -> int:
    """Bring everything back and return the version; nothing changes unless all of it fits.

    Raises CheckpointError when a file is missing or torn, or holds another model, adapter or format.
    """
    facts, tensors = _read(folder)
    _check_facts(folder, facts, adapter)
    expected = {name: master.shape for name, _, master in optimizer.named_masters()}
    _check_tensors(folder, tensors, expected, set(facts["steps"]))
    with torch.no_grad():
        for name, parameter, master in optimizer.named_masters():
            master.copy_(tensors[name + "/master"])
            parameter.copy_(master)
            state = optimizer.state_of(master)
            state.clear()
            if name in facts["steps"]:
                state["step"] = torch.tensor(facts["steps"][name], dtype=torch.float32)
                state.update((m, tensors[f"{name}/{m}"].to(master.device, copy=True)) for m in _MOMENTS)
    _restore_rng(facts, tensors)
    return facts["version"]


def _adapter_facts(adapter: AdapterConfig) -> dict[str, Any]:
    return {"rank": adapter.rank, "alpha": adapter.alpha, "share_gate_up_a": adapter.share_gate_up_a}


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        facts = json.loads((folder / FACTS).read_text())
        tensors = load_file(folder / TENSORS)
    except FileNotFoundError as e:
        raise CheckpointError(f"{e.filename or folder} is missing; {folder} is not a trainer checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as e:
        raise CheckpointError(f"{folder} holds a torn trainer checkpoint ({e}); resume from an older one") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else None
        raise CheckpointError(f"{folder / FACTS} has format {found}, expected {FORMAT}; another version wrote it")
    return facts, tensors


def _check_facts(folder: Path, facts: Mapping[str, Any], adapter: AdapterConfig) -> None:
    missing = [key for key in ("version", "steps", "adapter", "python_rng", "numpy_rng") if key not in facts]
    if missing:
        raise CheckpointError(f"{folder / FACTS} lacks {', '.join(missing)}; resume from another checkpoint")
    if (ours := _adapter_facts(adapter)) != facts["adapter"]:
        raise CheckpointError(
            f"{folder} was trained with the adapter {facts['adapter']}, the recipe has {ours}; resume with the lora "
            "section of the run that wrote it"
        )


def _check_tensors(
    folder: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size], stepped: set[str]
) -> None:
    want = {f"{name}/master": shape for name, shape in expected.items()}
    want |= {f"{name}/{m}": expected[name] for name in expected if name in stepped for m in _MOMENTS}
    have = {name for name in tensors if not name.startswith("rng/")}
    problems = [f"{name} is missing" for name in want.keys() - have]
    problems += [f"{name} is unknown to this model" for name in have - want.keys()]
    for name in want.keys() & have:
        found = tensors[name]
        if found.shape != want[name] or found.dtype != torch.float32:
            problems.append(f"{name} is {found.dtype} {list(found.shape)}, expected float32 {list(want[name])}")
    if "rng/torch" not in tensors:
        problems.append("rng/torch is missing")
    if problems:
        listed = "; ".join(sorted(problems)[:8])
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"{folder / TENSORS} doesn't fit this model and adapter: {listed}{more}")


def _tracker() -> Any:
    """Megatron's random states, made when the groups came up."""
    return get_cuda_rng_tracker()


def _rng_tensors() -> dict[str, Tensor]:
    states = {"rng/torch": torch.get_rng_state()}
    for name, state in _tracker().get_states().items():
        states[f"rng/megatron/{name}"] = state
    if torch.cuda.is_available():
        states["rng/cuda"] = torch.cuda.get_rng_state()
    return states


def _numpy_rng() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    return {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}


def _restore_rng(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    version, internal, gauss = facts["python_rng"]
    random.setstate((version, tuple(internal), gauss))
    state = facts["numpy_rng"]
    key = np.array(state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state, "state": {**state["state"], "key": key}})
    prefix = "rng/megatron/"
    _tracker().set_states({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    if torch.cuda.is_available() and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"])
    torch.set_rng_state(tensors["rng/torch"])
