"""The cache memory of the requests: a state slot, pages in order, and a seat in the table that batches are made from.

Shapes: B requests, P pages of the longest, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.cache.shared_pages import SharedPages
from miles_k3.rollout.embedded.request import Request


class RequestMemory:
    """Takes, grows and gives back what a request holds; turns positions into rows of the pool's views.

    Slots and pages are ids: the pool may move what is behind them until its `flush`.
    """

    def __init__(self, pool: BlockPool, *, max_running: int, max_pages: int) -> None:
        self.pool, self.pages = pool, SharedPages(pool)
        self._table = np.zeros((max_running + 1, max_pages), dtype=np.int64)  # page ids; seat 0 is nobody's
        self._seats, self.num_seats = list(range(max_running, 0, -1)), max_running

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    @property
    def has_seat(self) -> bool:
        return bool(self._seats)

    def take(self, request: Request, fresh: int, shared: Sequence[int] = ()) -> None:
        """A slot, and the pages `shared` (of others, read only) followed by `fresh` ones: the caller made room."""
        request.slot = self.pool.take_slot()
        request.seat = self._seats.pop()
        request.pages = [*shared]
        self.pages.hold(shared)
        self._table[request.seat, : len(shared)] = shared
        self.grow(request, fresh)

    def grow(self, request: Request, count: int) -> None:
        """So many pages more."""
        held, fresh = len(request.pages), self.pages.take(count)
        self._table[request.seat, held : held + count] = fresh
        request.pages += fresh

    def give(self, request: Request, *, slot_is_gone: bool = False) -> None:
        """The end of `take`. `slot_is_gone`: its slot belongs to the prefix cache now."""
        self.pages.give_pages(request.pages)
        if not slot_is_gone:
            self.pool.give_slots([request.slot])
        self._table[request.seat] = 0
        self._seats.append(request.seat)
        request.slot, request.seat, request.pages = 0, 0, []

    def capacity(self, request: Request) -> int:
        """Tokens that its pages hold."""
        return len(request.pages) * self.page_size

    def page_rows(self, requests: Sequence[Request], num_tokens: int) -> Tensor:
        """Rows of `pool.kv[layer]`, int64 [B, P] on the host: pages of the first `num_tokens`, padded with row 0's."""
        longest = self.pool.pages_for(num_tokens)
        return self.pool.page_rows(torch.from_numpy(self._table[[r.seat for r in requests], :longest]))

    def token_rows(self, requests: Sequence[Request], owners_T: Tensor, positions_T: Tensor) -> Tensor:
        """Rows of `pool.kv[layer].flatten(0, 1)`, int64 [T] on the host, of tokens of `requests[owners_T]`."""
        seats_T = np.asarray([r.seat for r in requests], dtype=np.int64)[owners_T.numpy()]
        at_T = positions_T.numpy()
        rows_T = self.pool.page_rows(torch.from_numpy(self._table[seats_T, at_T // self.page_size]))
        return rows_T * self.page_size + positions_T % self.page_size

    def fork(self, leader: Request, followers: Sequence[Request]) -> None:
        """Give followers, which share the full pages of the leader's prompt, its state and the page that it ends in."""
        if not followers:
            return
        self.pool.copy_slots([leader.slot] * len(followers), [f.slot for f in followers])
        full, rest = divmod(leader.num_cached, self.page_size)
        if rest:
            self.pool.copy_pages([leader.pages[full]] * len(followers), [f.pages[full] for f in followers])
