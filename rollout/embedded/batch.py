"""Index maps of one forward, made on the host once and shared by every layer.

A step's stream holds the decoding requests' tokens first, one each or those of a verify, then the chunks of prompts.
Shapes: T tokens of the step, B requests, L longest chunk, P pages of the longest context, S = P * page_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from miles_k3.k3.ops.kda import Chunks
from miles_k3.k3.ops.packed import PREFILL_CHUNK, Packed
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.embedded.memory import RequestMemory
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.speculative.replay import ReplayBuffer
from miles_k3.rollout.speculative.verify import VerifySteps, verify_biases


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateRows:
    """Rows of the pool's states and windows. `span` is set when they are consecutive: then they are a view, and change
    in place."""

    rows_B: Tensor
    span: slice | None

    @classmethod
    def of(cls, rows_B: Tensor, device: torch.device) -> StateRows:
        """From rows on the host."""
        first, count = int(rows_B[0]), len(rows_B)
        consecutive = bool((rows_B == torch.arange(first, first + count)).all())
        return cls(rows_B=put(rows_B, device), span=slice(first, first + count) if consecutive else None)


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeBatch:
    """One new token a request. `lengths_B` counts it: what the request may look at."""

    states: StateRows
    table_BP: Tensor
    lengths_B: Tensor
    page_size: int

    @cached_property
    def bias_B1S(self) -> Tensor:
        """0 where the request may look and -inf elsewhere."""
        # Made where it is used: at 256 requests of 4k tokens it is 4 MB, and most of the host's work on a step.
        positions_S = torch.arange(self.table_BP.shape[1] * self.page_size, device=self.table_BP.device)
        hidden_BS = positions_S >= self.lengths_B[:, None]
        return torch.zeros(hidden_BS.shape, device=hidden_BS.device).masked_fill_(hidden_BS, -torch.inf).unsqueeze(1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyRows:
    """A verify as kernels take it: request b's positions are `cu_B1[b]` to `cu_B1[b + 1]`.

    `slots_B`: rows of states and windows; `table_TP` and `seen_T`: of each position its request's pages and how many
    tokens it may look at. Padding has slot -1, and sees nothing.
    """

    slots_B: Tensor
    cu_B1: Tensor
    table_TP: Tensor
    seen_T: Tensor
    replay: ReplayBuffer


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifyBatch:
    """A token of each request and what was drafted behind it: see `speculative.verify`.

    `slots_B`: rows of states and windows, by request; `ordered_B`: the same in the order of the steps. `contexts`:
    tokens cached before each request's anchor. What moves the states goes into `replay`; the pool's states and windows
    are read only.
    """

    steps: VerifySteps
    slots_B: Tensor
    ordered_B: Tensor
    table_BP: Tensor
    contexts: tuple[int, ...]
    page_size: int
    replay: ReplayBuffer

    @cached_property
    def biases(self) -> list[Tensor]:
        return verify_biases(self.contexts, self.steps, self.page_size, self.table_BP.device)

    @cached_property
    def rows(self) -> VerifyRows:
        packed = self.steps.packed
        contexts_B = put(self.contexts, packed.rows_T.device)
        return VerifyRows(
            slots_B=self.slots_B, cu_B1=packed.cu_seqlens, table_TP=self.table_BP.index_select(0, packed.rows_T),
            seen_T=contexts_B[packed.rows_T] + packed.cols_T + 1, replay=self.replay,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """Pages of requests that have tokens cached, the new ones included.

    `visible_B1LS` says what each query may see; `stale_BS1` marks page rows that nobody has written.
    """

    table_BP: Tensor
    visible_B1LS: Tensor
    stale_BS1: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Requests of similar length that attend together, so that padding at most about doubles the work.

    `rows_T` stream indices of their tokens (None: the whole stream of chunks, in order); `context` None: nothing was
    cached.
    """

    packed: Packed
    rows_T: Tensor | None
    context: Context | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkBatch:
    """Chunks of prompts, or whole sequences that touch no cache (`states` None).

    `pieces_C2`: the packed stream as the prefill kernel cuts it; `last_B`: index, among chunks' tokens, of each one's
    last; `has_context`: some chunk continues a cached one.
    """

    pieces_C2: Tensor
    packed: Packed
    chunks: Chunks
    buckets: tuple[Bucket, ...]
    last_B: Tensor
    states: StateRows | None
    has_context: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """All tokens of a step, the first `num_decodes` of requests that decode or verify.

    `write_T`: rows of a layer's flattened pages that they fill; None: no cache is touched. `positions_T` in their
    sequences, where a draft asks.
    """

    tokens_T: Tensor
    num_decodes: int
    decode: DecodeBatch | None
    verify: VerifyBatch | None = None
    recorded: VerifyRows | None = None  # instead of `verify`, where the forward is a graph's
    chunks: ChunkBatch | None
    pool: BlockPool | None
    write_T: Tensor | None
    positions_T: Tensor | None = None

    @property
    def verify_rows(self) -> VerifyRows | None:
        """For the kernels."""
        return self.recorded if self.verify is None else self.verify.rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafted:
    """What a step verifies: drafted tokens of each decoding request, none for some, and where their inputs are kept."""

    tokens: Sequence[Sequence[int]]
    replay: ReplayBuffer


def step_batch(
    memory: RequestMemory,
    decodes: Sequence[Request],
    chunks: Sequence[tuple[Request, int]],
    *,
    drafted: Drafted | None = None,
    positions: bool = False,
) -> StepBatch:
    """A token of each of `decodes`, what was `drafted` behind it, and so many of each prompt. Inside the pool's
    `forward`.

    The tokens that decoding requests feed are 0 where a step in flight is still sampling them.
    """
    device = memory.pool.device
    requests = [*decodes, *(request for request, _ in chunks)]
    fed = [[0 if r.in_flight else r.token_ids[-1]] for r in decodes]
    if drafted is not None:
        fed = [[*anchor, *behind] for anchor, behind in zip(fed, drafted.tokens, strict=True)]
    counts = [len(tokens) for tokens in fed] + [count for _, count in chunks]
    owners_T = torch.arange(len(requests)).repeat_interleave(torch.tensor(counts))
    starts_B = torch.tensor([r.num_cached for r in requests])
    firsts_B = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    positions_T = starts_B[owners_T] + torch.arange(len(owners_T)) - firsts_B[owners_T]
    tokens = [token for each in fed for token in each]
    num_decodes = len(tokens)
    for request, count in chunks:
        tokens += request.feed[request.num_cached : request.num_cached + count]
    return StepBatch(
        tokens_T=put(tokens, device),
        num_decodes=num_decodes,
        decode=_decode_batch(memory, decodes) if decodes and drafted is None else None,
        verify=_verify_batch(memory, decodes, counts[: len(decodes)], drafted.replay) if drafted else None,
        chunks=_chunk_batch(memory, chunks) if chunks else None,
        pool=memory.pool,
        write_T=put(memory.token_rows(requests, owners_T, positions_T), device),
        positions_T=put(positions_T, device) if positions else None,
    )


def uncached_batch(sequences: Sequence[Sequence[int]], device: torch.device) -> StepBatch:
    """Whole sequences that touch no cache."""
    lengths = [len(s) for s in sequences]
    return StepBatch(
        tokens_T=put([t for s in sequences for t in s], device), num_decodes=0, decode=None,
        chunks=_packed_chunks(lengths, [0] * len(lengths), device, None), pool=None, write_T=None,
    )  # fmt: skip


def _decode_batch(memory: RequestMemory, requests: Sequence[Request]) -> DecodeBatch:
    device, lengths_B = memory.pool.device, torch.tensor([r.num_cached + 1 for r in requests])
    return DecodeBatch(
        states=StateRows.of(memory.pool.slot_rows([r.slot for r in requests]), device),
        table_BP=put(memory.page_rows(requests, int(lengths_B.max())), device),
        lengths_B=put(lengths_B, device),
        page_size=memory.page_size,
    )


def _verify_batch(
    memory: RequestMemory, requests: Sequence[Request], lengths: Sequence[int], replay: ReplayBuffer
) -> VerifyBatch:
    device, contexts = memory.pool.device, [r.num_cached for r in requests]
    steps = VerifySteps.of(lengths, memory.pool.windows.shape[2] + 1, device)
    slots_B = memory.pool.slot_rows([r.slot for r in requests])
    longest = max(context + length for context, length in zip(contexts, lengths, strict=True))
    return VerifyBatch(
        steps=steps, slots_B=put(slots_B, device), ordered_B=put(slots_B[list(steps.order)], device),
        table_BP=put(memory.page_rows(requests, longest), device), contexts=tuple(contexts),
        page_size=memory.page_size, replay=replay,
    )  # fmt: skip


def _chunk_batch(memory: RequestMemory, chunks: Sequence[tuple[Request, int]]) -> ChunkBatch:
    requests, lengths = [request for request, _ in chunks], [count for _, count in chunks]
    return _packed_chunks(lengths, [r.num_cached for r in requests], memory.pool.device, (memory, requests))


def _packed_chunks(
    lengths: list[int],
    contexts: Sequence[int],
    device: torch.device,
    cached: tuple[RequestMemory, Sequence[Request]] | None,
) -> ChunkBatch:
    """Chunks of one or more tokens each, after `contexts` tokens that are cached."""
    host = Packed.from_lengths(lengths)
    packed = host if device.type == "cpu" else Packed.from_lengths(lengths, device)
    buckets = []
    for members in _alike(lengths, contexts):
        rows_T = None
        if len(members) < len(lengths):
            rows_T = put(torch.cat([torch.arange(*host.cu_seqlens[i : i + 2].tolist()) for i in members]), device)
        context = None
        if cached is not None and contexts[members[0]]:
            memory, requests = cached
            context = _context([requests[i] for i in members], [lengths[i] for i in members], memory)
        part = Packed.from_lengths([lengths[i] for i in members], device)
        buckets.append(Bucket(packed=part, rows_T=rows_T, context=context))
    states = None
    if cached is not None:
        memory, requests = cached
        states = StateRows.of(memory.pool.slot_rows([r.slot for r in requests]), device)
    return ChunkBatch(
        pieces_C2=put(host.pieces(PREFILL_CHUNK), device), packed=packed, chunks=Chunks.of(host).to(device),
        buckets=tuple(buckets), last_B=packed.last_index_B(), states=states, has_context=any(contexts),
    )  # fmt: skip


def _alike(lengths: Sequence[int], contexts: Sequence[int]) -> list[list[int]]:
    """Indices of chunks that attend together: all with or all without context, lengths within a factor of two."""
    order = sorted(range(len(lengths)), key=lambda i: (contexts[i] > 0, lengths[i]), reverse=True)
    groups: list[list[int]] = []
    longest = deepest = 0
    for i in order:
        length, depth = lengths[i], contexts[i]
        same_kind = groups and (contexts[groups[-1][0]] > 0) == (depth > 0)
        low, high = min(deepest, depth), max(deepest, depth)
        if same_kind and 2 * length >= longest and 2 * (low + length) >= high:
            groups[-1].append(i)
            deepest = high
        else:
            groups.append([i])
            longest, deepest = length, depth
    return [sorted(group) for group in groups]


def _context(requests: Sequence[Request], lengths: Sequence[int], memory: RequestMemory) -> Context:
    contexts_B, lengths_B = torch.tensor([r.num_cached for r in requests]), torch.tensor(lengths)
    ends_B = contexts_B + lengths_B
    table_BP, longest = memory.page_rows(requests, int(ends_B.max())), int(lengths_B.max())
    device = memory.pool.device
    positions_S = torch.arange(table_BP.shape[1] * memory.page_size, device=device)
    queries_BL = put(contexts_B, device)[:, None] + torch.arange(longest, device=device)
    return Context(
        table_BP=put(table_BP, device),
        visible_B1LS=(positions_S <= queries_BL[:, :, None]).unsqueeze(1),
        stale_BS1=(positions_S >= put(ends_B, device)[:, None]).unsqueeze(-1),
    )
