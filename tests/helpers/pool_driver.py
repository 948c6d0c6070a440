"""Drives a block pool as an engine, a cache policy and a fake transport would, and knows what every block must hold.

Each block is filled with a number of its own; free memory with NaN. Whatever is read wrongly, or moved, zeroed or
handed out at the wrong time, shows as another number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_k3.rollout.cache.blocks import BlockState, Kind, Ticket
from miles_k3.rollout.cache.layout import Layout
from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.cache.split import SplitPool
from miles_k3.rollout.cache.unified import UnifiedPool

CPU = torch.device("cpu")
LAYOUT = Layout(
    kda_layers=2,
    heads=2,
    head_dim=3,
    conv_width=4,
    mla_layers=2,
    page_size=4,
    width=3,
    dtype=torch.float32,
    draft_width=2,
)
Block = tuple[Kind, int]


def make_pool(kind: str, num_bytes: int, layout: Layout = LAYOUT) -> BlockPool:
    if kind == "unified":
        return UnifiedPool(layout, num_bytes, CPU)
    return SplitPool.of_budget(layout, num_bytes, 0.7, CPU)


def parts(pool: BlockPool, kind: Kind) -> list[Tensor]:
    """What a block of the kind holds, [layers, rows, ...]."""
    if kind is Kind.SLOT:
        return [pool.states, pool.windows]
    return [pool.kv, pool.draft] if pool.draft.shape[-1] else [pool.kv]


def poison(pool: BlockPool) -> None:
    """NaN into all free memory. Right after a flush only: before it, queued moves still read there."""
    if isinstance(pool, UnifiedPool):
        slots, pages = (pool.places.ends[kind] for kind in Kind)
        pool.buffer[slots.num_bytes : len(pool.buffer) - pages.num_bytes] = 0xFF
        for rank in slots.holes():
            pool.views.slot_words[rank] = -1
        for rank in pages.holes():
            pool.views.page_words[len(pool.views.page_words) - 1 - rank] = -1
        return
    for kind, ledger in pool.ledgers.items():
        rows = parts(pool, kind)[0].shape[1]
        free = [b for b in range(1, rows) if ledger.state(b) is BlockState.FREE]
        for part in parts(pool, kind):
            part[:, free] = torch.nan


class PoolDriver:
    """`content`: what each OWNED block holds. `landed`: what the bytes of each open transfer are so far."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.content: dict[Block, float] = {}
        self.fresh: list[Block] = []  # taken, and zeros at the next flush
        self.open: list[Ticket] = []
        self.ended: list[Ticket] = []
        self.landed: dict[int, float] = {}
        self.serial = 0
        poison(pool)

    # --- owners -------------------------------------------------------------------------------------------------
    def take(self, kind: Kind, count: int = 1) -> list[Block]:
        if not self.pool.fits(**{f"{kind}s": count}):
            return []
        taken = [self.pool.take_slot() for _ in range(count)] if kind is Kind.SLOT else self.pool.take_pages(count)
        blocks = [(kind, block) for block in taken]
        assert 0 not in taken
        assert not set(blocks) & {*self.content, *self.fresh, *(b for t in self.open for b in t.blocks)}
        self.fresh += blocks
        return blocks

    def give(self, block: Block) -> None:
        kind, number = block
        (self.pool.give_slots if kind is Kind.SLOT else self.pool.give_pages)([number])
        self.content.pop(block, None)
        if block in self.fresh:
            self.fresh.remove(block)

    def copy(self, kind: Kind, source: int, target: int) -> None:
        (self.pool.copy_slots if kind is Kind.SLOT else self.pool.copy_pages)([source], [target])
        self.content[kind, target] = self.content[kind, source]
        if (kind, target) in self.fresh:
            self.fresh.remove((kind, target))

    def flush(self) -> None:
        """Flush, read every block back as a forward does, and write a number into the new ones."""
        self.pool.flush()
        self.pool.check()
        for block in self.fresh:
            self.content[block] = 0.0
        poison(self.pool)
        with self.pool.forward():
            self.verify()
            for block in self.fresh:
                self.serial += 1
                self._write(block[0], self._rows(*block), float(self.serial))
                self.content[block] = float(self.serial)
            self.verify()
        self.fresh.clear()

    def verify(self) -> None:
        for kind in Kind:
            blocks = [b for k, b in self.content if k is kind]
            rows = self._rows(kind, *blocks, 0)
            expected = torch.tensor([*(self.content[kind, b] for b in blocks), 0.0])
            for part in parts(self.pool, kind):
                for layer in range(len(part)):
                    held = part[layer].index_select(0, rows).flatten(1)
                    wrong = (held != expected[:, None] * (layer + 1)).any(1).nonzero().flatten().tolist()
                    assert not wrong, [(kind, [*blocks, 0][i], held[i].tolist(), expected[i]) for i in wrong]

    def _rows(self, kind: Kind, *blocks: int) -> Tensor:
        return self.pool.slot_rows(blocks) if kind is Kind.SLOT else self.pool.page_rows(blocks)

    def _write(self, kind: Kind, rows: Tensor | Sequence[int], value: float) -> None:
        rows = torch.as_tensor(rows, dtype=torch.int64)
        for part in parts(self.pool, kind):
            for layer in range(len(part)):
                target = part[layer]
                if kind is Kind.PAGE:  # as the MLA layers do: token by token
                    size = self.pool.page_size
                    target, at = target.flatten(0, 1), (rows[:, None] * size + torch.arange(size)).flatten()
                else:
                    at = rows
                source = torch.full((len(at), *target.shape[1:]), value * (layer + 1), dtype=target.dtype)
                target.index_copy_(0, at, source)

    # --- transfers ----------------------------------------------------------------------------------------------
    def fill(self, blocks: Sequence[Block], deadline_s: float | None = None) -> Ticket:
        ticket = self.pool.fill(
            slots=[b for k, b in blocks if k is Kind.SLOT], pages=[b for k, b in blocks if k is Kind.PAGE],
            deadline_s=deadline_s,
        )  # fmt: skip
        for block in blocks:
            self.fresh.remove(block)
        self.open.append(ticket)
        return ticket

    def land(self, ticket: Ticket) -> None:
        """The transport writes the blocks: at any time while the ticket is open, whether or not anybody still waits."""
        self.serial += 1
        self.landed[ticket.number] = float(self.serial)
        self._write(Kind.SLOT, ticket.slot_rows, float(self.serial))
        self._write(Kind.PAGE, ticket.page_rows, float(self.serial))

    def end(self, ticket: Ticket, *, success: bool) -> None:
        if success and ticket.number not in self.landed:
            self.land(ticket)
        waiting = [(k, b) for k, b in ticket.blocks if self.pool.ledgers[k].state(b) is BlockState.FILLING]
        transfers = self.pool.transfers
        assert transfers.complete(ticket) if success else transfers.fail(ticket)
        for block in waiting:
            if success:
                self.content[block] = self.landed[ticket.number]
            else:
                self.fresh.append(block)
        self.open.remove(ticket)
        self.ended.append(ticket)

    def close(self) -> None:
        """Give everything back, in whatever order it is; nothing may remain."""
        for ticket in list(self.open):
            self.end(ticket, success=True)
        for block in [*self.content, *self.fresh]:
            self.give(block)
        self.pool.flush()
        self.pool.check()
        stats = self.pool.stats()
        assert self.pool.num_held == stats["held_bytes"] == stats["quarantined_bytes"] == 0
        assert stats["free_bytes"] + stats["padding_bytes"] == self.pool.num_bytes
        self.verify()  # the padding blocks
