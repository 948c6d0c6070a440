"""The adapter itself, written as a PEFT folder a part at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from miles_k3.adapters.content import AdapterSource
from miles_k3.adapters.layout import join_expert, tensor_name
from miles_k3.adapters.peft_config import peft_config
from miles_k3.adapters.peft_io import write_peft
from miles_k3.adapters.peft_read import PREFIX
from miles_k3.adapters.tensor_file import Entry
from miles_k3.errors import ConfigError
from miles_k3.export.origin import Origin
from miles_k3.files import remove_tree
from miles_k3.k3.safetensors_io import disk_errors


def export_peft(origin: Origin, folder: Path, *, resume: bool) -> None:
    """Experts expanded, so that peft finds a module for each key. Raises ConfigError when `folder` exists.

    `resume`: remove what a killed export of the same name left; the one file is written anew.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already; name a new folder, or remove it")
    if resume:
        for left in folder.absolute().parent.glob(f".{folder.name}.*.tmp"):
            remove_tree(left)
    with disk_errors(str(folder)):
        write_adapter(folder, origin.adapter, origin.sha256, str(origin.model))


def write_adapter(
    folder: Path, adapter: AdapterSource, sha256: str, base_model: str, *, overwrite: bool = False
) -> None:  # fmt: skip
    """The folder, whole or not at all; `sha256` is that of the adapter's content."""
    fields = peft_config(adapter.config, base_model=base_model, expand_experts=True)
    write_peft(folder.absolute(), fields, _entries(adapter), sha256, overwrite=overwrite)


def _entries(adapter: AdapterSource) -> Iterator[Entry]:
    experts = max((t.shape[0] for t in adapter.layout.values() if t.kind == "expert"), default=0)
    for t in adapter.layout.values():
        dtype = adapter.dtype(t.name)
        if t.kind == "dense":
            yield Entry(PREFIX + t.name, dtype, t.shape, partial(adapter.read, t.name))
            continue
        for expert in range(experts):
            name = tensor_name(join_expert(t.module, expert), t.factor)
            yield Entry(PREFIX + name, dtype, t.shape[1:], partial(adapter.read, t.name, expert))
