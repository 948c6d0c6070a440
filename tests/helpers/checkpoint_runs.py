"""Runs that save, resume and start at a layout, and what is compared of them. The ranks of a pool call these."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from helpers.parity import Case, build
from helpers.parity_data import harvests
from helpers.trainers import ADAPTER
from torch import Tensor

from miles_k3.adapters.peft_io import load_peft, save_peft
from miles_k3.errors import CheckpointError
from miles_k3.trainer.boxes import Box
from miles_k3.trainer.checkpoint_files import Facts, Reader, read_index
from miles_k3.trainer.megatron import MegatronTrainer
from miles_k3.types import StepStats

BEFORE, AFTER = (0, 1), (2, 0, 1)  # harvests before the checkpoint and after it


@dataclass(frozen=True, kw_only=True, eq=False)
class Resumed:
    """What one rank has right after the checkpoint, and makes of the next steps. `peft`: sha256 of the folder's files.

    `draws`: what the random states give next.
    """

    version: int
    peft: dict[str, str]
    stats: list[StepStats]
    adapter: dict[str, Tensor]
    draws: tuple[float, ...]


def save_run(rank: int, size: int, case: Case, folder: Path) -> Resumed:
    """Some steps, a checkpoint in `folder`/trainer and the adapter in `folder`/peft, the uninterrupted next steps."""
    trainer = build(case, rank)
    batches = harvests("uneven", trainer.config)
    for i in BEFORE:
        trainer.step(batches[i])
    torch.rand(rank + 1)  # so that no two ranks are at the same place
    if rank == 0:
        (folder / "trainer").mkdir()
    trainer.world.wait()
    writing = trainer.save(folder / "trainer")
    # What follows doesn't reach the file, though it may not be written yet.
    outcome = _go_on(trainer, folder / "peft" if rank == 0 else None)
    if writing is not None:
        writing.wait()
    trainer.world.wait()
    return outcome


def load_run(rank: int, size: int, case: Case, folder: Path, again: Path | None) -> Resumed:
    """Load `folder`/trainer over another state and go on; `again`: save once more there, right after loading."""
    trainer = build(case, rank)
    trainer.step(harvests("uneven", trainer.config)[2])
    trainer.load(folder / "trainer")
    if again is not None:
        states = torch.get_rng_state()
        if rank == 0:
            (again / "trainer").mkdir(parents=True)
        trainer.world.wait()
        if writing := trainer.save(again / "trainer"):
            writing.wait()
        assert torch.equal(torch.get_rng_state(), states)
    return _go_on(trainer, folder / f"peft-{case.name}" if rank == 0 else None)


def start_run(rank: int, size: int, case: Case, peft: Path) -> Resumed:
    """Start from a PEFT folder."""
    trainer = build(case, rank)
    config, tensors = load_peft(peft, trainer.config)
    assert config.rank == ADAPTER.rank
    trainer.load_adapter(tensors)
    return _go_on(trainer, peft.with_name(f"start-{case.name}") if rank == 0 else None)


def load_errors(rank: int, size: int, case: Case, folders: list[Path]) -> tuple[list[str], bool]:
    """The errors of loading damaged checkpoints, and whether adapter and version are as before."""
    trainer, errors = build(case, rank), []
    before = trainer.export_adapter().sha256
    for folder in folders:
        try:
            trainer.load(folder)
        except CheckpointError as e:
            errors.append(str(e))
        else:
            errors.append("loaded")
    return errors, trainer.export_adapter().sha256 == before


def _go_on(trainer: MegatronTrainer, peft: Path | None) -> Resumed:
    version, update = trainer.version, trainer.export_adapter()
    if peft is not None:
        save_peft(peft, update, "tiny")
    draws = torch.rand(3).tolist()
    batches = harvests("uneven", trainer.config)
    stats = [trainer.step(batches[i]) for i in AFTER]
    adapter = {n: t.detach().float().clone() for n, t in trainer.export_adapter().tensors.items()}
    return Resumed(
        version=version, peft=hashes(peft) if peft is not None else {}, stats=stats, adapter=adapter,
        draws=tuple(draws),
    )  # fmt: skip


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def whole_state(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whatever layout wrote it; Adam's steps and the version too."""
    facts = Facts.read(folder)
    index = read_index(folder, adapter=facts.adapter, shapes=facts.shapes)
    with Reader(folder, index) as reader:
        found = {f"{n}/{kind}": reader.read(n, kind, Box.whole(facts.shapes[n])) for n, kind in index.boxes}
    return {**found, "steps": torch.tensor(facts.steps), "version": torch.tensor(facts.version)}
