"""Adapter slots of an engine: several versions alive at once, swapped in place, never half.

Slot tensors are allocated once at rank R = max_rank and keep their addresses for the life of the store, so an engine
may capture them in a CUDA graph. A smaller rank r fills the first r of R and zeros the rest, which leaves B A
unchanged. On CUDA an adapter of full rank is copied on a stream of its own; readers call `AdapterSlot.wait`. Load from
the stream that runs the forward.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from miles_k3.adapters.layout import AdapterTensor, adapter_layout, by_module
from miles_k3.adapters.update import verify_update
from miles_k3.errors import AdapterError
from miles_k3.k3.config import K3Config
from miles_k3.types import AdapterConfig, AdapterUpdate

BASE_VERSION = -1  # the model with the adapter off; always live
BASE_SLOT = -1
LARGE = 4 << 20  # numbers of a tensor that is copied by itself: 2 us of a launch for at least 4 us of bytes
_Layout = tuple[dict[str, AdapterTensor], dict[str, tuple[AdapterTensor, AdapterTensor]]]


class Factors(NamedTuple):
    """One module's pair. Dense: a [R, in], b [out, R]. Experts: a [1 or E, R, in], b [E or 1, out, R]."""

    a: torch.Tensor
    b: torch.Tensor


class AdapterSlot:
    """Room for one whole adapter. `version` is None while the slot is empty or being filled.

    `factors` maps module names to pairs; `layers[n]` maps names within layer n (`self_attn.o_proj`,
    `block_sparse_moe.experts.w1`) to the same pairs. Both are built once. The delta of a module is
    `scaling * (x A^T) B^T`: the factors hold no scale of their own.
    """

    def __init__(self, index: int, config: K3Config, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.index = index
        self.version: int | None = None
        self.config: AdapterConfig | None = None
        self.scaling = 0.0
        self._stream: torch.cuda.Stream | None = None
        self._filling: tuple[torch.cuda.Event, list[torch.Tensor]] | None = None  # the sources stay alive until then
        self.factors: dict[str, Factors] = {}
        self.layers: tuple[dict[str, Factors], ...] = tuple({} for _ in range(config.num_hidden_layers))
        layout = adapter_layout(config, AdapterConfig(rank=max_rank, alpha=1.0))
        for module, (a, b) in by_module(layout).items():
            pair = Factors(*(torch.zeros(t.shape, dtype=dtype, device=device) for t in (a, b)))
            self.factors[module] = self.layers[a.layer][a.local_module] = pair

    def get(self, module: str) -> Factors:
        """The pair of a module by its full name; KeyError when the adapter does not target it."""
        return self.factors[module]

    def fill(self, update: AdapterUpdate, sources: Mapping[str, tuple[AdapterTensor, AdapterTensor]]) -> None:
        """Copy a verified update in place; `sources` as of `by_module`. On an error the slot stays empty (`version`
        None)."""
        self.version = None
        copies = [
            (target, update.tensors[expected.name], expected.rank_dim)
            for module, pair in self.factors.items()
            for target, expected in zip(pair, sources[module], strict=True)
        ]
        if all(t.is_cuda and s.is_cuda and t.dtype == s.dtype and t.shape == s.shape for t, s, _ in copies):
            self._copy_beside([t for t, _, _ in copies], [s for _, s, _ in copies])
        else:
            for target, source, rank_dim in copies:
                copy_padded(target, source, rank_dim)
        self.config = update.config
        self.scaling = update.config.scaling

    def _copy_beside(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """On a stream of its own, so that steps of other versions go on; `wait` is where the two meet."""
        device = targets[0].device
        self.wait()  # an adapter that nobody has used yet may still be on its way from memory that is freed now
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the sources are made, steps before have read
        with torch.cuda.stream(self._stream), torch.no_grad():
            copy_all_(targets, sources)
            filled = torch.cuda.Event()
            filled.record()
        self._filling = filled, sources

    def wait(self) -> None:
        """Let the current stream wait until the slot is filled: before whatever reads its factors."""
        if self._filling is not None:
            filled, _ = self._filling
            filled.wait()
            self._filling = None


def copy_all_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy contiguous tensors of equal shapes and dtypes on one device, the large ones first.

    A large one goes at the memory's speed by itself, where torch's kernel for many reaches 60 % of it; that one spares
    the launches of the small ones.
    """
    pairs = list(zip(targets, sources, strict=True))
    for target, source in pairs:
        if target.numel() >= LARGE:
            target.copy_(source, non_blocking=True)
    small = [pair for pair in pairs if pair[0].numel() < LARGE]
    if small:
        torch._foreach_copy_([t for t, _ in small], [s for _, s in small])  # pyright: ignore[reportPrivateImportUsage]


def copy_padded(target: torch.Tensor, source: torch.Tensor, rank_dim: int) -> None:
    """Fill the first r entries of `rank_dim` from `source` (cast to the target's dtype) and zero the others."""
    rank = source.shape[rank_dim]
    target.narrow(rank_dim, 0, rank).copy_(source)
    target.narrow(rank_dim, rank, target.shape[rank_dim] - rank).zero_()


class AdapterStore:
    """The live adapter versions of one engine and who uses them.

    `dtype` is the engine's compute dtype: a float32 update is rounded to it when it is loaded. `slots` never changes.
    Requests `acquire` the version they start with and `release` it at their end; a slot with users is never refilled.
    """

    def __init__(
        self,
        config: K3Config,
        *,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_slots: int = 2,
    ) -> None:
        if num_slots < 2:
            raise ValueError(f"num_slots is {num_slots}; a swap needs a current and an idle slot, so at least 2")
        self._config = config
        self.max_rank = max_rank
        self.slots = [AdapterSlot(i, config, max_rank, dtype, torch.device(device)) for i in range(num_slots)]
        self._current: AdapterSlot | None = None
        self._layout: tuple[AdapterConfig, _Layout] | None = None
        self._slot_of: dict[int, int] = {BASE_VERSION: BASE_SLOT}
        self._users: Counter[int] = Counter()
        self._lock = threading.Lock()  # guards who uses which slot; never held while tensors move
        self._loading = threading.Lock()  # one load at a time

    # --- reading ------------------------------------------------------------------------------------------------
    @property
    def current_version(self) -> int:
        """The version that new requests use; BASE_VERSION before the first load."""
        return BASE_VERSION if self._current is None or self._current.version is None else self._current.version

    def slot_index_of(self, version: int) -> int:
        """Index into `slots` of a live version; BASE_SLOT for BASE_VERSION. Raises AdapterError when it is not live."""
        index = self._slot_of.get(version)
        if index is None:
            raise AdapterError(f"adapter v{version} is not live; live are {_versions(self.live_versions())}")
        return index

    def live_versions(self) -> tuple[int, ...]:
        """Versions that can be acquired, ascending; BASE_VERSION is always the first."""
        return tuple(sorted(self._slot_of))

    def users(self, version: int) -> int:
        """Requests that hold a version."""
        return self._users[version]

    def idle_slot_free(self) -> bool:
        """Whether `load` has a slot to fill; False while every slot but the current one still serves requests."""
        return self._pick_idle() is not None

    # --- requests -----------------------------------------------------------------------------------------------
    def acquire(self, version: int | None = None) -> int:
        """Pin a version (None: the current one) for one request and give it back. Raises AdapterError when not live."""
        with self._lock:
            version = self.current_version if version is None else version
            self.slot_index_of(version)
            self._users[version] += 1
            return version

    def release(self, version: int) -> None:
        """Undo one `acquire`. Raises AdapterError when nobody holds the version."""
        with self._lock:
            if self._users[version] < 1:
                raise AdapterError(f"adapter v{version} was released more often than acquired")
            self._users[version] -= 1
            if not self._users[version]:
                del self._users[version]

    # --- loading ------------------------------------------------------------------------------------------------
    def load(self, update: AdapterUpdate) -> None:
        """All or nothing: verify, fill the idle slot, flip.

        The first load takes any version >= 0 (a resumed run starts later than 0), each later one current + 1.
        Raises AdapterError; the current version and its tensors are then as they were.
        """
        with self._loading:
            layout, sources = self._layout_of(update.config)
            expected = None if self._current is None else self.current_version + 1
            verify_update(update, layout, max_rank=self.max_rank, expected_version=expected)
            slot = self._claim(update.version)
            try:
                slot.fill(update, sources)
            except RuntimeError as e:
                raise AdapterError(f"adapter v{update.version} could not be copied: {e}; {self._staying()}") from e
            with self._lock:
                slot.version = update.version
                self._slot_of[update.version] = slot.index
                self._current = slot

    def _layout_of(self, config: AdapterConfig) -> _Layout:
        """Of the last config it is remembered: the whole K3 has 1,392 tensors to name, and a swap comes each step."""
        if self._layout is None or self._layout[0] != config:
            layout = adapter_layout(self._config, config)
            self._layout = config, (layout, by_module(layout))
        return self._layout[1]

    def _claim(self, version: int) -> AdapterSlot:
        """Take the idle slot off the live versions, so that nobody acquires it while it is filled."""
        with self._lock:
            slot = self._pick_idle()
            if slot is None:
                busy = ", ".join(f"v{v} by {n}" for v, n in sorted(self._users.items()) if v != BASE_VERSION)
                raise AdapterError(
                    f"adapter v{version} has to wait: no slot is idle (in use: {busy}); {self._staying()}; "
                    "load again when idle_slot_free() is true"
                )
            if slot.version is not None:
                del self._slot_of[slot.version]
                slot.version = None
            return slot

    def _pick_idle(self) -> AdapterSlot | None:
        """An empty slot, else the oldest version that nobody uses; never the current one."""
        idle = [s for s in self.slots if s is not self._current and (s.version is None or not self._users[s.version])]
        return min(idle, key=lambda s: -1 if s.version is None else s.version, default=None)

    def _staying(self) -> str:
        current = self.current_version
        return "the base without adapter stays" if current == BASE_VERSION else f"v{current} stays"


def _versions(versions: tuple[int, ...]) -> str:
    return ", ".join("the base (-1)" if v == BASE_VERSION else f"v{v}" for v in versions)
