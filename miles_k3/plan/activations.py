"""What a micro-batch keeps for its backward pass, and what its sublayers need beside that while they run.

`kept` counts the tensors that the trainer's autograd functions save (trainer/model: elementwise, kda_core, kda_fla,
experts, head): each line names them. `work` is the most that is alive beyond `kept` while the sublayer runs forward or
backward; its factors are measured allocation by allocation (docs/plan.md) and follow the widths.
All sizes are bytes of one rank and one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from miles_k3.k3.config import K3Config

FP32, INDEX = 4, 8
KDA_CHUNK, FLA_CHUNK = 16, 64  # tokens: k3/ops/kda.py, fla
EXPERT_TILE = 1 << 29  # packed weights unpacked at once (trainer/model/experts.py)
HEAD_CHUNK = {True: 1 << 27, False: 1 << 24}  # logits held at once on CUDA and on a CPU (trainer/model/head.py)
# Experts' rows of the busiest expert-parallel rank over the mean: the router is not balanced, and its bias is frozen.
IMBALANCE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch as a rank sees it. `lengths`: its sequences, before context parallelism.

    `split`: ranks that share its tokens between sublayers; `wanted`: predictions that the loss wants of this rank.
    """

    lengths: tuple[int, ...]
    cp: int
    split: int
    wanted: int

    @property
    def inside(self) -> int:
        """Tokens inside a sublayer."""
        return -(-sum(self.lengths) // self.cp)

    @property
    def between(self) -> int:
        """Tokens between sublayers."""
        return -(-self.inside // self.split)

    def padded_to(self, chunk: int) -> int:
        """Tokens inside a sublayer that works in chunks of a sequence."""
        return -(-sum(-(-n // chunk) * chunk for n in self.lengths) // self.cp)

    @property
    def padded_to_longest(self) -> int:
        return -(-len(self.lengths) * max(self.lengths) // self.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """How a rank computes: bytes of a number, adapter rank, ranks that split heads (`tp`) and experts (`ep`), CUDA or
    not, fla's kernels or torch's, experts packed or not."""

    itemsize: int
    lora_rank: int
    tp: int = 1
    ep: int = 1
    cuda: bool = False
    fla: bool = False
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """`kept` until the backward pass has used it; `work` beside it while it runs."""

    kept: int
    work: int


def attention_cost(c: K3Config, layer: int, batch: Batch, n: Numbers) -> Cost:
    """The attention side of a layer with its AttnRes mix and norm; the prefix is the caller's."""
    rows = c.bank_rows(layer)
    if layer == 0 and not c.is_mla(0):  # what comes before the first factor needs no gradient
        return Cost(batch.inside * (c.kda_dim // n.tp + n.lora_rank) * n.itemsize, _kda(c, batch, n).work)
    mixed = _mix(c, rows, batch, n) if rows else Cost(batch.between * FP32, 0)
    inner = _mla(c, batch, n) if c.is_mla(layer) else _kda(c, batch, n)
    return Cost(mixed.kept + inner.kept, inner.work)


def mlp_cost(c: K3Config, layer: int, batch: Batch, n: Numbers) -> Cost:
    """The MLP side of a layer with its AttnRes mix and norm."""
    rows = layer // c.attn_res_block_size + 1
    mixed = _mix(c, rows, batch, n)
    inner = _moe(c, batch, n) if c.is_moe(layer) else _mlp(c, c.intermediate_size, batch, n)
    return Cost(mixed.kept + inner.kept, inner.work)


def prefix_bytes(c: K3Config, batch: Batch, n: Numbers) -> int:
    """One residual prefix, or one row of the bank."""
    return batch.between * c.hidden_size * n.itemsize


def head_cost(c: K3Config, batch: Batch, n: Numbers) -> Cost:
    """Final mix and norm of the wanted rows, and the frozen head's slopes; logits exist a chunk at a time."""
    rows = c.bank_rows(c.num_hidden_layers) + 1
    hidden = batch.wanted * c.hidden_size * n.itemsize
    kept = (rows + 2) * hidden + batch.wanted * (3 * rows + 1) * FP32  # picked rows, mix, slopes; scores
    vocabulary = c.vocab_size // n.tp
    logits = min(batch.wanted, max(1, HEAD_CHUNK[n.cuda] // vocabulary)) * vocabulary
    copies = 4 * FP32 + (n.itemsize if n.itemsize < FP32 else 0)  # logits, p, a product of both, a temporary
    return Cost(kept, logits * copies + 2 * hidden)


def _mix(c: K3Config, rows: int, batch: Batch, n: Numbers) -> Cost:
    """AttnRes of `rows` bank rows and the prefix: scores, probabilities, 1 / rms of each; the mix for the norm."""
    return Cost(batch.between * (3 * (rows + 1) * FP32 + c.hidden_size * n.itemsize + FP32), 0)


def _kda(c: K3Config, batch: Batch, n: Numbers) -> Cost:
    width, heads = c.kda_dim // n.tp, c.kda_num_heads // n.tp
    tokens, b = batch.inside, n.itemsize
    # convolutions' inputs of SiLU (3), output gate, normalised output; fp32 output; beta, 1 / rms; the factor's product
    kept = tokens * (width * (5 * b + FP32) + heads * 2 * FP32 + n.lora_rank * b)
    if n.fla:
        # raw q, k, v, gate input; 1 / norms of q and k; two triangular products of each chunk
        kept += tokens * (4 * width * b + heads * (2 * FP32 + 2 * FLA_CHUNK * b))
        return Cost(kept, tokens * (23 * width * b + c.hidden_size * b))
    padded, key = batch.padded_to(KDA_CHUNK), c.kda_head_dim
    # gate; then in chunks: q, k, v, running decay, deltas; states, inverses, beta and 1 / norms
    kept += tokens * width * FP32
    kept += padded * FP32 * (5 * width + width * key // KDA_CHUNK + heads * (KDA_CHUNK + 3))
    work = padded * FP32 * (21.5 * width + 1.5 * width * key / KDA_CHUNK + 5 * heads * KDA_CHUNK)
    if b < FP32:
        work += tokens * width * FP32
    return Cost(kept, math.ceil(work) + tokens * c.hidden_size * b)


def _mla(c: K3Config, batch: Batch, n: Numbers) -> Cost:
    heads, b, tokens = c.num_attention_heads // n.tp, n.itemsize, batch.inside
    query, value, key_tokens = c.qk_head_dim, c.v_head_dim, tokens * batch.cp
    # the input of q_a's and kv_a's factors, both latents before their norms, products of the factors
    kept = tokens * (c.hidden_size + c.q_lora_rank + c.latent_cache_dim + 3 * n.lora_rank) * b
    kept += 3 * tokens * heads * value * b  # attention's output, its gate, their product
    if batch.cp > 1:
        kept += key_tokens * c.latent_cache_dim * b
    padded = tokens if n.cuda else batch.padded_to_longest
    if n.cuda or query == value:  # a fused kernel: queries, keys, values, output, logsumexp
        kept += heads * (padded * ((query + value) * b + FP32) + key_tokens * (query + value) * b)
        return Cost(kept, math.ceil(3.4 * heads * query * b) * max(padded, key_tokens))
    scores = padded * heads * max(batch.lengths) * FP32  # torch's plain form, in fp32
    kept += scores + padded * heads * (2 * query + value) * FP32
    return Cost(kept, max(3 * scores, padded * heads * query * FP32 * (6 if b == FP32 else 8)))


def _mlp(c: K3Config, width: int, batch: Batch, n: Numbers) -> Cost:
    """SiTU's parts (fp32) or its fused input, its value, the input and the products of the factors."""
    inner, tokens, b = width // n.tp, batch.inside, n.itemsize
    parts = 3 * FP32 if b == FP32 else 2 * b
    kept = tokens * (c.hidden_size * b + inner * (parts + b) + 2 * n.lora_rank * b)
    return Cost(kept, tokens * inner * FP32 * (6 if b == FP32 else 10))


def _moe(c: K3Config, batch: Batch, n: Numbers) -> Cost:
    latent, inner, b = c.routed_expert_hidden_size, c.moe_intermediate_size, n.itemsize
    top, tokens = c.num_experts_per_token, batch.between
    rows = math.ceil(tokens * top * (IMBALANCE if n.ep > 1 else 1.0))
    low = 2 * -(-n.lora_rank * b // 16) * 16  # bytes: the rank is padded to whole 16 bytes
    # scores, chosen experts and their weights, index maps; the latent before the factors and the sum before its norm
    kept = tokens * (c.num_experts * FP32 + top * (INDEX + 3 * FP32) + top * 3 * INDEX + FP32)
    kept += 2 * tokens * latent * b
    parts = 3 * FP32 if b == FP32 else 2 * b
    kept += rows * (latent * b + low + FP32 + inner * parts)  # rows with the factors' products, weights, SiTU
    shared = _mlp(c, c.shared_intermediate_size, batch, n)
    fused = rows * (inner * FP32 * (6 if b == FP32 else 10) + latent * b * (2 if n.cuda else 1))
    moved = 3 * rows * latent * b
    unpacked = 0
    if n.packed and not (n.cuda and b < FP32):  # else the kernels unpack in registers
        weight = 2 * inner * latent
        unpacked = 2 * min(c.num_experts // n.ep, max(1, EXPERT_TILE // weight)) * weight * b
        unpacked += rows * inner * FP32 * 4
    return Cost(kept + shared.kept, max(fused, moved, unpacked, shared.work))


def stage_peak(
    c: K3Config, stages: Sequence[range], batch: Batch, n: Numbers, *, recomputed: frozenset[str], in_flight: int
) -> int:  # fmt: skip
    """The most that activations take on a rank with these stages (one, or its virtual ones) while it trains.

    `in_flight`: forward passes of a stage that wait for their backward at once. `recomputed`: layer, attention, mlp.
    """
    kept, peaks = [], []
    for layers in stages:
        last = layers.stop == c.num_hidden_layers
        costs = [*_sublayers(c, layers, batch, n, recomputed), *([head_cost(c, batch, n)] if last else [])]
        rows_in, rows_out = (c.bank_rows(i) + 1 for i in (layers.start, layers.stop))
        prefix = prefix_bytes(c, batch, n)
        boundary = prefix * ((rows_in if layers.start else 0) + (0 if last else rows_out))
        kept.append(sum(cost.kept for cost in costs) + boundary)
        # gradients of the bank's rows and the prefix flow through every sublayer
        peaks.append(_peak_of(costs) + boundary + prefix * rows_out)
    waiting = sum(sorted(kept, reverse=True)[i % len(kept)] for i in range(in_flight - 1))
    return waiting + max(peaks)


def _sublayers(
    c: K3Config, layers: Sequence[int], batch: Batch, n: Numbers, recomputed: frozenset[str]
) -> list[Cost]:  # fmt: skip
    """Sublayers of a stage in order, prefixes included. What is computed again keeps its inputs only, and needs its own
    `kept` beside its `work` when its backward runs."""
    prefix, found = prefix_bytes(c, batch, n), []
    for layer in layers:
        attention, mlp = attention_cost(c, layer, batch, n), mlp_cost(c, layer, batch, n)
        if "layer" in recomputed:
            work = max(attention.work, prefix + mlp.kept + mlp.work)  # the MLP's backward comes first and frees its own
            found.append(Cost(prefix, attention.kept + work))
            continue
        for name, cost in (("attention", attention), ("mlp", mlp)):
            again = cost.kept if name in recomputed else 0
            found.append(Cost(prefix + cost.kept - again, cost.work + again))
    return found


def _peak_of(costs: Sequence[Cost]) -> int:
    """The most that is alive at once in one forward and backward pass over the sublayers."""
    kept, most = 0, 0
    for cost in costs:
        kept += cost.kept
        most = max(most, kept + cost.work)
    return most
