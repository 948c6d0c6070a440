"""The memory that a running request holds: MLA latents in pages, KDA states and convolution windows in slots.

Shapes: L layers of the kind, P pages, S slots, N heads, K key and V value channels, W convolution width, C latent cache
numbers a token, D three times the KDA width, B requests.

Page 0 and slot 0 belong to nobody: index tensors are padded with 0, so padding never touches a live request. A recycled
page or slot is dirty until `scrub`, which a step calls before its forward.

`take_pages`, `take_slot`, `give_pages` and `give_slots` hand out single blocks for `split.SplitPool`, which
zeroes them itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.k3.config import K3Config
from miles_k3.rollout.cache.device import put


class PoolError(AssertionError):
    """A page or slot was freed twice, taken beyond the pool, or used after sleep: a bug, never a user's mistake."""


class LatentPages:
    """KV cache of the MLA layers, `kv` [L, P + 1, page_size, C], shared by pages.

    Each owner (a request's state slot) has a row of `table_SP`, its pages in order. A page may have several owners
    (a forked prompt); it is free when the last one lets go. Only the owner of an unshared page may write it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        width: int,
        num_owners: int,
        max_pages_per_owner: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._shape, self._dtype, self.device = (num_layers, num_pages + 1, page_size, width), dtype, device
        self.table_SP = torch.zeros(num_owners + 1, max_pages_per_owner, dtype=torch.int64)
        self._owned: dict[int, list[int]] = {}
        self._users = [0] * (num_pages + 1)
        self._free = list(range(num_pages, 0, -1))
        self._dirty: list[int] = []
        self._kv: Tensor | None = None
        self.wake()

    @classmethod
    def for_model(cls, config: K3Config, **sizes: Any) -> LatentPages:
        """Pages of the model's MLA layers; `sizes` are the constructor's other arguments."""
        return cls(num_layers=len(config.mla_layers), width=config.latent_cache_dim, **sizes)

    @property
    def kv(self) -> Tensor:
        if self._kv is None:
            raise PoolError("the latent pages sleep; wake the engine first")
        return self._kv

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes held at present; 0 while asleep."""
        return 0 if self._kv is None else self._kv.nbytes

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def pages_of(self, owner: int) -> list[int]:
        """The owner's pages in order."""
        return self._owned[owner]

    def take(self, owner: int, count: int, *, shared: Sequence[int] = ()) -> None:
        """Give `owner` the pages `shared` (of another owner) followed by `count` free ones."""
        if owner in self._owned:
            raise PoolError(f"slot {owner} already owns pages")
        fresh = self.take_pages(count)
        pages = [*shared, *fresh]
        for page in shared:
            self._users[page] += 1
        self._dirty += fresh
        self._owned[owner] = pages
        self.table_SP[owner, : len(pages)] = torch.tensor(pages, dtype=torch.int64)

    def grow(self, owner: int, count: int) -> None:
        """Give `owner` so many free pages more."""
        fresh, owned = self.take_pages(count), self._owned[owner]
        self.table_SP[owner, len(owned) : len(owned) + count] = torch.tensor(fresh, dtype=torch.int64)
        owned += fresh
        self._dirty += fresh

    def release(self, owner: int) -> None:
        """Give the owner's pages back; shared ones stay with their other owners."""
        if owner not in self._owned:
            raise PoolError(f"slot {owner} owns no pages: freed twice")
        self.give_pages(self._owned.pop(owner))
        self.table_SP[owner] = 0

    def take_pages(self, count: int) -> list[int]:
        """Free pages without an entry in the table; the caller zeroes them."""
        if count > len(self._free):
            raise PoolError(f"{count} pages taken, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def give_pages(self, pages: Sequence[int]) -> None:
        """One user less of each."""
        for page in pages:
            if not self._users[page]:
                raise PoolError(f"page {page} is free already: freed twice")
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def hold(self, pages: Sequence[int]) -> None:
        """Count one more user, who is no owner, of pages that are in use; `give_pages` ends it."""
        for page in pages:
            if not self._users[page]:
                raise PoolError(f"page {page} is free and can't be held")
            self._users[page] += 1

    def rename(self, source: int, target: int) -> None:
        """Hand the table row of one slot to another, free one."""
        if target in self._owned:
            raise PoolError(f"slot {target} already owns pages")
        self._owned[target] = self._owned.pop(source)
        self.table_SP[target] = self.table_SP[source]
        self.table_SP[source] = 0

    def rows_of(self, owners: Tensor, positions: Tensor) -> Tensor:
        """Row of `kv[layer].flatten(0, 1)` that holds each (owner, position); host tensors in and out."""
        return self.table_SP[owners, positions // self.page_size] * self.page_size + positions % self.page_size

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, every layer; the targets are then clean."""
        source, target = put(sources, self.device), put(targets, self.device)
        self.kv.index_copy_(1, target, self.kv.index_select(1, source))
        self._dirty = [page for page in self._dirty if page not in set(targets)]

    def scrub(self) -> None:
        """Zero every page that was taken since the last scrub."""
        if self._dirty:
            self.kv.index_fill_(1, put(self._dirty, self.device), 0.0)
            self._dirty.clear()

    def sleep(self) -> None:
        """Drop the memory. Raises EngineError while a page is owned."""
        if self._owned:
            raise EngineError(f"{len(self._owned)} requests still hold cache pages; abort them or let them finish")
        self._kv = None

    def wake(self) -> None:
        """Take the memory again, zeroed; does nothing when awake."""
        if self._kv is None:
            self._kv = torch.zeros(self._shape, dtype=self._dtype, device=self.device)


class StateSlots:
    """KDA memory of the requests: `states` fp32 [L, S + 1, N, K, V] and `windows` [L, S + 1, W - 1, D].

    Slots are given out lowest first, so that a full batch is one contiguous range.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        heads: int,
        head_dim: int,
        conv_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self._state_shape = (num_layers, num_slots + 1, heads, head_dim, head_dim)
        self._window_shape = (num_layers, num_slots + 1, conv_width - 1, 3 * heads * head_dim)
        self._dtype, self.device = dtype, device
        self._free = list(range(1, num_slots + 1))
        self._live: set[int] = set()
        self._lent: set[int] = set()  # held by a cache, which never writes them
        self._dirty: list[int] = []
        self._tensors: tuple[Tensor, Tensor] | None = None
        self.wake()

    @classmethod
    def for_model(cls, config: K3Config, num_slots: int, dtype: torch.dtype, device: torch.device) -> StateSlots:
        """Slots of the model's KDA layers."""
        return cls(
            num_layers=len(config.kda_layers),
            num_slots=num_slots,
            heads=config.kda_num_heads,
            head_dim=config.kda_head_dim,
            conv_width=config.short_conv_kernel_size,
            dtype=dtype,
            device=device,
        )

    @property
    def states(self) -> Tensor:
        return self._awake()[0]

    @property
    def windows(self) -> Tensor:
        return self._awake()[1]

    def _awake(self) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            raise PoolError("the state slots sleep; wake the engine first")
        return self._tensors

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes held at present; 0 while asleep."""
        return 0 if self._tensors is None else sum(t.nbytes for t in self._tensors)

    def take(self) -> int:
        """The lowest free slot."""
        slot = self.take_slot()
        self._dirty.append(slot)
        return slot

    def take_slot(self) -> int:
        """The lowest free slot; the caller zeroes it."""
        if not self._free:
            raise PoolError(f"all {self.num_slots} state slots are taken")
        slot = heapq.heappop(self._free)
        self._live.add(slot)
        return slot

    def give_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.release(slot)

    def release(self, slot: int) -> None:
        if slot not in self._live:
            raise PoolError(f"state slot {slot} is free already: freed twice")
        self._live.remove(slot)
        heapq.heappush(self._free, slot)

    def lend_free(self) -> int:
        """The highest free slot, for a cache: out of the way of those that requests work in."""
        if not self._free:
            raise PoolError(f"all {self.num_slots} state slots are taken")
        slot = max(self._free)
        self._free.remove(slot)
        heapq.heapify(self._free)
        self._lent.add(slot)
        self._dirty.append(slot)
        return slot

    def lend(self, slot: int) -> None:
        """Hand a live slot to a cache, with what it holds."""
        if slot not in self._live:
            raise PoolError(f"state slot {slot} is not live and can't be handed over")
        self._live.remove(slot)
        self._lent.add(slot)

    def take_back(self, slots: Sequence[int]) -> None:
        """The end of `lend` and `lend_free`."""
        for slot in slots:
            if slot not in self._lent:
                raise PoolError(f"state slot {slot} is not with a cache: given back twice")
            self._lent.remove(slot)
            heapq.heappush(self._free, slot)

    def compact(self) -> dict[int, int]:
        """Move the highest live slots into the gaps below them; {old slot: new slot}. Nothing may be dirty."""
        if self._dirty:
            raise PoolError(f"slots {self._dirty} are dirty; scrub before moving any")
        moves: dict[int, int] = {}
        for last in sorted(self._live, reverse=True):
            if not self._free or self._free[0] > last:
                break
            moves[last] = heapq.heappop(self._free)
        if moves:
            self.copy(list(moves), list(moves.values()))
            for source, target in moves.items():
                self._live.remove(source)
                self._live.add(target)
                heapq.heappush(self._free, source)
        return moves

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy states and windows of every layer from slots to slots; the targets are then clean."""
        source, target = put(sources, self.device), put(targets, self.device)
        for pool in self._awake():
            pool.index_copy_(1, target, pool.index_select(1, source))
        self._dirty = [slot for slot in self._dirty if slot not in set(targets)]

    def scrub(self) -> None:
        """Zero every slot that was taken since the last scrub: S = 0 is also where a request starts."""
        if self._dirty:
            index = put(self._dirty, self.device)
            for pool in self._awake():
                pool.index_fill_(1, index, 0.0)
            self._dirty.clear()

    def sleep(self) -> None:
        """Drop the memory. Raises EngineError while a slot is live."""
        if self._live or self._lent:
            raise EngineError(
                f"{len(self._live)} requests and {len(self._lent)} checkpoints still hold state slots; end them first"
            )
        self._tensors = None

    def wake(self) -> None:
        """Take the memory again, zeroed; does nothing when awake."""
        if self._tensors is None:
            self._tensors = (
                torch.zeros(self._state_shape, device=self.device),
                torch.zeros(self._window_shape, dtype=self._dtype, device=self.device),
            )
