"""Safetensors shards in and out, one tensor in memory at a time; every error names the file and the tensor."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles_k3.errors import CheckpointError, remedy
from miles_k3.files import sync_folder
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import DType, Param, Part, iter_params
from miles_k3.k3.safetensors_header import TensorHeader, encode_header, read_header, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PLAIN_EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
TORCH_DTYPE = {DType.BF16: torch.bfloat16, DType.F32: torch.float32, DType.U8: torch.uint8}


class Checkpoint:
    """A folder of safetensors shards, opened lazily; `headers` lists every tensor.

    Raises CheckpointError for every missing, torn or truncated shard, for tensors that two shards hold, and where the
    index and the shards disagree.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.headers: dict[str, TensorHeader] = {}
        self._stack, self._open = ExitStack(), {}
        weight_map = self._weight_map()
        self._list = self.folder / (SINGLE if weight_map is None else INDEX)
        problems = []
        for file in [SINGLE] if weight_map is None else sorted(set(weight_map.values())):
            problems += self._add_shard(file)
        if not problems:
            problems = [
                f"{self._list}: places tensor {name} in {file}, which doesn't hold it; copy index and shards again"
                for name, file in (weight_map or {}).items()
                if name not in self.headers or self.headers[name].file != file
            ]
        if problems:
            raise CheckpointError(shown(problems))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._open.clear()

    def _weight_map(self) -> Mapping[str, str] | None:
        """{tensor: shard} of the index; None where a single file stands alone."""
        path = self.folder / INDEX
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            if all(isinstance(file, str) and file == Path(file).name for file in found.values()):
                return found
            reason = "weight_map must map names to files of this folder"
        except FileNotFoundError:
            if (self.folder / SINGLE).exists():
                return None
            raise CheckpointError(
                f"{self.folder}: neither {INDEX} nor {SINGLE}; expected a Hugging Face checkpoint folder"
            ) from None
        except OSError as e:
            raise CheckpointError(f"{path}: can't be read ({e.strerror}); check the path and its permissions") from None
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            reason = f"{type(e).__name__}: {e}"
        raise CheckpointError(f"{path}: not a safetensors index ({reason}); copy the file again")

    def _add_shard(self, file: str) -> list[str]:
        try:
            found = read_header(self.folder / file)
        except CheckpointError as e:
            return str(e).splitlines()
        twice = sorted(found.keys() & self.headers.keys())
        problems = [f"{self.where(n)} is in {file} as well; keep the shard that the index means" for n in twice]
        self.headers.update(found)
        return problems

    def where(self, name: str) -> str:
        """The beginning of a sentence about a tensor: its file and its name."""
        header = self.headers.get(name)
        return f"{self.folder / header.file if header else self._list}: tensor {name}"

    @property
    def packed(self) -> bool:
        """Whether routed experts are in MXFP4: weight_packed decides, never the config's ignore list (spec 1.3)."""
        return any(name.endswith(".weight_packed") for name in self.headers) or not any(
            _PLAIN_EXPERT.search(name) for name in self.headers
        )

    def table(self, config: K3Config) -> Iterator[Param]:
        """The parameter table in the form that this folder stores: experts in MXFP4, or in BF16 as in a merged one."""
        return iter_params(config, packed=self.packed)

    def check(self, params: Iterable[Param]) -> list[str]:
        """Every disagreement with the parameter table, as sentences; vision tensors may be absent altogether."""
        unseen, problems, no_vision, has_vision = set(self.headers), [], [], False
        for p in params:
            if p.name in unseen:
                unseen.remove(p.name)
                has_vision |= p.part is Part.VISION
                problems += self._mismatch(p)
            elif p.part is Part.VISION:
                no_vision.append(p.name)
            else:
                problems.append(self._missing(p.name))
        if has_vision:
            problems += [self._missing(name) for name in no_vision]
        return problems + [
            f"{self.where(name)} has no place in the model that config.json describes; copy both from one source"
            for name in sorted(unseen)
        ]

    def require(self, params: Iterable[Param]) -> None:
        """Raises CheckpointError with the first disagreements with the parameter table and their count."""
        if problems := self.check(params):
            raise CheckpointError(shown(problems))

    def present(self, params: Iterable[Param]) -> Iterator[Param]:
        """The table's tensors that are here: all of them, or all but a vision tower that was left out."""
        return (p for p in params if p.name in self.headers)

    def _missing(self, name: str) -> str:
        return f"{self.where(name)} is missing, but config.json asks for it; copy the checkpoint again"

    def _mismatch(self, p: Param) -> list[str]:
        h = self.headers[p.name]
        out = []
        if h.dtype != p.dtype:
            out.append(f"{self.where(p.name)} is {h.dtype}, expected {p.dtype}; copy it from the checkpoint's source")
        if h.shape != p.shape:
            out.append(
                f"{self.where(p.name)} has shape {list(h.shape)}, expected {list(p.shape)}; "
                "copy config.json and the shards from one source"
            )
        return out

    def read(self, p: Param) -> Tensor:
        """One tensor, memory-mapped. Raises CheckpointError when it isn't what the parameter table says."""
        header = self.headers.get(p.name)
        if header is None:
            raise CheckpointError(self._missing(p.name))
        if problems := self._mismatch(p):
            raise CheckpointError(shown(problems))
        try:
            if header.file not in self._open:
                self._open[header.file] = self._stack.enter_context(
                    safe_open(self.folder / header.file, framework="pt")
                )
            return self._open[header.file].get_tensor(p.name)
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{self.where(p.name)} can't be read ({e}); copy the file again") from None


def write_checkpoint(folder: str | Path, params: Sequence[Param], get: Callable[[Param], Tensor], *,
                     shard_bytes: int = 16 * 10**9, extra_files: Mapping[str, str | bytes] | None = None,
                     ) -> None:  # fmt: skip
    """Stream tensors into shards with an index; the folder appears whole or not at all.

    `get` makes one tensor at a time, written and dropped before the next is asked for; a Checkpoint's `read` passes
    tensors through unchanged. `extra_files` (config.json, tokenizer, ...) maps names to contents. What a killed process
    leaves is `folder`.partial, which the next call replaces. Raises CheckpointError when the folder exists, a tensor is
    not as tabled, or the disk refuses.
    """
    folder, extra = Path(folder), dict(extra_files or {})
    shards = list(plan_shards(params, shard_bytes))
    names = shard_names(len(shards))
    weight_map = {p.name: name for name, shard in zip(names, shards, strict=True) for p in shard}
    assert len(weight_map) == len(params), "a tensor is named twice"
    total = sum(p.num_bytes for p in params)
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} exists already; name a new folder or remove it")
    if clashes := sorted(extra.keys() & {INDEX, *names}):
        raise CheckpointError(f"{folder}: {clashes[0]} is made from the tensors; leave it out of extra_files")
    extra[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    partial = folder.with_name(folder.name + ".partial")
    try:
        with disk_errors(str(partial)):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            free = shutil.disk_usage(partial).free
        if free < total:
            raise CheckpointError(f"{folder}: needs {total:,} bytes, its disk has {free:,} free; choose another disk")
        for name, shard in zip(names, shards, strict=True):
            _write_shard(partial / name, shard, get)
        for name, content in extra.items():
            with NewFile(partial / name) as file:
                file.write(content.encode() if isinstance(content, str) else content, "")
        with disk_errors(str(folder)):
            sync_folder(partial)
            os.rename(partial, folder)
            sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def plan_shards(params: Iterable[Param], shard_bytes: int) -> Iterator[list[Param]]:
    """The tensors of each shard, in order; a tensor larger than a shard gets one of its own."""
    shard: list[Param] = []
    size = 0
    for p in params:
        if shard and size + p.num_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(p)
        size += p.num_bytes
    if shard:
        yield shard


def shard_names(count: int) -> list[str]:
    """Files of a checkpoint of `count` shards."""
    return [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _write_shard(path: Path, shard: Sequence[Param], get: Callable[[Param], Tensor]) -> None:
    with NewFile(path) as file:
        file.write(encode_header((p.name, p.dtype.value, p.shape, p.num_bytes) for p in shard), "")
        for p in shard:
            file.write(_bytes_of(p, get(p), path), f": tensor {p.name}")


def _bytes_of(p: Param, tensor: Tensor, path: Path) -> memoryview:
    if tuple(tensor.shape) != p.shape or tensor.dtype != TORCH_DTYPE[p.dtype]:
        raise CheckpointError(
            f"{path}: tensor {p.name} would be written as {tensor.dtype} {list(tensor.shape)}, "
            f"expected {TORCH_DTYPE[p.dtype]} {list(p.shape)}; nothing was written"
        )
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


class NewFile:
    """A file that is on the disk once the block ends well. Unbuffered: an error belongs to the write it came from."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        with disk_errors(str(self._path)):
            self._file = self._path.open("xb", buffering=0)
        return self

    def write(self, data: bytes | memoryview, what: str) -> None:
        rest = memoryview(data)
        with disk_errors(f"{self._path}{what}"):
            while rest:
                rest = rest[self._file.write(rest) :]

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        with self._file, disk_errors(str(self._path)):
            if kind is None:
                os.fsync(self._file.fileno())


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """A refusal of the system inside the block becomes a CheckpointError that begins with `what`."""
    try:
        yield
    except OSError as e:
        reason = e.strerror or str(e)
        hint = remedy(e, "another folder", "choose another folder")
        raise CheckpointError(f"{what} can't be written ({reason}); {hint}") from e
