"""A plan's words: phases of a step, what lies in memory in each, and the ranks that differ from one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """In the order of a step (`miles_k3/loop.py`). Switch: both sides are awake, before one of them lies down."""

    LOAD = "load"
    ROLLOUT = "rollout"
    SWITCH = "switch"
    TRAIN = "train"
    SYNC = "sync"
    SAVE = "save"


# What the bytes of each item are. Order of pictures and tables.
ITEMS: Mapping[str, str] = {
    "base": "frozen weights that the trainer computes from (an embedded engine reads the same)",
    "engine base": "an engine's own copy of the frozen weights",
    "adapter": "the trained factors",
    "gradients": "fp32 gradients of the factors",
    "optimizer": "fp32 masters and Adam's moments",
    "adapter slots": "the engine's room for the versions of the whole adapter that are alive",
    "adapter copies": "adapters that SGLang keeps beside their slots",
    "lent adapter": "the adapter that SGLang's next process would read, or a rank's shard of it",
    "KV": "MLA latents of the engine's requests",
    "states": "KDA states and convolution windows: requests and checkpoints of the prefix cache",
    "graphs": "CUDA graphs and work space of the engine",
    "activations": "what the backward pass needs, and the sublayers' working memory",
    "rollout work": "working memory of a prompt step, and logits",
    "buffers": "an export's copies of the adapter, or what loading unpacks",
    "runtime": "CUDA contexts and communication buffers, or the interpreter and its libraries",
    "replay": "what moves the states of a verify's positions",
    "engine process": "the engine's process on the host",
    "sleeping engine": "SGLang's weights while it sleeps",
    "graders": "reward worker processes",
    "sleeping optimizer": "masters and moments while the engine samples",
    "checkpoint": "the copy of a checkpoint that is being written",
}

Bytes = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Memory that several ranks share. `where`: GPU or host; `capacity`: bytes, None where nobody knows."""

    where: str
    capacity: int | None
    source: str
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Ranks that hold the same: one pipeline stage. `count`: how many. Item -> bytes of one such rank."""

    name: str
    layers: int
    count: int
    device: Mapping[Phase, Bytes]
    host: Mapping[Phase, Bytes]

    def in_pool(self, pool: Pool, phase: Phase, *, cuda: bool) -> dict[str, int]:
        """Item -> bytes of all the ranks that share the pool, were they all of this kind."""
        parts = [self.device[phase]] if cuda and pool.where == "GPU" else [self.host[phase]]
        if not cuda:
            parts.append(self.device[phase])
        found: dict[str, int] = {}
        for name, size in (item for part in parts for item in part.items()):
            found[name] = found.get(name, 0) + size * pool.ranks
        return found

    def device_bytes(self, phase: Phase) -> int:
        return sum(self.device[phase].values())

    def host_bytes(self, phase: Phase) -> int:
        return sum(self.host[phase].values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The worst rank and phase of one pool."""

    pool: Pool
    rank: RankPlan
    phase: Phase
    needed: int
    items: Bytes

    @property
    def fits(self) -> bool:
        return self.pool.capacity is None or self.needed <= self.pool.capacity * MARGIN

    @property
    def largest(self) -> str:
        return max(self.items, key=lambda name: self.items[name])


MARGIN = 0.9  # of a pool may be planned for: the estimate is good to a tenth, and allocators leave gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A recipe's memory. `cuda`: whether device memory is a GPU's; otherwise it is the host's."""

    name: str
    world: int
    cuda: bool
    ranks: tuple[RankPlan, ...]
    verdicts: tuple[Verdict, ...]
    disk_bytes: int

    @property
    def fits(self) -> bool:
        return all(verdict.fits for verdict in self.verdicts)
