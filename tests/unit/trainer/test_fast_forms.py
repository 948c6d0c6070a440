"""The trainer's forms with written-out backwards against their plain twins in `k3.ops`: values and gradients.

Both are fp32, so they differ by rounding only: 2e-6 of the largest value, 2e-5 of each gradient's norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from miles_k3.k3.ops import attn_res, kda, latent_moe, norm, situ
from miles_k3.k3.ops.lora import ExpertLoraTerm
from miles_k3.k3.ops.packed import Packed
from miles_k3.k3.ops.short_conv import short_conv
from miles_k3.k3.weights import ExpertBank
from miles_k3.trainer.model import elementwise, experts, kda_core

LENGTHS = ([9, 1, 17, 33, 16, 64, 2], [35, 35, 35], [1, 1, 1], [3], [100])


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).requires_grad_()


def check(found: Tensor, wanted: Tensor, inputs: Sequence[Tensor], tolerance: float = 2e-5) -> None:
    """Same values, and same gradients of the same random loss."""
    assert found.dtype == wanted.dtype
    assert (found - wanted).abs().max() <= 2e-6 * max(1.0, wanted.abs().max().item()) * (tolerance / 2e-5)
    weight = torch.randn(found.shape).to(found.dtype)
    ours, theirs = (torch.autograd.grad(out, inputs, weight, retain_graph=True) for out in (found, wanted))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b.float()).norm() <= tolerance * b.float().norm() + 1e-12


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_rms_norm() -> None:
    x, weight = normal(13, 24), torch.randn(24)
    check(elementwise.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5), [x])


def test_gated_norm() -> None:
    x, gate, weight = normal(7, 3, 16), normal(7, 3, 16), torch.randn(16)
    wanted = norm.rms_norm(x, weight, 1e-5) * torch.sigmoid(gate)
    check(elementwise.gated_norm(x, weight, gate, 1e-5), wanted, [x, gate])


def halves_situ(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return situ.situ(gate, up, 4.0, 25.0)


@pytest.mark.parametrize("width", [6, 32])
def test_situ(width: int) -> None:
    x = normal(11, 2 * width, scale=6.0)
    check(elementwise.situ(x, 4.0, 25.0), halves_situ(x), [x])
    narrow = x.detach().bfloat16().requires_grad_()  # recomputes from its input instead of keeping the parts
    check(elementwise.situ(narrow, 4.0, 25.0), halves_situ(narrow), [narrow], 1e-2)


def test_kda_gate() -> None:
    f, a_log, dt_bias = normal(9, 4, 16, scale=3.0), torch.rand(4) * 1.5, torch.randn(4, 16)
    check(elementwise.kda_gate(f, a_log, dt_bias, -5.0), kda.kda_gate(f, a_log, dt_bias, -5.0), [f])


@pytest.mark.parametrize("num_rows", [2, 4])
def test_attn_res(num_rows: int) -> None:
    rows = [normal(10, 24, scale=1.0 + i) for i in range(num_rows)]
    weight, proj = torch.randn(24), torch.randn(1, 24) * 0.5
    wanted = attn_res.attn_res(rows[-1], rows[:-1], weight, proj)
    check(elementwise.attn_res(weight * proj[0], tuple(rows)), wanted, rows)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_short_conv(lengths: list[int]) -> None:
    packed, x, weight = Packed.from_lengths(lengths), normal(sum(lengths), 24), torch.randn(24, 1, 4)
    maps = kda_core.KdaMaps.of(packed, 3, 4)
    check(kda_core.short_conv_silu(x, weight, maps), short_conv(x, weight, packed), [x])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_delta_rule(lengths: list[int]) -> None:
    num_tokens, packed = sum(lengths), Packed.from_lengths(lengths)
    q, k, v = normal(num_tokens, 3, 16), normal(num_tokens, 3, 16), normal(num_tokens, 3, 24)
    g = (-5.0 * torch.sigmoid(2 * torch.randn(num_tokens, 3, 16))).requires_grad_()
    beta = torch.rand(num_tokens, 3, requires_grad=True)
    wanted, _ = kda.kda_recurrent(q, k, v, g, beta, packed)
    found = kda_core.delta_rule(q, k, v, g, beta, kda_core.KdaMaps.of(packed, 3, 4))
    inputs = [q, k, v, beta] if max(lengths) == 1 else [q, k, v, g, beta]  # one token decays nothing
    check(found, wanted, inputs)
    (d_g,) = torch.autograd.grad(found.sum(), g)
    assert d_g.isfinite().all()


@pytest.mark.parametrize("halo", [0, 2])
def test_the_convolution_needs_no_map_of_chunks(halo: int) -> None:
    packed, x, weight = Packed.from_lengths([9, 1, 17]), normal(27 + halo, 12), torch.randn(12, 1, 4)
    small, whole = kda_core.KdaMaps.of_convolution(packed, 4, halo), kda_core.KdaMaps.of(packed, 3, 4, halo)
    assert small.source_PC.numel() == small.place_TN.numel() == 0
    found, wanted = (kda_core.short_conv_silu(x, weight, maps) for maps in (small, whole))
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, wanted)))


def test_delta_rule_with_the_strongest_decay_is_finite() -> None:
    q, k, v = normal(40, 2, 16), normal(40, 2, 16), normal(40, 2, 16)
    g, beta = torch.full((40, 2, 16), -5.0, requires_grad=True), torch.ones(40, 2, requires_grad=True)
    packed = Packed.from_lengths([40])
    found = kda_core.delta_rule(q, k, v, g, beta, kda_core.KdaMaps.of(packed, 2, 4))
    wanted, _ = kda.kda_recurrent(q, k, v, g, beta, packed)
    check(found, wanted, [q, k, v, beta], tolerance=1e-4)
    assert all(t.isfinite().all() for t in torch.autograd.grad(found.sum(), [q, k, v, g, beta]))


def _expert_case(dense: bool, rank: int) -> tuple[ExpertBank, Tensor, Tensor, Tensor, ExpertLoraTerm]:
    num_experts, width, latent = 5, 32, 64
    codes = [torch.randint(0, 256, s, dtype=torch.uint8) for s in ((5, 64, 32), (5, 64, 16))]
    scales = [torch.full(s, 124, dtype=torch.uint8) for s in ((5, 64, 2), (5, 64, 1))]
    bank = ExpertBank(codes[0], scales[0], codes[1], scales[1])
    if dense:
        bank.keep_dense(torch.float32)
    z, weights = normal(23, latent), torch.rand(23, 2, requires_grad=True)
    chosen = torch.rand(23, num_experts).topk(2).indices % 4  # expert 4 gets nothing
    term = ExpertLoraTerm(
        a1=normal(rank, latent, scale=0.1), b1=normal(5, width, rank), a3=normal(rank, latent, scale=0.1),
        b3=normal(5, width, rank), a2=normal(5, rank, width, scale=0.1), b2=normal(latent, rank), scaling=1.5,
    )  # fmt: skip
    return bank, z, weights, chosen, term


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("rank", [0, 5, 8])
def test_experts(dense: bool, rank: int) -> None:
    bank, z, weights, chosen, term = _expert_case(dense, max(rank, 1))
    with_lora = rank > 0
    betas = 4.0, 25.0
    rows = experts.Rows.of(chosen, 5)
    factors = None
    if with_lora:
        low1, low3 = (experts.spread(z @ a.t() * term.scaling, rows) for a in (term.a1, term.a3))
        factors = experts.Factors(low1, low3, term.b1, term.b3, term.a2, term.b2)
    x, weight = experts.spread(z, rows), experts.spread_weights(weights, rows)
    out = experts.expert_rows(x, weight, rows.ends_E, bank, betas, term.scaling, factors)
    wanted = latent_moe.latent_experts(
        z, weights, chosen, *bank.dense(torch.float32), situ_beta=4.0, situ_linear_beta=25.0,
        lora=(term,) if with_lora else (),
    )  # fmt: skip
    trained = [term.a1, term.b1, term.a3, term.b3, term.a2, term.b2] if with_lora else []
    check(experts.combine(out, weights, rows), wanted, [z, weights, *trained])


@pytest.mark.parametrize("numbers", [1, 2 * 2048 * 2, 1 << 29])
def test_packed_experts_are_unpacked_tile_by_tile(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    """One expert, two experts (the last tile is ragged) or all at once: the same bits as the dense bank's."""
    packed, z, _, chosen, _ = _expert_case(False, 1)
    dense = _expert_case(True, 1)[0]
    dense.w13, dense.w2 = packed.dense(torch.float32)
    monkeypatch.setattr(experts, "TILE_NUMBERS", numbers)
    rows = experts.Rows.of(chosen, 5)
    x = experts.spread(z, rows)
    tiled, whole = (experts.FrozenExperts.of(bank, rows.ends_E, x) for bank in (packed, dense))
    assert tiled.edges is not None
    assert len(tiled.edges) == {1: 4, 8192: 2, 1 << 29: 1}[numbers]  # the expert without rows is never unpacked
    h = whole.times(x, "w13")
    assert torch.equal(tiled.times(x, "w13"), h)
    assert torch.equal(tiled.times(h, "w13", transposed=True), whole.times(h, "w13", transposed=True))


def _planted(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return {"forgets a term": lambda g, x: g, "wrong sign": lambda g, x: -g}[name]


@pytest.mark.parametrize("mistake", ["forgets a term", "wrong sign"])
def test_a_planted_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    wrong = _planted(mistake)
    monkeypatch.setattr(elementwise, "_rms_norm_backward", lambda grad, x, rstd: wrong(grad * rstd, x))
    with pytest.raises(AssertionError):
        test_rms_norm()
