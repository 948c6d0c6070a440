"""A PEFT folder of either layout, judged by its headers, and read a part at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles_k3.adapters.content import CONTENT_SHA256, streamed_sha256
from miles_k3.adapters.layout import AdapterTensor, adapter_layout, gate_up_pairs, join_expert, tensor_name
from miles_k3.adapters.peft_config import read_peft_config
from miles_k3.adapters.update import is_finite, key_findings, listed
from miles_k3.errors import AdapterError
from miles_k3.k3.config import K3Config

TENSOR_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
SPELT_OUT = 3  # a wrong rank misshapes every tensor
_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


class PeftReader:
    """An AdapterSource of a PEFT folder. Use as a context manager.

    Raises AdapterError on a config that is not plain LoRA, missing or unmatched keys, other shapes or dtypes, with
    every finding, one a line. Values are judged by `verify` only.
    """

    def __init__(self, folder: str | Path, config: K3Config) -> None:
        folder = Path(folder)
        self.config = read_peft_config(folder)
        self.layout = adapter_layout(config, self.config)
        self.path = folder / TENSOR_FILE
        if not self.path.is_file():
            raise AdapterError(f"{self.path} does not exist; expected a PEFT folder with {TENSOR_FILE}")
        self.path.open("rb").close()  # says why it can't be read, where safe_open calls every reason a missing file
        try:
            self._file = safe_open(self.path, framework="pt")
        except SafetensorError as e:
            raise self._torn(e) from None
        self._keys = self._plain_names(list(self._file.keys()))
        self._sources = {t.name: self._source_names(t, config.num_experts) for t in self.layout.values()}
        self._refuse(key_findings(self._keys, {name: None for names in self._sources.values() for name in names}))
        self._refuse(self._header_findings())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(None, None, None)

    def dtype(self, name: str) -> torch.dtype:
        return _SAFETENSORS_DTYPES[self._file.get_slice(self._key(name, 0)).get_dtype()]

    def read(self, name: str, expert: int = 0) -> Tensor:
        """An exported tensor, memory-mapped; of a routed-expert one the 2-D part of `expert`."""
        return self._part(name, 0 if self.layout[name].shared else expert)

    def verify(self) -> str:
        """Read everything once; the content's hash, and `config.share_gate_up_a` says from then on how it is.

        Raises AdapterError on values that are not finite, on expanded outer factors that differ between experts, and
        when the file names another hash than that of its tensors.
        """
        problems: list[str] = []
        sha256 = streamed_sha256(self, lambda t, expert, part: problems.extend(not_finite(t, expert, part)))
        for t in self.layout.values():
            problems += self._outer_findings(t)
        announced = (self._file.metadata() or {}).get(CONTENT_SHA256, sha256)
        if announced != sha256 and not problems:
            problems.append(
                f"holds other tensors, rank or alpha than it was written with (sha256 {sha256[:12]}..., announced "
                f"{announced[:12]}...): the file was changed or damaged; export the adapter again"
            )
        self._refuse(iter(problems))
        pairs = gate_up_pairs(self.layout)
        shared = all(torch.equal(self.read(gate), self.read(up)) for gate, up in pairs)
        self.config = dataclasses.replace(self.config, share_gate_up_a=shared)
        return sha256

    def _part(self, name: str, expert: int) -> Tensor:
        try:
            if self._grouped(name) and self.layout[name].kind == "expert":
                return self._file.get_slice(self._key(name, 0))[expert]
            return self._file.get_tensor(self._key(name, expert))
        except SafetensorError as e:
            raise self._torn(e) from None

    def _torn(self, error: Exception) -> AdapterError:
        return AdapterError(f"{self.path} is not a whole safetensors file ({error}); export the adapter again")

    def _refuse(self, findings: Iterator[str]) -> None:
        if problems := list(findings):
            raise AdapterError("\n".join(f"{self.path} {problem}" for problem in problems))

    def _plain_names(self, keys: list[str]) -> Mapping[str, str]:
        """Name without peft's prefix -> key in the file."""
        names = {key.removeprefix(PREFIX): key for key in keys}
        if len(names) != len(keys):
            twice = sorted(set(keys) - set(names.values()))
            raise AdapterError(
                f"{self.path} holds {len(twice)} tensors both with and without {PREFIX}: {listed(twice)}"
            )
        return names

    def _source_names(self, t: AdapterTensor, num_experts: int) -> list[str]:
        """The file's names for one tensor: its own, or one per expert."""
        if t.kind == "dense" or t.name in self._keys:
            return [t.name]
        return [tensor_name(join_expert(t.module, expert), t.factor) for expert in range(num_experts)]

    def _grouped(self, name: str) -> bool:
        return self._sources[name] == [name]

    def _key(self, name: str, expert: int) -> str:
        names = self._sources[name]
        return self._keys[names[expert if len(names) > 1 else 0]]

    def _header_findings(self) -> Iterator[str]:
        misshapen: list[str] = []
        for t in self.layout.values():
            expected = list(t.shape if self._grouped(t.name) else t.shape[1:])
            dtypes = set()
            for name in self._sources[t.name]:
                header = self._file.get_slice(self._keys[name])
                dtypes.add(header.get_dtype())
                if header.get_shape() != expected:
                    misshapen.append(name)
                    if len(misshapen) <= SPELT_OUT:
                        yield (
                            f"has {name} of shape {header.get_shape()}, this model and rank need "
                            f"{expected}: an adapter for another model, or another r than adapter_config.json says"
                        )
            if not dtypes <= _SAFETENSORS_DTYPES.keys():
                yield f"has {t.name} in {'/'.join(sorted(dtypes))}, expected F32 or BF16; convert it"
            elif len(dtypes) > 1:
                yield (
                    f"has experts of {t.module} in different dtypes ({', '.join(sorted(dtypes))}); convert them to one"
                )
        if len(misshapen) > SPELT_OUT:
            yield f"has {len(misshapen)} tensors of other shapes than this model and rank need, in all"

    def _outer_findings(self, t: AdapterTensor) -> Iterator[str]:
        """Expanded copies of the factor that all experts share must be equal."""
        if not t.shared or self._grouped(t.name):
            return
        first, names = self.read(t.name), self._sources[t.name]
        other = [name for i, name in enumerate(names) if i and not torch.equal(self._part(t.name, i), first)]
        if other:
            yield (
                f"has {len(other)} experts of {t.module} whose lora_{t.factor} differs from expert 0's, "
                f"though all experts share it in a K3 adapter: {listed(other)}"
            )


def not_finite(t: AdapterTensor, expert: int, part: Tensor) -> Iterator[str]:
    """A sentence where a part of a tensor holds NaN or infinities."""
    if is_finite(part):
        return
    where = f"{t.name}, expert {expert}" if t.shape[0] > 1 and t.kind == "expert" else t.name
    yield f"has {int((~torch.isfinite(part)).sum())} non-finite values in {where}; export a healthy step"


def read_whole(source: PeftReader) -> dict[str, Tensor]:
    """Every exported tensor, in memory of its own."""
    tensors = {}
    for t in source.layout.values():
        if t.kind == "dense":
            tensors[t.name] = source.read(t.name).clone()
            continue
        tensors[t.name] = out = torch.empty(t.shape, dtype=source.dtype(t.name))
        for expert in range(t.shape[0]):
            out[expert] = source.read(t.name, expert)
    return tensors
