"""MLA: expanded against float64 scores, absorbed against expanded, over packed sequences and poisoned caches.

Tolerance: fp32 softmax over at most 20 tokens; the two forms multiply in another order, 1e-5 of values near 1.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miles_k3.k3.ops.decode import mla_step
from miles_k3.k3.ops.mla import mla_absorbed, mla_chunk, mla_expanded, mla_expanded_naive, split_kv_b
from miles_k3.k3.ops.packed import Packed

N, NOPE, EXTRA, V, C = 3, 6, 4, 10, 16  # nope != v, so that a wrong split shows
LENGTHS = (1, 7, 20, 2)
FORMS = pytest.mark.parametrize("form", [mla_expanded, mla_expanded_naive])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        2 * draw(tokens, N, NOPE + EXTRA),
        2 * draw(tokens, N, NOPE + EXTRA, seed=1),
        draw(tokens, N, V, seed=2),
    )


def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence, one query and one head at a time, float64."""
    out = torch.zeros(*q.shape[:2], V, dtype=torch.float64)
    for t in range(len(q)):
        for h in range(N):
            scores = k[: t + 1, h].double() @ q[t, h].double() / (NOPE + EXTRA) ** 0.5
            out[t, h] = v[: t + 1, h].double().T @ scores.softmax(0)
    return out


@FORMS
def test_expanded_matches_plain_scores(form):
    q, k, v = qkv(sum(LENGTHS))
    parts = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    expected = torch.cat([oracle(*part) for part in parts])
    torch.testing.assert_close(form(q, k, v, Packed.from_lengths(LENGTHS)).double(), expected, rtol=0, atol=1e-5)


def test_expanded_gradients_match_the_naive_form():
    q, k, v = (x.requires_grad_() for x in qkv(sum(LENGTHS)))
    packed, probe = Packed.from_lengths(LENGTHS), draw(sum(LENGTHS), N, V, seed=3)
    grads = [
        torch.autograd.grad((form(q, k, v, packed) * probe).sum(), (q, k, v))
        for form in (mla_expanded, mla_expanded_naive)
    ]
    for fast, naive in zip(*grads, strict=True):
        torch.testing.assert_close(fast, naive, rtol=0, atol=1e-5)


@FORMS
def test_a_sequence_alone_equals_the_sequence_packed(form):
    """NaN in every neighbour, before and behind."""
    q, k, v = (x.clone() for x in qkv(sum(LENGTHS)))
    packed = Packed.from_lengths(LENGTHS)
    alone = form(q[8:28], k[8:28], v[8:28], Packed.from_lengths((20,)))
    for x in (q, k, v):
        x[:8] = x[28:] = torch.nan
    torch.testing.assert_close(form(q, k, v, packed)[8:28], alone, rtol=0, atol=1e-6)


@FORMS
def test_no_positions_and_no_future(form):
    """NoPE: permuting earlier tokens leaves the last output alone; changing later ones leaves earlier outputs alone."""
    q, k, v = qkv(12)
    packed = Packed.from_lengths((12,))
    out = form(q, k, v, packed)
    order = torch.tensor([5, 3, 0, 9, 1, 8, 2, 10, 4, 7, 6, 11])
    torch.testing.assert_close(form(q[order], k[order], v[order], packed)[-1], out[-1], rtol=0, atol=1e-6)
    changed = [torch.cat([x[:7], x[7:] + 3.0]) for x in (q, k, v)]
    torch.testing.assert_close(form(*changed, packed)[:7], out[:7], rtol=0, atol=1e-6)


def test_kv_b_holds_keys_then_values_within_each_head():
    rows = torch.arange(N * (NOPE + V)).float()[:, None].expand(-1, C)
    w_k, w_v = split_kv_b(rows, N, NOPE)
    assert w_k.shape == (N, NOPE, C)
    assert w_v.shape == (N, V, C)
    assert w_k[1, :, 0].tolist() == list(range(NOPE + V, NOPE + V + NOPE))
    assert w_v[1, :, 0].tolist() == list(range(NOPE + V + NOPE, 2 * (NOPE + V)))


def latent_case(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(q [T, N, Q], cache rows [T, C + EXTRA], kv_b)."""
    q, rows = 2 * draw(tokens, N, NOPE + EXTRA, seed=seed), draw(tokens, C + EXTRA, seed=seed + 1)
    return q, rows, draw(N * (NOPE + V), C, seed=9) * C**-0.5


def expand(rows: Tensor, kv_b: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of spec 2.4's first form, straight from kv_b's rows."""
    kv = (rows[:, :C] @ kv_b.T).view(-1, N, NOPE + V)
    extra = rows[:, None, C:].expand(-1, N, -1)
    return torch.cat([kv[..., :NOPE], extra], dim=-1), kv[..., NOPE:]


@pytest.mark.parametrize("queries", [1, 4, 20])
def test_absorbed_equals_expanded(queries):
    """The last `queries` tokens over the cache of all 20; unused rows behind hold NaN, as recycled pages do."""
    q, rows, kv_b = latent_case(20)
    expected = mla_expanded_naive(q, *expand(rows, kv_b), Packed.from_lengths((20,)))[-queries:]
    cache = torch.full((1, 32, C + EXTRA), torch.nan)
    cache[0, :20] = rows
    visible = torch.arange(32) <= torch.arange(20 - queries, 20)[:, None]
    actual = mla_absorbed(q[None, -queries:], cache, visible[None], *split_kv_b(kv_b, N, NOPE))
    torch.testing.assert_close(actual[0], expected, rtol=0, atol=1e-5)


def test_absorbed_batch_of_ragged_caches_with_scattered_rows():
    """Cached tokens may lie anywhere in their row (pages), with NaN between; batch rows don't mix."""
    lengths, slots = (5, 1, 11), 24
    kv_b = latent_case(1)[2]
    cache = torch.full((3, slots, C + EXTRA), torch.nan)
    visible = torch.zeros(3, 1, slots, dtype=torch.bool)
    queries, expected = [], []
    for b, length in enumerate(lengths):
        q, rows, _ = latent_case(length, seed=20 + b)
        places = torch.randperm(slots, generator=torch.Generator().manual_seed(b))[:length]
        cache[b, places], visible[b, 0, places] = rows, True
        queries.append(q[-1:])
        expected.append(mla_expanded_naive(q, *expand(rows, kv_b), Packed.from_lengths((length,)))[-1:])
    actual = mla_absorbed(torch.stack(queries), cache, visible, *split_kv_b(kv_b, N, NOPE))
    torch.testing.assert_close(actual, torch.stack(expected), rtol=0, atol=1e-5)


def test_absorbed_rows_that_see_nothing_are_zero():
    """Padding rows of a batch: no NaN out of a softmax over nothing."""
    q, rows, kv_b = latent_case(4)
    visible = torch.zeros(2, 1, 4, dtype=torch.bool)
    visible[0] = True
    out = mla_absorbed(q[:2, None], torch.stack([rows, torch.full_like(rows, torch.nan)]), visible,
                       *split_kv_b(kv_b, N, NOPE))  # fmt: skip
    assert torch.isfinite(out[0]).all()
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_absorbed_bf16_stays_near_fp32():
    """q' and the latent sum are rounded to bf16 (2^-8 relative); scores and softmax are fp32."""
    q, rows, kv_b = (x.bfloat16() for x in latent_case(20))
    visible = torch.ones(20, 20, dtype=torch.bool).tril()[None]
    low = mla_absorbed(q[None], rows[None], visible, *split_kv_b(kv_b, N, NOPE))
    assert low.dtype == torch.bfloat16
    q, rows, kv_b = q.float(), rows.float(), kv_b.float()
    exact = mla_absorbed(q[None], rows[None], visible, *split_kv_b(kv_b, N, NOPE))
    torch.testing.assert_close(low.float(), exact, rtol=0, atol=5 * 2**-8)


def test_bf16_decode_is_as_exact_as_its_twin_and_as_training():
    """Scores in fp32 whatever the cache holds, at the published widths: bf16 leaves about 0.5 % in each form; scores
    rounded to bf16 would leave 1.2 %, a mismatch between rollout and trainer.
    """
    heads, nope, extra, value, latent, cached = 2, 128, 64, 128, 512, 256
    q, cache = (2 * draw(2, heads, nope + extra, seed=1)).bfloat16(), draw(2, cached, latent + extra, seed=2).bfloat16()
    w_k, w_v = ((1.6 * draw(heads, n, latent, seed=n) * latent**-0.5).bfloat16() for n in (nope, value + 1))
    visible = torch.ones(2, 1, cached, dtype=torch.bool)
    exact = mla_absorbed(q[:, None].float(), cache.float(), visible, w_k.float(), w_v.float())[:, 0]
    keys = torch.cat([torch.einsum("bsc,npc->bsnp", cache[..., :latent], w_k),
                      cache[:, :, None, latent:].expand(-1, -1, heads, -1)], -1)  # fmt: skip
    values = torch.einsum("bsc,nvc->bsnv", cache[..., :latent], w_v)
    seen = torch.ones(2, 1, 1, cached, dtype=torch.bool)
    forms = {
        "absorbed": mla_absorbed(q[:, None], cache, visible, w_k, w_v)[:, 0],
        "step": mla_step(q, cache, torch.zeros(2, 1, cached), w_k, w_v),
        "expanded": mla_chunk(q, keys, values, seen, Packed.from_lengths((1, 1))),
    }
    for name, out in forms.items():
        assert out.dtype == torch.bfloat16
        assert (out.float() - exact).norm() / exact.norm() < 8e-3, name
