"""An adapter as a PEFT folder: adapter_config.json and adapter_model.safetensors, out and in.

Two layouts, both are read. Expanded (default): every routed expert has its own 2-D pair, the shared outer factor
repeated (`...experts.7.w1.lora_A.weight`), so that `peft.PeftModel.from_pretrained` finds a module for each key.
Grouped: the 3-D tensors of spec 5.2, marked in adapter_config.json; for servers only, as peft skips what has no module.
"""

from __future__ import annotations

import dataclasses
import filecmp
import functools
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from miles_k3.adapters.layout import (
    OUTER_FACTOR,
    AdapterTensor,
    adapter_layout,
    gate_up_pairs,
    join_expert,
    split_name,
    tensor_name,
)
from miles_k3.adapters.peft_config import CONFIG_FILE, peft_config, read_peft_config
from miles_k3.adapters.tensor_file import Entry, write_tensors
from miles_k3.adapters.update import DTYPES, adapter_sha256, is_finite, key_findings, listed
from miles_k3.errors import AdapterError
from miles_k3.files import sync_folder
from miles_k3.k3.config import K3Config
from miles_k3.types import AdapterConfig, AdapterUpdate

TENSOR_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


# --- out --------------------------------------------------------------------------------------------------------------
def save_peft(
    folder: str | Path, update: AdapterUpdate, base_model: str, *, expand_experts: bool = True, overwrite: bool = False
) -> None:
    """Write the folder whole or not at all: temporary folder, fsync, rename. Same tensors give the same bytes.

    An existing folder with the same content is left alone; another one is replaced only with `overwrite`, and only when
    it holds nothing but an adapter. Raises AdapterError otherwise, or when the update's hash does not fit its tensors.
    """
    folder = Path(folder).absolute()
    if adapter_sha256(update.version, update.config, update.tensors) != update.sha256:
        raise AdapterError(
            f"adapter v{update.version} does not fit its sha256: it changed after the export; export it again"
        )
    entries = list(_entries(update.tensors, expand_experts))
    folder.parent.mkdir(parents=True, exist_ok=True)
    temp = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp")
    temp.mkdir()
    try:
        fields = peft_config(update.config, base_model=base_model, expand_experts=expand_experts)
        with (temp / CONFIG_FILE).open("x") as file:
            file.write(json.dumps(fields, indent=2, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        write_tensors(temp / TENSOR_FILE, entries)
        sync_folder(temp)
        _publish(temp, folder, overwrite)
    finally:
        shutil.rmtree(temp, ignore_errors=True)  # gone already when it was published


def _entries(tensors: Mapping[str, torch.Tensor], expand_experts: bool) -> Iterator[Entry]:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise AdapterError(f"{name} is {tensor.dtype}; expected torch.float32 or torch.bfloat16")
        module, factor = split_name(name)
        if tensor.dim() == 2 or not expand_experts:
            yield Entry(PREFIX + name, tensor.dtype, tuple(tensor.shape), functools.partial(_same, tensor))
            continue
        outer = OUTER_FACTOR[module.rpartition(".")[2]]
        inner = tensors.get(tensor_name(module, "B" if outer == "A" else "A"))
        if inner is None:
            raise AdapterError(f"{name} has no partner; an adapter has both factors of every module")
        for expert in range(inner.shape[0]):
            key = PREFIX + tensor_name(join_expert(module, expert), factor)
            row = 0 if factor == outer else expert
            yield Entry(key, tensor.dtype, tuple(tensor.shape[1:]), functools.partial(tensor.select, 0, row))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _publish(temp: Path, folder: Path, overwrite: bool) -> None:
    """Give `temp` its final name. An overwrite is two renames: between them the name is absent, never half written."""
    if folder.is_dir() and any(folder.iterdir()):
        foreign = sorted({p.name for p in folder.iterdir()} - {CONFIG_FILE, TENSOR_FILE, "README.md"})
        if foreign:
            raise AdapterError(f"{folder} holds other files ({listed(foreign)}); choose a new folder for the adapter")
        if all(
            (folder / n).is_file() and filecmp.cmp(temp / n, folder / n, shallow=False)
            for n in (CONFIG_FILE, TENSOR_FILE)
        ):
            return
        if not overwrite:
            raise AdapterError(f"{folder} holds another adapter; choose a new folder or pass overwrite")
        old = temp.with_suffix(".old")
        folder.rename(old)
        temp.rename(folder)
        shutil.rmtree(old)
    elif folder.exists() and not folder.is_dir():
        raise AdapterError(f"{folder} is a file; choose a folder for the adapter")
    else:
        temp.rename(folder)
    sync_folder(folder.parent)


# --- in ---------------------------------------------------------------------------------------------------------------
def load_peft(folder: str | Path, config: K3Config) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
    """Read either layout into exported names; tensors own their memory and keep the file's dtype.

    `share_gate_up_a` of the result says whether every gate and up pair has equal A factors. Raises AdapterError on a
    config that is not plain LoRA, missing or unmatched keys, other shapes or dtypes, non-finite values, and on expanded
    outer factors that differ between experts; with every finding, one a line.
    """
    folder = Path(folder)
    adapter = read_peft_config(folder)
    layout = adapter_layout(config, adapter)
    path = folder / TENSOR_FILE
    if not path.is_file():
        raise AdapterError(f"{path} does not exist; expected a PEFT folder with {TENSOR_FILE}")
    try:
        with safe_open(path, framework="pt") as file:
            keys = _plain_names(path, list(file.keys()))
            sources = {t.name: _source_names(t, keys, config.num_experts) for t in layout.values()}
            _refuse(path, key_findings(keys, {name: None for names in sources.values() for name in names}))
            _refuse(path, _header_findings(file, keys, sources, layout))
            tensors = {name: _read(file, keys, names, layout[name]) for name, names in sources.items()}
            _refuse(path, _value_findings(file, keys, sources, layout, tensors))
    except SafetensorError as e:
        raise AdapterError(f"{path} is not a whole safetensors file ({e}); export the adapter again") from None
    shared = all(torch.equal(tensors[gate], tensors[up]) for gate, up in gate_up_pairs(layout))
    return dataclasses.replace(adapter, share_gate_up_a=shared), tensors


def _refuse(path: Path, findings: Iterator[str]) -> None:
    problems = list(findings)
    if problems:
        raise AdapterError("\n".join(f"{path} {problem}" for problem in problems))


def _plain_names(path: Path, keys: list[str]) -> dict[str, str]:
    """Name without peft's prefix -> key in the file."""
    names = {key.removeprefix(PREFIX): key for key in keys}
    if len(names) != len(keys):
        twice = sorted(set(keys) - set(names.values()))
        raise AdapterError(f"{path} holds {len(twice)} tensors both with and without {PREFIX}: {listed(twice)}")
    return names


def _source_names(t: AdapterTensor, keys: Mapping[str, str], num_experts: int) -> list[str]:
    """The file's names for one tensor: its own, or one per expert."""
    if t.kind == "dense" or t.name in keys:
        return [t.name]
    return [tensor_name(join_expert(t.module, expert), t.factor) for expert in range(num_experts)]


def _header_findings(
    file: Any, keys: Mapping[str, str], sources: Mapping[str, list[str]], layout: Mapping[str, AdapterTensor]
) -> Iterator[str]:
    for t in layout.values():
        expected = list(t.shape if sources[t.name] == [t.name] else t.shape[1:])
        dtypes = set()
        for name in sources[t.name]:
            header = file.get_slice(keys[name])
            dtypes.add(header.get_dtype())
            if header.get_shape() != expected:
                yield (
                    f"has {name} of shape {header.get_shape()}, this model and rank need {expected}: "
                    "an adapter for another model"
                )
        if not dtypes <= _SAFETENSORS_DTYPES.keys():
            yield f"has {t.name} in {'/'.join(sorted(dtypes))}, expected F32 or BF16; convert it"
        elif len(dtypes) > 1:
            yield f"has experts of {t.module} in different dtypes ({', '.join(sorted(dtypes))}); convert them to one"


def _read(file: Any, keys: Mapping[str, str], names: list[str], t: AdapterTensor) -> torch.Tensor:
    """One exported tensor; of an expanded outer factor expert 0's copy (`_value_findings` compares the others)."""
    if names == [t.name]:
        return file.get_tensor(keys[t.name]).clone()
    first = file.get_tensor(keys[names[0]])
    out = torch.empty(t.shape, dtype=first.dtype)
    for expert in range(t.shape[0]):
        out[expert] = file.get_tensor(keys[names[expert]])
    return out


def _value_findings(
    file: Any, keys: Mapping[str, str], sources: Mapping[str, list[str]], layout: Mapping[str, AdapterTensor],
    tensors: Mapping[str, torch.Tensor],
) -> Iterator[str]:  # fmt: skip
    for t in layout.values():
        tensor = tensors[t.name]
        if not is_finite(tensor):
            yield f"has {int((~torch.isfinite(tensor)).sum())} non-finite values in {t.name}; export a healthy step"
        if not t.shared or sources[t.name] == [t.name]:
            continue
        other = [n for n in sources[t.name][1:] if not torch.equal(file.get_tensor(keys[n]), tensor[0])]
        if other:
            yield (
                f"has {len(other)} experts of {t.module} whose lora_{t.factor} differs from expert 0's, "
                f"though all experts share it in a K3 adapter: {listed(other)}"
            )
