"""The files of a trainer checkpoint: written by each rank, judged as a whole, read in parts.

`trainer.json`: what is common. `trainer-RRRRR-of-NNNNN.safetensors`, one a rank: its tensors are boxes of the exported
adapter tensors, `<exported name>/<kind>@<start>,<start>`, fp32; its metadata says which checkpoint it belongs to.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles_k3.errors import CheckpointError, remedy
from miles_k3.files import write_text
from miles_k3.k3.safetensors_header import TensorHeader, read_header, shown
from miles_k3.trainer.boxes import Box, find_overlap

if TYPE_CHECKING:
    from miles_k3.trainer.random_states import RandomStates

FACTS = "trainer.json"
FORMAT = 2
KINDS = ("master", "exp_avg", "exp_avg_sq")
RNG = "rng/"
_KEY = re.compile(r"(?P<name>.+)/(?P<kind>\w+)@(?P<start>\d+(,\d+)*)")
_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_WRITE_BYTES = 1 << 20  # small tensors are collected to this, large ones go out as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`trainer.json`. `id` tells this checkpoint's files from another one's; `steps` are Adam's."""

    id: str
    version: int
    steps: int
    world: int
    layout: Mapping[str, int]
    adapter: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int]]  # exported name -> whole shape

    def write(self, folder: Path) -> None:
        content = {name: getattr(self, name) for name in Facts.__slots__}
        write_text(folder / FACTS, json.dumps({"format": FORMAT, **content, "files": self.files}, indent=1) + "\n")

    @property
    def files(self) -> list[str]:
        return [rank_file(rank, self.world) for rank in range(self.world)]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises CheckpointError when it is missing, torn, or of another format."""
        path = folder / FACTS
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; {folder} is not a trainer checkpoint") from None
        except ValueError as e:
            raise CheckpointError(f"{path} is torn ({e}); resume from an older checkpoint") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            number = found.get("format") if isinstance(found, dict) else None
            raise CheckpointError(
                f"{path} has format {number}, expected {FORMAT}: another version of miles-k3 wrote it; end that run "
                "with the version that began it, or start a new one from its exported adapter (lora.init_from)"
            )
        if missing := [name for name in Facts.__slots__ if name not in found]:
            raise CheckpointError(f"{path} lacks {', '.join(missing)}; resume from another checkpoint")
        return cls(**{name: found[name] for name in Facts.__slots__})


def rank_file(rank: int, world: int) -> str:
    return f"trainer-{rank:05d}-of-{world:05d}.safetensors"


def box_key(name: str, kind: str, box: Box) -> str:
    return f"{name}/{kind}@{','.join(map(str, box.start))}"


def write_rank_file(path: Path, tensors: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str]) -> None:
    """Write and fsync a new file of host tensors, fp32 before uint8 so that all are aligned.

    Raises CheckpointError when the system refuses.
    """
    ordered = sorted(tensors, key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for key, tensor in ordered:
        header[key] = {
            "dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes],
        }  # fmt: skip
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("xb", buffering=_WRITE_BYTES) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, tensor in ordered:
                file.write(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise CheckpointError(
            f"{path} can't be written ({e.strerror or e}); {remedy(e, 'another run.folder', 'look at its disk')}, then "
            "go on with --resume"
        ) from None


@dataclass(frozen=True, slots=True)
class Stored:
    """A box of one exported tensor's values of one kind, and where it is."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """A whole checkpoint: each element of each tensor is in exactly one box. `boxes`: those of a (name, kind)."""

    facts: Facts
    boxes: Mapping[tuple[str, str], Sequence[Stored]]


def read_index(folder: Path, *, adapter: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Index:
    """Judge all files of a checkpoint by their headers. `adapter`, `shapes`: what this model and recipe need.

    Raises CheckpointError with the first findings, each with its file and tensor, when a file is missing, torn or of
    another checkpoint, when the adapter or model is another one, and when elements are missing or there twice.
    """
    facts = Facts.read(folder)
    if facts.adapter != adapter:
        raise CheckpointError(
            f"{folder} was trained with the adapter {dict(facts.adapter)}, the recipe has {dict(adapter)}; resume with "
            "the lora section of the run that wrote it"
        )
    _raise(_shape_problems(folder, facts.shapes, shapes))
    stray = {path.name for path in folder.glob("trainer-*")} - set(facts.files)
    _raise(f"{folder / name} is not of this checkpoint, which has {facts.world} ranks; remove it" for name in stray)
    kinds = KINDS if facts.steps else KINDS[:1]
    boxes: dict[tuple[str, str], list[Stored]] = {(name, kind): [] for name in shapes for kind in kinds}
    problems = []
    for rank, file in enumerate(facts.files):
        problems += _add_file(folder / file, rank, facts, boxes)
    _raise(problems)
    _raise(p for (name, kind), parts in boxes.items() for p in _cover_problems(folder, name, kind, parts, shapes[name]))
    return Index(facts=facts, boxes=boxes)


def _raise(problems: Iterable[str]) -> None:
    if found := sorted(problems):
        raise CheckpointError(shown(found, 8))


def _shape_problems(
    folder: Path, found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    for name in found.keys() | wanted.keys():
        ours, theirs = wanted.get(name), found.get(name)
        if ours is None or theirs is None or list(ours) != list(theirs):
            yield (
                f"{folder / FACTS}: tensor {name} is {_shape(theirs)}, this model needs {_shape(ours)}; resume with "
                "the model of the run that wrote it"
            )


def _shape(shape: Sequence[int] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _add_file(path: Path, rank: int, facts: Facts, boxes: Mapping[tuple[str, str], list[Stored]]) -> list[str]:
    """Add what one rank's file holds; the problems with it."""
    try:
        headers = read_header(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (CheckpointError, SafetensorError) as e:
        return [f"{e}; or resume from another checkpoint"]
    if (metadata.get("id"), metadata.get("rank")) != (facts.id, str(rank)):
        return [
            f"{path} belongs to checkpoint {metadata.get('id')} (rank {metadata.get('rank')}, version "
            f"{metadata.get('version')}), expected {facts.id} (rank {rank}, version {facts.version}); copy all files "
            "of a checkpoint from one place"
        ]
    problems = [f"{path}: tensor {RNG}torch is missing; resume from another checkpoint"] * (
        RNG + "torch" not in headers
    )
    for key, header in headers.items():
        if not key.startswith(RNG):
            problems += _add_box(path, key, header, facts, boxes)
    return problems


def _add_box(
    path: Path, key: str, header: TensorHeader, facts: Facts, boxes: Mapping[tuple[str, str], list[Stored]]
) -> list[str]:
    match = _KEY.fullmatch(key)
    place = boxes.get((match["name"], match["kind"])) if match else None
    if match is None or place is None:
        return [f"{path}: tensor {key} is unknown to this model; resume from another checkpoint"]
    if header.dtype != "F32":
        return [f"{path}: tensor {key} is {header.dtype}, expected F32; resume from another checkpoint"]
    box, whole = Box(tuple(map(int, match["start"].split(","))), header.shape), facts.shapes[match["name"]]
    if not box.fits(whole):
        return [f"{path}: tensor {key} of shape {list(header.shape)} goes beyond the whole one's {list(whole)}"]
    place.append(Stored(path.name, key, box))
    return []


def _cover_problems(folder: Path, name: str, kind: str, parts: Sequence[Stored], shape: Sequence[int]) -> Iterator[str]:
    if twice := find_overlap([part.box for part in parts]):
        one, other = (parts[i] for i in twice)
        yield (
            f"{folder}: tensor {name}/{kind} has elements twice: {one.box} in {one.file} and {other.box} in "
            f"{other.file}; resume from another checkpoint"
        )
    elif (found := sum(part.box.numel for part in parts)) != (needed := Box.whole(shape).numel):
        files = ", ".join(sorted({part.file for part in parts})) or "no file"
        yield (
            f"{folder}: tensor {name}/{kind} is missing {needed - found} of its {needed} elements (the others are in "
            f"{files}); resume from another checkpoint"
        )


class Reader:
    """Reads boxes of a judged checkpoint, whatever boxes they were written in. Use as a context manager."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._open.clear()

    def read(self, name: str, kind: str, box: Box) -> Tensor:
        """fp32, of the box's shape, in memory of its own. Raises CheckpointError when a file can't be read."""
        out = torch.empty(box.shape)
        for stored in self.index.boxes[name, kind]:
            if common := box.overlap(stored.box):
                with self._errors(stored.file, stored.key) as file:
                    out[common.within(box)] = file.get_slice(stored.key)[common.within(stored.box)]
        return out

    def random_states(self, rank: int) -> RandomStates:
        """Those of a rank of the run that wrote the checkpoint."""
        from miles_k3.trainer.random_states import RandomStates  # brings megatron-core, which an export does without

        name = rank_file(rank, self.index.facts.world)
        with self._errors(name, RNG) as file:
            keys = [key for key in file.keys() if key.startswith(RNG)]  # noqa: SIM118 (it is no mapping)
            tensors = {key.removeprefix(RNG): file.get_tensor(key) for key in keys}
            metadata = file.metadata()
            return RandomStates(tensors=tensors, texts={name: metadata[RNG + name] for name in ("python", "numpy")})

    @contextmanager
    def _errors(self, file: str, tensor: str) -> Iterator[Any]:
        """The open file; its errors name it and the tensor."""
        path = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            yield self._open[file]
        except (SafetensorError, OSError, KeyError) as e:
            raise CheckpointError(
                f"{path}: tensor {tensor} can't be read ({e}); resume from another checkpoint"
            ) from None
