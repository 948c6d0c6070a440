"""Cases of fla's own context-parallel tests, to be run on a pool of ranks: lengths, shapes and limits are its facts.

From tests/context_parallel/test_cp_kda.py and test_cp_conv.py of flash-linear-attention: 1,024 tokens in contiguous
slices, 4 heads, fp16 inputs; the convolution has 128 channels and inputs of a hundred. Each function runs on every rank
and returns this rank's tokens of each result. Shape legend: T tokens of this rank, N heads, K = V channels of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from miles_k3.k3.ops.packed import Packed
from miles_k3.trainer.distributed import Axis
from miles_k3.trainer.model.context import TokenLayout, kda_relayouts
from miles_k3.trainer.model.kda_core import KdaMaps, delta_rule, short_conv_silu
from miles_k3.trainer.model.kda_fla import fla_context, fla_delta_rule
from miles_k3.trainer.model.state_handover import StateHandover

TOKENS, HEADS, CHANNELS, WIDTH = 1024, 4, 128, 4


class Case(NamedTuple):
    """`dim`: channels of a head, in the delta rule's cases."""

    ranks: int
    lengths: tuple[int, ...]
    dim: int = 0


DELTA_CASES = {
    "sequence_cut": Case(2, (300, 400, 324), 64),
    "boundary_aligned": Case(2, (512, 512), 128),
    "many_short": Case(2, (100, 150, 200, 250, 124, 100, 100), 64),
    "over_three_ranks": Case(4, (700, 324), 128),
    "one_sequence": Case(4, (1024,), 64),
}
NAMES = ("out", "q", "k", "v", "g", "beta")
LIMITS = dict(zip(NAMES, (5e-3, 8e-3, 8e-3, 8e-3, 2e-2, 2e-2), strict=True))  # largest absolute difference
CONV_CASES = {
    "one_sequence_2": Case(2, (1024,)),
    "sequence_cut": Case(2, (300, 400, 324)),
    "boundary_aligned": Case(2, (512, 512)),
    "over_three_ranks": Case(4, (700, 324)),
    "one_sequence_4": Case(4, (1024,)),
    "many_short": Case(2, (100, 150, 200, 250, 124, 100, 100)),
    "tail_of_1": Case(2, (513, 511)),
    "tail_of_2": Case(2, (514, 510)),
    "tails_of_1_everywhere": Case(4, (257, 255, 257, 255)),
    "ends_and_tail_of_1": Case(2, (200, 313, 511)),
    "sequence_of_1_at_the_boundary": Case(2, (512, 1, 511)),
    "short_tails": Case(4, (257, 253, 257, 257)),
    "sequences_and_tails_of_1": Case(4, (257, 1, 253, 257, 1, 253, 2)),
}
CONV_LIMIT = 1e-3  # root mean square of the difference over that of the reference


def delta_rule_case(rank: int, size: int, lengths: tuple[int, ...], dim: int) -> list[Tensor]:
    """Ours: output and the gradients of q, k, v, g and beta."""
    layout, mine = _layout(lengths, rank, size)
    maps = KdaMaps.of(Packed.from_lengths(tuple(layout.slice_lengths(rank))), HEADS, WIDTH)
    leaves, grad = _delta_inputs(dim, mine, "cpu", torch.float32)
    q, k, v, g, beta = leaves
    handover = StateHandover.of(layout) if size > 1 else None
    return _results(delta_rule(q, k, v, g, beta, maps, handover), leaves, grad)


def fla_case(rank: int, size: int, lengths: tuple[int, ...], dim: int, alone: bool) -> list[Tensor]:
    """fla's kernels on this rank's device, through `size` ranks, or the whole stream `alone`; else as ours."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    host = Packed.from_lengths(lengths).cu_seqlens
    boundaries = host.to(device)
    _, mine = _layout(lengths, rank, size)
    world: Any = dist.group.WORLD
    cp = None if alone else fla_context(boundaries, host, world, WIDTH)
    leaves, grad = _delta_inputs(dim, slice(0, TOKENS) if alone else mine, device, torch.float16)
    q, k, v, g, beta = leaves
    found = _results(fla_delta_rule(q, k, v, g, beta, boundaries, host, cp), leaves, grad)
    return [x[mine] for x in found] if alone else found


def conv_case(rank: int, size: int, lengths: tuple[int, ...]) -> list[Tensor]:
    """Our convolution with the halo that other ranks send: output and the gradient of its input."""
    layout, mine = _layout(lengths, rank, size)
    generator = torch.Generator().manual_seed(42)
    x, grad = (torch.randn(TOKENS, CHANNELS, generator=generator) for _ in range(2))
    weight = torch.randn(CHANNELS, 1, WIDTH, generator=generator)
    local = (100 * x)[mine].requires_grad_()
    halo = layout.halo(rank, WIDTH)
    wide = local if size == 1 else kda_relayouts(layout, WIDTH)[0](local)
    maps = KdaMaps.of(Packed.from_lengths(tuple(layout.slice_lengths(rank))), 1, WIDTH, halo)
    return _results(short_conv_silu(wide, weight, maps), [local], grad[mine])


def _layout(lengths: tuple[int, ...], rank: int, size: int) -> tuple[TokenLayout, slice]:
    """fla's layout: every rank's tokens are its slice of the stream, before as well as around KDA."""
    group = dist.group.WORLD if size > 1 else None
    order = torch.arange(TOKENS)
    layout = TokenLayout(lengths, order, order, order, Axis(rank, size, group))
    return layout, layout.cp.part(TOKENS)


def _delta_inputs(dim: int, mine: slice, device: torch.device | str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """(q, k, v, g, beta that require gradients, the output's gradient): the same values on every rank and device."""
    generator = torch.Generator().manual_seed(42)
    q, k, v, gate, grad = (torch.randn(TOKENS, HEADS, dim, generator=generator) for _ in range(5))
    beta = torch.randn(TOKENS, HEADS, generator=generator).half().sigmoid()
    g = F.logsigmoid(gate).clamp(min=-4.999)  # as K3's; a draw in millions lies beyond
    rounded = [x.half().to(dtype) for x in (q, k, v)]
    return [x[mine].to(device).requires_grad_() for x in (*rounded, g, beta.float())], grad.half().to(dtype)[mine]


def _results(out: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [x.detach().float().cpu() for x in (out, *torch.autograd.grad(out, leaves, grad.to(out)))]
