"""What must hold of K3's formulas for any lengths, routes and caches. Tolerances: fp32 in another order, 1e-4 of values
near 1 to 50.
"""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from miles_k3.k3.ops.attn_res import attn_res, attn_res_naive
from miles_k3.k3.ops.kda import kda_chunk, kda_recurrent
from miles_k3.k3.ops.latent_moe import grouped_linear, grouped_linear_naive, latent_experts, route
from miles_k3.k3.ops.mla import mla_absorbed, mla_expanded, mla_expanded_naive, split_kv_b
from miles_k3.k3.ops.packed import Packed
from miles_k3.k3.ops.short_conv import next_window, short_conv, short_conv_naive

SEEDS = st.integers(0, 2**31)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Draw:
    """Seeded normal tensors."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng)

    def order(self, n: int) -> list[int]:
        return torch.randperm(n, generator=self.rng).tolist()


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def kda_inputs(draw: Draw, tokens: int, sharpness: float) -> list[Tensor]:
    """q, k, v, g, beta; a large sharpness pushes the decays to both ends of (-5, 0)."""
    g = -5 * torch.sigmoid(sharpness * draw(tokens, 2, 4))
    return [draw(tokens, 2, 4), draw(tokens, 2, 4), draw(tokens, 2, 6), g, torch.sigmoid(draw(tokens, 2))]


def reorder(packed: Packed, order: list[int]) -> tuple[Packed, Tensor]:
    """The packed stream with its sequences in another order, and the index that makes it."""
    spans = torch.arange(packed.num_tokens).split(packed.lengths_B.tolist())
    return Packed.from_lengths([len(spans[i]) for i in order]), torch.cat([spans[i] for i in order])


@few
@given(LENGTHS, SEEDS, st.sampled_from([0.0, 1.0, 30.0]))
def test_kda_chunk_is_kda_recurrent(lengths, seed, sharpness):
    draw, packed = Draw(seed), Packed.from_lengths(lengths)
    inputs, state = kda_inputs(draw, packed.num_tokens, sharpness), draw(len(lengths), 2, 4, 6)
    for fast, naive in zip(
        *(form(*inputs, packed=packed, state_BNKV=state) for form in (kda_chunk, kda_recurrent)), strict=True
    ):
        near(fast, naive)


@few
@given(LENGTHS, SEEDS)
def test_kda_knows_no_order_of_sequences(lengths, seed):
    draw, packed = Draw(seed), Packed.from_lengths(lengths)
    inputs, state = kda_inputs(draw, packed.num_tokens, 2.0), draw(len(lengths), 2, 4, 6)
    order = draw.order(len(lengths))
    shuffled, index = reorder(packed, order)
    out, end = kda_chunk(*inputs, packed=packed, state_BNKV=state)
    moved_out, moved_end = kda_chunk(*(x[index] for x in inputs), packed=shuffled, state_BNKV=state[order])
    near(moved_out, out[index], 1e-5)
    near(moved_end, end[order], 1e-5)


@few
@given(st.integers(2, 60), SEEDS, st.data())
def test_any_cut_carries_state_and_window(length, seed, data):
    """Chunked prefill at any two places: KDA states and convolution windows."""
    draw = Draw(seed)
    cuts = sorted(data.draw(st.lists(st.integers(1, length - 1), max_size=2, unique=True)))
    parts = [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    inputs, x, taps = kda_inputs(draw, length, 2.0), draw(length, 6), draw(6, 1, 4)
    whole = Packed.from_lengths([length])
    state, window, outs, convs = None, None, [], []
    for pieces in zip(*(t.split(parts) for t in (*inputs, x)), strict=True):
        packed = Packed.from_lengths([len(pieces[0])])
        out, state = kda_chunk(*pieces[:5], packed=packed, state_BNKV=state)
        outs.append(out)
        convs.append(short_conv(pieces[5], taps, packed, window))
        window = next_window(pieces[5], packed, 4, window)
    out, end = kda_chunk(*inputs, packed=whole)
    near(torch.cat(outs), out)
    near(torch.as_tensor(state), end)
    near(torch.cat(convs), short_conv(x, taps, whole), 1e-6)


@few
@given(LENGTHS, SEEDS, st.integers(2, 6), st.booleans())
def test_short_conv_is_conv1d(lengths, seed, width, with_window):
    draw, packed = Draw(seed), Packed.from_lengths(lengths)
    x, taps = draw(packed.num_tokens, 3), draw(3, 1, width)
    window = draw(len(lengths), width - 1, 3) if with_window else None
    near(short_conv(x, taps, packed, window), short_conv_naive(x, taps, packed, window), 1e-6)


@few
@given(st.integers(1, 9), SEEDS, st.floats(0.1, 20.0))
def test_attn_res_stays_in_the_hull_of_its_rows(num_bank, seed, sharpness):
    draw = Draw(seed)
    *bank, prefix = draw(num_bank + 1, 5, 16).unbind(0)
    norm, proj = 1 + 0.3 * draw(16), sharpness * draw(1, 16)
    mix, rows = attn_res(prefix, bank, norm, proj), torch.stack([*bank, prefix])
    assert (mix <= rows.amax(0) + 1e-4).all()
    assert (mix >= rows.amin(0) - 1e-4).all()
    near(mix, attn_res_naive(prefix, bank, norm, proj))


@few
@given(LENGTHS, SEEDS)
def test_mla_expanded_is_its_naive_form(lengths, seed):
    draw, packed = Draw(seed), Packed.from_lengths(lengths)
    q, k, v = 3 * draw(packed.num_tokens, 2, 5), draw(packed.num_tokens, 2, 5), draw(packed.num_tokens, 2, 7)
    near(mla_expanded(q, k, v, packed), mla_expanded_naive(q, k, v, packed))


@few
@given(st.integers(1, 12), st.integers(0, 8), SEEDS)
def test_absorbed_mla_finds_its_rows_anywhere_in_a_cache(cached, unused, seed):
    """Any placement, NaN in the unused rows; no order among the cached tokens."""
    draw = Draw(seed)
    heads, nope, extra, value, latent, slots = 2, 3, 2, 5, 8, cached + unused
    q, rows, kv_b = 2 * draw(heads, nope + extra), draw(cached, latent + extra), draw(heads * (nope + value), latent)
    w_k, w_v = split_kv_b(kv_b, heads, nope)
    places = draw.order(slots)[:cached]
    cache, visible = torch.full((1, slots, latent + extra), torch.nan), torch.zeros(1, 1, slots, dtype=torch.bool)
    cache[0, places], visible[0, 0, places] = rows, True
    out = mla_absorbed(q[None, None], cache, visible, w_k, w_v)[0, 0]
    for h in range(heads):
        keys = torch.cat([rows[:, :latent] @ w_k[h].T, rows[:, latent:]], dim=1)
        p = (keys @ q[h] / (nope + extra) ** 0.5).softmax(0)
        near(out[h], w_v[h] @ (rows[:, :latent].T @ p))


@few
@given(st.integers(1, 30), st.integers(1, 8), SEEDS, st.floats(0.5, 3.0))
def test_routes_are_distinct_and_weigh_in_full(tokens, top_k, seed, scaling):
    draw = Draw(seed)
    weights, experts = route(draw(tokens, 6), draw(8, 6), draw(8), top_k=top_k, renormalize=True, scaling=scaling)
    assert (weights > 0).all()
    near(weights.sum(-1), torch.full((tokens,), scaling), 1e-5)
    assert all(len(set(row)) == top_k for row in experts.tolist())
    assert 0 <= experts.min() <= experts.max() < 8


@few
@given(st.integers(1, 20), st.integers(1, 4), SEEDS)
def test_experts_add_up_over_choices_and_tokens(tokens, top_k, seed):
    """The mixture is the sum of its experts one by one, whatever the order of the choices or of the tokens."""
    draw = Draw(seed)
    z, weights, w13, w2 = draw(tokens, 12), draw(tokens, top_k).sigmoid(), draw(5, 16, 12), draw(5, 12, 8)
    experts = torch.stack([torch.tensor(draw.order(5)[:top_k]) for _ in range(tokens)])

    def mixture(rows: list[int], columns: list[int]) -> Tensor:
        at = torch.tensor(rows)[:, None], torch.tensor(columns)
        return latent_experts(z[rows], weights[at], experts[at], w13, w2, situ_beta=4.0, situ_linear_beta=25.0)

    everything, choices = list(range(tokens)), list(range(top_k))
    whole = mixture(everything, choices)
    near(torch.stack([mixture(everything, [k]) for k in choices]).sum(0), whole)
    shuffled = draw.order(tokens)
    near(mixture(shuffled, choices[::-1]), whole[shuffled])


@few
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 9), SEEDS)
def test_grouped_linear_is_its_naive_form(sizes, width_in, width_out, seed):
    draw = Draw(seed)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, weight = draw(sum(sizes), width_in), draw(len(sizes), width_out, width_in)
    near(grouped_linear(x, weight, ends), grouped_linear_naive(x, weight, ends), 1e-5)


@few
@given(LENGTHS, SEEDS)
def test_pad_and_unpad_are_inverse(lengths, seed):
    packed = Packed.from_lengths(lengths)
    x = Draw(seed)(packed.num_tokens, 3)
    padded = packed.pad(x, value=float("nan"))
    assert padded.isnan().any(-1).sum() == len(lengths) * max(lengths) - sum(lengths)
    assert torch.equal(packed.unpad(padded), x)
    assert torch.equal(x[packed.last_index_B()], torch.stack([padded[b, n - 1] for b, n in enumerate(lengths)]))
