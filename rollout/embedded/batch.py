"""Index maps of one forward, made on the host once and shared by every layer.

Shapes: T tokens of the step, B requests, L longest chunk, P pages of the longest context, S = P * page_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.k3.ops.kda import Chunks
from miles_k3.k3.ops.packed import Packed
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.cache.pools import LatentPages, StateSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next tokens of one request: `context` tokens of it are in the caches already. `slot` 0: no caches at all."""

    tokens: Sequence[int]
    context: int
    slot: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheRows:
    """Where a step's tokens live in the pools.

    `write_T` rows of a layer's flattened pages that the new tokens fill. `slot_range` is set when the slots are
    consecutive: their states are then a view, and change in place.
    """

    slots: StateSlots
    pages: LatentPages
    slots_B: Tensor
    slot_range: tuple[int, int] | None
    write_T: Tensor

    @classmethod
    def of(cls, slots: StateSlots, pages: LatentPages, slots_B: Tensor, write_T: Tensor) -> CacheRows:
        first, count, device = int(slots_B[0]), len(slots_B), slots.device
        consecutive = slots_B.tolist() == list(range(first, first + count))
        return cls(
            slots=slots,
            pages=pages,
            slots_B=put(slots_B, device),
            slot_range=(first, first + count) if consecutive else None,
            write_T=put(write_T, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeBatch:
    """One new token a request. `bias_B1S` is 0 where the request may look and -inf elsewhere."""

    tokens_T: Tensor
    cache: CacheRows
    table_BP: Tensor
    bias_B1S: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """Pages of requests that have tokens cached, the new ones included.

    `visible_B1LS` says what each query may see; `stale_BS1` marks page rows that nobody has written.
    """

    pages: LatentPages
    table_BP: Tensor
    visible_B1LS: Tensor
    stale_BS1: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Requests of similar length that attend together, so that padding at most about doubles the work.

    `rows_T` stream indices of their tokens (None: the whole stream, in order); `context` None: nothing was cached.
    """

    packed: Packed
    rows_T: Tensor | None
    context: Context | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkBatch:
    """Chunks of prompts, or whole sequences that touch no cache (`cache` None).

    `last_B` stream index of each chunk's last token; `has_context`: some chunk continues a cached one.
    """

    tokens_T: Tensor
    packed: Packed
    chunks: Chunks
    buckets: tuple[Bucket, ...]
    last_B: Tensor
    cache: CacheRows | None
    has_context: bool


StepBatch = DecodeBatch | ChunkBatch


def decode_batch(
    tokens: Sequence[int], contexts: Sequence[int], owners: Sequence[int], slots: StateSlots, pages: LatentPages
) -> DecodeBatch:
    """One token for each owner (its state slot), at position `contexts[i]`."""
    slots_B, contexts_B = torch.tensor(owners), torch.tensor(contexts)
    longest = pages.pages_for(max(contexts) + 1)
    positions_S = torch.arange(longest * pages.page_size)
    bias_BS = torch.zeros(len(owners), len(positions_S)).masked_fill_(positions_S > contexts_B[:, None], -torch.inf)
    return DecodeBatch(
        tokens_T=put(tokens, slots.device),
        cache=CacheRows.of(slots, pages, slots_B, pages.rows_of(slots_B, contexts_B)),
        table_BP=put(pages.table_SP[slots_B, :longest], slots.device),
        bias_B1S=put(bias_BS.unsqueeze(1), slots.device),
    )


def chunk_batch(
    chunks: Sequence[Chunk], pools: tuple[StateSlots, LatentPages] | None, device: torch.device
) -> ChunkBatch:
    """Chunks of one or more tokens each; without `pools` every chunk is a whole sequence that touches no cache."""
    lengths = [len(c.tokens) for c in chunks]
    host = Packed.from_lengths(lengths)
    packed = host if device.type == "cpu" else Packed.from_lengths(lengths, device)
    cache = None
    if pools is not None:
        slots_B = torch.tensor([c.slot for c in chunks])
        positions_T = host.cols_T + torch.tensor([c.context for c in chunks])[host.rows_T]
        cache = CacheRows.of(*pools, slots_B, pools[1].rows_of(slots_B[host.rows_T], positions_T))
    return ChunkBatch(
        tokens_T=put([t for c in chunks for t in c.tokens], device),
        packed=packed,
        chunks=Chunks.of(host).to(device),
        buckets=tuple(_bucket(chunks, members, host, cache, device) for members in _alike(chunks)),
        last_B=packed.last_index_B(),
        cache=cache,
        has_context=any(c.context for c in chunks),
    )


def _alike(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Indices of chunks that attend together: all with or all without context, lengths within a factor of two."""
    order = sorted(range(len(chunks)), key=lambda i: (chunks[i].context > 0, len(chunks[i].tokens)), reverse=True)
    groups: list[list[int]] = []
    longest = deepest = 0
    for i in order:
        length, depth = len(chunks[i].tokens), chunks[i].context
        same_kind = groups and (chunks[groups[-1][0]].context > 0) == (depth > 0)
        low, high = min(deepest, depth), max(deepest, depth)
        if same_kind and 2 * length >= longest and 2 * (low + length) >= high:
            groups[-1].append(i)
            deepest = high
        else:
            groups.append([i])
            longest, deepest = length, depth
    return [sorted(group) for group in groups]


def _bucket(
    chunks: Sequence[Chunk], members: list[int], host: Packed, cache: CacheRows | None, device: torch.device
) -> Bucket:
    picked = [chunks[i] for i in members]
    rows_T = None
    if len(members) < len(chunks):
        rows_T = put(torch.cat([torch.arange(*host.cu_seqlens[i : i + 2].tolist()) for i in members]), device)
    context = _context(picked, cache.pages, device) if cache is not None and picked[0].context else None
    return Bucket(packed=Packed.from_lengths([len(c.tokens) for c in picked], device), rows_T=rows_T, context=context)


def _context(chunks: Sequence[Chunk], pages: LatentPages, device: torch.device) -> Context:
    contexts_B, lengths_B = torch.tensor([[c.context, len(c.tokens)] for c in chunks]).unbind(1)
    ends_B = contexts_B + lengths_B
    longest = pages.pages_for(int(ends_B.max()))
    positions_S = torch.arange(longest * pages.page_size)
    queries_BL = contexts_B[:, None] + torch.arange(int(lengths_B.max()))
    return Context(
        pages=pages,
        table_BP=put(pages.table_SP[[c.slot for c in chunks], :longest], device),
        visible_B1LS=put((positions_S <= queries_BL[:, :, None]).unsqueeze(1), device),
        stale_BS1=put((positions_S >= ends_B[:, None]).unsqueeze(-1), device),
    )
