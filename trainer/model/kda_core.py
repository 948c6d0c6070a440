"""KDA's convolution and delta rule with backward passes written out: less memory and time than autograd takes.

Their plain twins, and the formulas, are `k3.ops.short_conv` and `k3.ops.kda.kda_chunk`; the weights are frozen.
Shape legend: T tokens, D channels, W kernel width, N heads, K key channels, V value channels, B sequences,
M chunks (CHUNK tokens of a sequence, padded at its end), C places of a chunk, P = M * N matrices of a batched product.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_k3.k3.ops.kda import CHUNK, Chunks
from miles_k3.k3.ops.norm import L2_EPS
from miles_k3.k3.ops.packed import Packed
from miles_k3.trainer.model.state_handover import StateHandover


@dataclass(frozen=True, slots=True, eq=False)
class KdaMaps:
    """Index maps of one packed stream, made once a forward and shared by its KDA layers.

    `first_R`, `last_R`: tokens that lack `width - 1` predecessors, or successors, in their own sequence, with the
    numbers `before_R`, `after_R` that they have. `source_PC`: token * N + head at each place of the chunked layout
    [M, N, C], T * N where it is padding; `place_TN`: the inverse. `first_chunks`, `last_chunks`: chunks of the stream's
    first and last sequence, in their order. `halo`: tokens before the stream that only the convolution sees.
    """

    first_R: Tensor
    before_R: Tensor
    last_R: Tensor
    after_R: Tensor
    source_PC: Tensor
    place_TN: Tensor
    active: list[int]  # chunks of each scan step; the chunks lie step by step, longest sequences first
    first_chunks: list[int]
    last_chunks: list[int]
    halo: int = 0

    @classmethod
    def of(cls, packed: Packed, heads: int, width: int, halo: int = 0) -> KdaMaps:
        edges = _edges(packed, width, halo)
        cols_T, chunks = packed.cols_T, Chunks.of(packed)
        head_N = torch.arange(heads, device=cols_T.device) * CHUNK
        chunk_T, offset_T = chunks.slot_T // CHUNK, chunks.slot_T % CHUNK
        place_TN = ((chunk_T * heads * CHUNK + offset_T)[:, None] + head_N).reshape(-1)
        source_PC = torch.full((sum(chunks.active) * heads * CHUNK,), place_TN.shape[0], device=cols_T.device)
        source_PC[place_TN] = torch.arange(place_TN.shape[0], device=cols_T.device)
        starts = list(accumulate(chunks.active, initial=0))
        first, last = (
            [starts[i] + int(chunks.unorder_B[b]) for i in range(-(-int(packed.lengths_B[b]) // CHUNK))]
            for b in (0, packed.num_seqs - 1)
        )
        return cls(*edges, source_PC, place_TN, chunks.active, first, last, halo)

    @classmethod
    def of_convolution(cls, packed: Packed, width: int, halo: int = 0) -> KdaMaps:
        """For a delta rule that makes its own maps: those of the chunks, which are the large ones, are left out."""
        nothing = packed.cols_T.new_empty(0)
        return cls(*_edges(packed, width, halo), nothing, nothing, [], [], [], halo)

    def to(self, device: torch.device | str) -> KdaMaps:
        """The same maps for tensors on `device`."""
        maps = (self.first_R, self.before_R, self.last_R, self.after_R, self.source_PC, self.place_TN)
        return KdaMaps(
            *(m.to(device) for m in maps), active=self.active, first_chunks=self.first_chunks,
            last_chunks=self.last_chunks, halo=self.halo,
        )  # fmt: skip

    def step_slices(self, heads: int) -> list[slice]:
        """Rows of the chunked layout that each scan step computes."""
        ends = [heads * n for n in accumulate(self.active, initial=0)]
        return [slice(a, b) for a, b in pairwise(ends)]

    def scatter(self, x_TNK: Tensor) -> Tensor:
        """[T, N, K] -> fp32 [P, C, K], zeros in the padding."""
        rows = x_TNK.reshape(-1, x_TNK.shape[-1]).float()
        return F.pad(rows, (0, 0, 0, 1)).index_select(0, self.source_PC).unflatten(0, (-1, CHUNK))

    def gather(self, x_PCK: Tensor) -> Tensor:
        """The inverse: [P, C, K] -> [T * N, K]."""
        return x_PCK.flatten(0, 1).index_select(0, self.place_TN)


def _edges(packed: Packed, width: int, halo: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`first_R`, `before_R`, `last_R`, `after_R` of the stream with its halo, which belongs to the first sequence."""
    if halo:
        first, *others = packed.lengths_B.tolist()
        packed = Packed.from_lengths((first + halo, *others), packed.cols_T.device)
    left_T = packed.lengths_B[packed.rows_T] - 1 - packed.cols_T
    first_R, last_R = ((n < width - 1).nonzero().squeeze(1) for n in (packed.cols_T, left_T))
    return first_R, packed.cols_T[first_R], last_R, left_T[last_R]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_D1W: Tensor, maps: KdaMaps):
        taps_WD = weight_D1W.float().squeeze(1).t().flip(0)  # taps[b] multiplies the token b places earlier
        y_TD = _convolve(x_TD.float(), taps_WD, -1, maps.first_R, maps.before_R)
        ctx.save_for_backward(y_TD.to(x_TD.dtype), taps_WD)
        ctx.maps = maps
        return F.silu(y_TD).to(x_TD.dtype)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        y_TD, taps_WD = ctx.saved_tensors
        slope_TD = torch.ops.aten.silu_backward(grad_TD.float(), y_TD.float())
        maps = ctx.maps
        return _convolve(slope_TD, taps_WD, 1, maps.last_R, maps.after_R).to(y_TD.dtype), None, None


def _convolve(x_TD: Tensor, taps_WD: Tensor, direction: int, edge_R: Tensor, room_R: Tensor) -> Tensor:
    """sum_b taps[b] * x[t + direction * b] within each sequence; `edge_R` reach over its edge after `room_R` tokens."""
    y_TD = x_TD * taps_WD[0]
    edge_RD = y_TD[edge_R]
    for b in range(1, min(taps_WD.shape[0], x_TD.shape[0])):
        here, there = (slice(b, None), slice(None, -b))[::-direction]
        y_TD[here].addcmul_(x_TD[there], taps_WD[b])
        neighbour_RD = x_TD[(edge_R + direction * b).clamp(0, x_TD.shape[0] - 1)]
        edge_RD.addcmul_(torch.where((room_R >= b)[:, None], neighbour_RD, 0.0), taps_WD[b])
    return y_TD.index_copy_(0, edge_R, edge_RD)


def short_conv_silu(x_TD: Tensor, weight_D1W: Tensor, maps: KdaMaps) -> Tensor:
    """Depthwise causal convolution and SiLU of a packed stream, as `short_conv`: [halo + T, D] -> [T, D]."""
    y_TD: Tensor = _ShortConv.apply(x_TD, weight_D1W, maps)  # pyright: ignore[reportAssignmentType]
    return y_TD[maps.halo :]


class _Factors:
    """What forward and backward of the chunked delta rule both need, from the saved tensors; all [P, C, ...].

    Decays inside a chunk are factored around its middle, as in `kda_chunk`: `decay` is e^G, `rest` e^(G_end - G). With
    S the state before a chunk and beta the write strengths, its deltas are U = inverse diag(beta) (V - k_decay S).
    """

    def __init__(self, q: Tensor, k: Tensor, cum: Tensor):
        middle = cum[:, CHUNK // 2 - 1 : CHUNK // 2]
        self.late = (cum - middle).exp_()
        self.early = self.late.reciprocal()
        self.decay = self.late * middle.exp()
        self.rest = self.early * self.late[:, -1:]
        self.end_PK1 = self.decay[:, -1:].transpose(1, 2)
        self.q_late, self.k_late, self.k_early = q * self.late, k * self.late, k * self.early
        self.q_decay, self.k_decay, self.k_rest = q * self.decay, k * self.decay, k * self.rest
        self.kk_PCC = (self.k_late @ self.k_early.transpose(1, 2)).tril_(-1)
        self.qk_PCC = (self.q_late @ self.k_early.transpose(1, 2)).tril_()


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TNK: Tensor, k_TNK: Tensor, v_TNV: Tensor, g_TNK: Tensor, beta_TN: Tensor, maps: KdaMaps,
                handover: StateHandover | None):  # fmt: skip
        q, q_scale = _unit(maps.scatter(q_TNK), q_TNK.shape[-1] ** -0.5)
        k, k_scale = _unit(maps.scatter(k_TNK), 1.0)
        v, cum = maps.scatter(v_TNV), maps.scatter(g_TNK).cumsum_(1)
        beta = maps.scatter(beta_TN.unsqueeze(-1))
        f = _Factors(q, k, cum)
        eye = torch.eye(CHUNK, device=q.device)
        inverse = torch.linalg.solve_triangular(beta * f.kk_PCC + eye, eye, upper=False, unitriangular=True)
        scaled = inverse * beta.transpose(1, 2)
        u0, w = scaled @ v, scaled @ f.k_decay
        start, transition = None, None
        if handover is not None:
            end, transition = _end_state(u0, w, f, _rows(maps.last_chunks, q_TNK.shape[1]), handover.spans)
            start = handover.incoming(end, transition)
        first = slice(maps.first_chunks[0] * q_TNK.shape[1], (maps.first_chunks[0] + 1) * q_TNK.shape[1])
        u, states = _scan(u0, w, f, maps.step_slices(q_TNK.shape[1]), first, start)
        ctx.save_for_backward(q, k, v, cum, beta, q_scale, k_scale, inverse, u, states, transition)
        ctx.maps, ctx.dtype, ctx.heads, ctx.handover = maps, v_TNV.dtype, q_TNK.shape[1], handover
        return maps.gather(torch.baddbmm(f.q_decay @ states, f.qk_PCC, u)).view(v_TNV.shape)

    @staticmethod
    def backward(ctx, grad_TNV: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, cum, beta, q_scale, k_scale, inverse, u, states, transition = ctx.saved_tensors
        maps, f, d_out = ctx.maps, _Factors(q, k, cum), ctx.maps.scatter(grad_TNV)
        w = (inverse * beta.transpose(1, 2)) @ f.k_decay
        d_end, last = None, _rows(maps.last_chunks, ctx.heads)
        if ctx.handover is not None:
            d_start = _start_gradient(d_out, w, f, _rows(maps.first_chunks, ctx.heads))
            d_end = ctx.handover.outgoing(d_start, transition)
        d_u, d_states = _scan_backward(d_out, w, f, maps.step_slices(ctx.heads), last[-1], d_end)
        d_rhs = inverse.transpose(1, 2) @ d_u
        d_v = beta * d_rhs
        d_beta = torch.linalg.vecdot(d_rhs, v - f.k_decay @ states - f.kk_PCC @ u)
        d_kk, d_qk = (d_v @ u.transpose(1, 2)).tril_(-1).neg_(), (d_out @ u.transpose(1, 2)).tril_()
        s_t = states.transpose(1, 2)
        d_q = (d_qk @ f.k_early).mul_(f.late).addcmul_(d_out @ s_t, f.decay)
        d_k = (d_kk @ f.k_early).mul_(f.late).addcmul_(d_v @ s_t, f.decay, value=-1.0)  # through e^(+G)
        d_rest = (u @ d_states.transpose(1, 2)).mul_(f.rest)
        d_k_minus = torch.baddbmm(d_kk.transpose(1, 2) @ f.k_late, d_qk.transpose(1, 2), f.q_late)
        d_k_minus.mul_(f.early).add_(d_rest)  # through e^(-G)
        d_cum = (q * d_q).addcmul_(k, d_k - d_k_minus)
        d_cum[:, -1] += (k * d_rest).sum(1) + (d_states * states).sum(-1) * f.decay[:, -1]
        d_g = d_cum.flip(1).cumsum_(1).flip(1)
        d_q = _unit_backward(d_q, q, q_scale, q.shape[-1])
        d_k = _unit_backward(d_k.add_(d_k_minus), k, k_scale, 1.0)
        shape = grad_TNV.shape[:2]
        d_q, d_k, d_v, d_g = (maps.gather(x).unflatten(0, shape) for x in (d_q, d_k, d_v, d_g))
        d_beta = maps.gather(d_beta.unsqueeze(-1)).view(shape)
        return d_q.to(ctx.dtype), d_k.to(ctx.dtype), d_v.to(ctx.dtype), d_g, d_beta, None, None


def _unit(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(scale * x / |x|, the factor that x was multiplied with), as `l2_norm`."""
    factor = torch.linalg.vecdot(x, x).add_(L2_EPS).rsqrt_().mul_(scale).unsqueeze(-1)
    return x.mul_(factor), factor


def _unit_backward(grad: Tensor, y: Tensor, factor: Tensor, inverse_square_scale: float) -> Tensor:
    along = torch.linalg.vecdot(grad, y).mul_(-inverse_square_scale).unsqueeze(-1)
    return grad.addcmul_(y, along).mul_(factor)


def _rows(chunks: list[int], heads: int) -> list[slice]:
    """Where the matrices of each chunk are."""
    return [slice(chunk * heads, (chunk + 1) * heads) for chunk in chunks]


def _scan(u0: Tensor, w: Tensor, f: _Factors, steps: list[slice], first: slice,
          start: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Deltas U [P, C, V] and the state before each chunk [P, K, V]; sequences leave from the back as they end.

    `start` [N, K, V]: the state before the first sequence's first chunk `first`, where it isn't zero.
    """
    states = u0.new_empty(u0.shape[0], w.shape[2], u0.shape[2])
    state = u0.new_zeros(steps[0].stop, *states.shape[1:])
    if start is not None:
        state[first] = start
    for at in steps:
        state = state[: at.stop - at.start]
        states[at] = state
        u0[at].baddbmm_(w[at], state, alpha=-1.0)
        state = torch.baddbmm(f.end_PK1[at] * state, f.k_rest[at].transpose(1, 2), u0[at])
    return u0, states


def _end_state(u0: Tensor, w: Tensor, f: _Factors, rows: list[slice], spans: bool) -> tuple[Tensor, Tensor]:
    """The state after the chunks `rows` from zero [N, K, V], and their transition [N, K, K], which only a sequence that
    goes through the whole slice needs (zero otherwise)."""
    heads, key_dim, value_dim = rows[0].stop - rows[0].start, w.shape[2], u0.shape[2]
    state = u0.new_zeros(heads, key_dim, value_dim + (key_dim if spans else 0))
    if spans:
        state[..., value_dim:] = torch.eye(key_dim, device=u0.device)
    for at in rows:
        u = -(w[at] @ state)
        u[..., :value_dim] += u0[at]
        state = torch.baddbmm(f.end_PK1[at] * state, f.k_rest[at].transpose(1, 2), u)
    transition = state[..., value_dim:] if spans else u0.new_zeros(heads, key_dim, key_dim)
    return state[..., :value_dim], transition


def _start_gradient(d_out: Tensor, w: Tensor, f: _Factors, rows: list[slice]) -> Tensor:
    """Gradient [N, K, V] of the state before the chunks `rows`, with nothing coming back to their end."""
    d_state = d_out.new_zeros(rows[0].stop - rows[0].start, w.shape[2], d_out.shape[2])
    for at in reversed(rows):
        d_u = torch.baddbmm(f.qk_PCC[at].transpose(1, 2) @ d_out[at], f.k_rest[at], d_state)
        d_before = (f.q_decay[at].transpose(1, 2) @ d_out[at]).baddbmm_(w[at].transpose(1, 2), d_u, alpha=-1.0)
        d_state = d_before.addcmul_(f.end_PK1[at], d_state)
    return d_state


def _scan_backward(d_out: Tensor, w: Tensor, f: _Factors, steps: list[slice], last: slice,
                   d_end: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the deltas [P, C, V] and of the state after each chunk [P, K, V].

    `d_end` [N, K, V]: gradient of the state after the last sequence's last chunk `last`, where it isn't zero.
    """
    d_u = f.qk_PCC.transpose(1, 2) @ d_out
    d_before = f.q_decay.transpose(1, 2) @ d_out  # what each chunk's own output says of the state before it
    d_states = torch.zeros_like(d_before)
    if d_end is not None:
        d_states[last] = d_end
    for at, previous in zip(reversed(steps), [*reversed(steps[:-1]), None], strict=True):
        d_u[at].baddbmm_(f.k_rest[at], d_states[at])
        if previous is not None:
            d_state = d_before[at].baddbmm_(w[at].transpose(1, 2), d_u[at], alpha=-1.0)
            d_state.addcmul_(f.end_PK1[at], d_states[at])
            d_states[previous.start : previous.start + d_state.shape[0]] = d_state
    return d_u, d_states


def delta_rule(q_TNK: Tensor, k_TNK: Tensor, v_TNV: Tensor, g_TNK: Tensor, beta_TN: Tensor, maps: KdaMaps,
               handover: StateHandover | None = None) -> Tensor:  # fmt: skip
    """The gated delta rule over a packed stream, fp32 [T, N, V]; arguments as `kda_chunk`.

    Sequences start from a zero state; with `handover` the stream is this rank's slice of a longer one, its first
    sequence goes on from the ranks before and its last one goes on after it. Collective, both ways.
    """
    return _DeltaRule.apply(q_TNK, k_TNK, v_TNV, g_TNK, beta_TN, maps, handover)  # pyright: ignore[reportReturnType]
