"""Trainer state on disk, bit for bit: fp32 masters, Adam's moments, random states, version.

Each rank writes the elements that its optimizer holds, under the names that the adapter is exported by, so that any
other layout finds what it needs; what several ranks hold is written once, by turns. The files are described in
`checkpoint_files`. They go into a folder that the caller publishes by renaming it, once all ranks are done. The
learning rate is a function of the version and needs no state of its own.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from miles_k3.adapters.layout import AdapterTensor, gate_up_pairs
from miles_k3.config import ParallelSection
from miles_k3.trainer.adapter_shards import Placement, placements
from miles_k3.trainer.boxes import Box, boxes_of_run
from miles_k3.trainer.checkpoint_files import FACTS, RNG, Facts, Reader, box_key, rank_file, read_index, write_rank_file
from miles_k3.trainer.distributed import Ranks
from miles_k3.trainer.optim import MOMENTS, Optimizer, Shard
from miles_k3.trainer.random_states import RandomStates
from miles_k3.types import AdapterConfig
from miles_k3.world import World


class Writing:
    """A checkpoint's file on its way to disk, in a thread that talks to no other rank and to no device.

    The process doesn't end before it has.
    """

    def __init__(self, work: Callable[[], None], files: Sequence[Path]) -> None:
        self.files = files
        self._work, self._error = work, None
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until the file is flushed. Raises, once, what the writing raised."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:  # noqa: BLE001  (raised by `wait`)
            self._error = e


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Elements [begin, end) of a flattened parameter, all of one placement and held by one shard."""

    place: Placement
    shard: Shard
    begin: int
    end: int

    def boxes(self) -> Iterator[Box]:
        """What it is of the exported tensor, in the order of its elements."""
        offset, place = self.place.offset, self.place
        for box in boxes_of_run(place.shape, self.begin - offset, self.end - offset):
            yield box.shifted(place.start)

    def own_part(self) -> _Run:
        """This rank's of the ranks that hold the same elements: they share the writing."""
        if self.shard.shared_out:
            return self
        copies, length = self.place.copies, self.end - self.begin
        begin, end = (self.begin + length * r // copies.size for r in (copies.rank, copies.rank + 1))
        return _Run(self.place, self.shard, begin, end)


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """One parameter's state on its way in: its whole fp32 master, and the moments of this rank's shard; flat."""

    master: Tensor
    moments: Mapping[str, Tensor]


class Checkpoints:
    """Saves and loads one rank's part of the trainer's state. All verbs but `finish` are collective."""

    def __init__(
        self, optimizer: Optimizer, chunks: Sequence[nn.Module], layout: Mapping[str, AdapterTensor], *,
        adapter: AdapterConfig, parallel: ParallelSection, ranks: Ranks, world: World,
    ) -> None:  # fmt: skip
        self._optimizer, self._world = optimizer, world
        self._places = placements(chunks, ranks)
        same = {up for _, up in gate_up_pairs(layout)} if adapter.share_gate_up_a else set()
        self._shapes = {name: list(tensor.shape) for name, tensor in layout.items() if name not in same}
        self._adapter = asdict(adapter)
        self._layout = parallel.model_dump(include={"tp", "pp", "vpp", "cp", "ep"})
        self._pending: Writing | None = None
        self._host: Tensor | None = None

    def save(self, folder: Path, version: int, *, background: bool) -> Writing | None:
        """Write this rank's file, and on rank 0 the common one, into an existing folder.

        `background`: returns once the state is in host memory, which stays allocated for the next time; a thread writes
        it. Otherwise None, once every rank has written; raises CheckpointError on all when the disk refuses one.
        """
        ids, steps = zip(*self._world.everywhere(self._begin), strict=True)
        facts = Facts(
            id=ids[0], version=version, steps=max(steps), world=self._world.size, layout=self._layout,
            adapter=self._adapter, shapes=self._shapes,
        )  # fmt: skip
        tensors, states = self._copied(), RandomStates.now()
        tensors += [(RNG + name, state) for name, state in states.tensors.items()]
        rank = self._world.rank
        metadata = {"id": facts.id, "rank": str(rank), "version": str(version)}
        metadata |= {RNG + name: text for name, text in states.texts.items()}

        def write() -> None:
            write_rank_file(folder / rank_file(rank, facts.world), tensors, metadata)
            if rank == 0:
                facts.write(folder)

        if background:
            own = [folder / rank_file(rank, facts.world), *([folder / FACTS] if rank == 0 else [])]
            self._pending = Writing(write, own)
            return self._pending
        self._world.everywhere(write)
        self._host = None
        return None

    def load(self, folder: Path) -> int:
        """Bring everything back, at any layout and number of ranks, and return the version.

        Random states come back as they were where layout and number of ranks are the same; otherwise every rank takes
        those of rank 0, and megatron's own stay as the new layout has seeded them. Nothing changes on any rank unless
        all of it fits: raises CheckpointError when a file is missing or torn, or of another checkpoint, model or
        adapter.
        """
        self._world.everywhere(self.finish)
        index = self._world.once(lambda: read_index(folder, adapter=self._adapter, shapes=self._shapes))
        facts = index.facts
        same = facts.world == self._world.size and facts.layout == self._layout
        shards = self._optimizer.shards()

        def read() -> tuple[dict[Parameter, _Staged], RandomStates]:
            with Reader(folder, index) as reader:
                staged = self._read(reader, shards, moments=facts.steps > 0)
                return staged, reader.random_states(self._world.rank if same else 0)

        staged, states = self._world.together(read)
        with torch.no_grad():
            for parameter, found in staged.items():
                parameter.view(-1).copy_(found.master)
                if shard := shards.get(parameter):
                    shard.set({"master": found.master[shard.start : shard.stop], **found.moments}, facts.steps)
        states.restore(tracker=same)
        return facts.version

    def finish(self) -> None:
        """Wait for the file that is being written. Raises what the writing raised, unless its `wait` has."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _begin(self) -> tuple[str, int]:
        """A name for the next checkpoint, and Adam's steps as this rank has them."""
        self.finish()
        return uuid.uuid4().hex, max((shard.steps for shard in self._optimizer.shards().values()), default=0)

    def _runs(self, place: Placement, shards: Mapping[Parameter, Shard]) -> Iterator[_Run]:
        """The part of a placement that this rank's optimizer holds: one run, or none."""
        if shard := shards.get(place.parameter):
            begin, end = max(shard.start, place.offset), min(shard.stop, place.offset + place.numel)
            if begin < end:
                yield _Run(place, shard, begin, end)

    def _copied(self) -> list[tuple[str, Tensor]]:
        """What this rank writes, in host memory of our own: (key in the file, tensor)."""
        shards = self._optimizer.shards()
        parts = [run.own_part() for place in self._places if place.speaks for run in self._runs(place, shards)]
        sources = [
            (part, kind, values[part.begin - part.shard.start : part.end - part.shard.start])
            for part in parts
            for kind, values in part.shard.values().items()
        ]
        host, copied = self._host_memory(sum(len(values) for _, _, values in sources)), []
        cuda = any(values.is_cuda for _, _, values in sources)
        at = 0
        for part, kind, values in sources:
            flat = host[at : at + len(values)].copy_(values, non_blocking=cuda)
            boxes = list(part.boxes())
            for box, run in zip(boxes, flat.split([box.numel for box in boxes]), strict=True):
                copied.append((box_key(part.place.name, kind, box), run.view(box.shape)))
            at += len(values)
        if cuda:
            torch.cuda.current_stream().synchronize()
        return copied

    def _host_memory(self, numel: int) -> Tensor:
        """fp32, pinned where there is CUDA, and the same at every save: pinning takes longer than copying."""
        if self._host is None or len(self._host) != numel:
            self._host = torch.empty(numel, pin_memory=torch.cuda.is_available())
        return self._host

    def _read(self, reader: Reader, shards: Mapping[Parameter, Shard], *, moments: bool) -> dict[Parameter, _Staged]:
        """All that this rank needs, in host memory."""
        staged: dict[Parameter, _Staged] = {}
        for place in self._places:
            shard = shards.get(place.parameter)
            if place.parameter not in staged:
                own = torch.empty(0) if shard is None else shard.master
                kinds = MOMENTS if moments and shard is not None else ()
                flats = {kind: torch.empty(own.numel()) for kind in kinds}
                staged[place.parameter] = _Staged(torch.empty(place.parameter.numel()), flats)
            found = staged[place.parameter]
            whole = reader.read(place.name, "master", Box(place.start, place.shape))
            found.master[place.offset : place.offset + place.numel] = whole.view(-1)
            for kind, flat in found.moments.items():
                for run in self._runs(place, shards):
                    parts = [reader.read(place.name, kind, box).view(-1) for box in run.boxes()]
                    flat[run.begin - run.shard.start : run.end - run.shard.start] = torch.cat(parts)
        return staged
