"""An adapter as a PEFT folder: adapter_config.json and adapter_model.safetensors, out and in.

Two layouts, both are read. Expanded (default): every routed expert has its own 2-D pair, the shared outer factor
repeated (`...experts.7.w1.lora_A.weight`), so that `peft.PeftModel.from_pretrained` finds a module for each key.
Grouped: the 3-D tensors of spec 5.2, marked in adapter_config.json; for servers only, as peft skips what has no module.
"""

from __future__ import annotations

import filecmp
import functools
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from miles_k3.adapters.content import CONTENT_SHA256, content_sha256
from miles_k3.adapters.layout import OUTER_FACTOR, join_expert, split_name, tensor_name
from miles_k3.adapters.peft_config import CONFIG_FILE, peft_config
from miles_k3.adapters.peft_read import PREFIX, TENSOR_FILE, PeftReader, read_whole
from miles_k3.adapters.tensor_file import Entry, write_tensors
from miles_k3.adapters.update import DTYPES, adapter_sha256, listed
from miles_k3.errors import AdapterError
from miles_k3.files import remove_tree, sync_folder
from miles_k3.k3.config import K3Config
from miles_k3.types import AdapterConfig, AdapterUpdate


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
    fields = peft_config(update.config, base_model=base_model, expand_experts=expand_experts)
    entries = _entries(update.tensors, expand_experts)
    write_peft(folder, fields, entries, content_sha256(update.config, update.tensors), overwrite=overwrite)


def write_peft(
    folder: Path, fields: Mapping[str, Any], entries: Iterable[Entry], sha256: str, *, overwrite: bool = False
) -> None:
    """`save_peft` from a tensor at a time. `fields` are those of adapter_config.json, `sha256` that of the content."""
    entries = list(entries)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temp = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp")
    temp.mkdir()
    try:
        with (temp / CONFIG_FILE).open("x") as file:
            file.write(json.dumps(fields, indent=2, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        write_tensors(temp / TENSOR_FILE, entries, {CONTENT_SHA256: sha256})
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
        remove_tree(old)
    elif folder.exists() and not folder.is_dir():
        raise AdapterError(f"{folder} is a file; choose a folder for the adapter")
    else:
        temp.rename(folder)
    sync_folder(folder.parent)


# --- in ---------------------------------------------------------------------------------------------------------------
def load_peft(folder: str | Path, config: K3Config) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
    """Read either layout into exported names; tensors own their memory and keep the file's dtype.

    `share_gate_up_a` of the result says whether every gate and up pair has equal A factors. Raises AdapterError as
    `PeftReader` and its `verify` do.
    """
    with PeftReader(folder, config) as source:
        source.verify()
        return source.config, read_whole(source)
