"""Verify's layers against decode, one step at a time: bit for bit, whatever shares the batch."""

from __future__ import annotations

import pytest
import torch

from miles_k3.errors import EngineError
from miles_k3.k3.ops.decode import kda_step_, mla_step, short_conv_step_
from miles_k3.k3.ops.kda import kda_recurrent
from miles_k3.k3.ops.mla import mla_absorbed
from miles_k3.k3.ops.short_conv import short_conv_naive
from miles_k3.rollout.speculative.verify import (
    VerifySteps,
    kda_verify,
    mla_verify,
    short_conv_verify,
    verify_biases,
)

LENGTHS = [[1], [8], [3, 8, 1, 5, 8], [1, 1, 1]]
CPU = torch.device("cpu")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ragged = pytest.mark.parametrize("lengths", LENGTHS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@ragged
@dtypes
def test_short_conv_is_the_step_at_every_position(lengths: list[int], dtype: torch.dtype) -> None:
    x, weight = torch.randn(sum(lengths), 64).to(dtype), torch.randn(64, 1, 4)
    windows = torch.randn(len(lengths), 3, 64).to(dtype)
    before, steps = windows.clone(), VerifySteps.of(lengths, 4)
    got = short_conv_verify(x, weight, windows, steps)
    assert torch.equal(windows, before)
    for b, (part, mine) in enumerate(zip(got.split(lengths), x.split(lengths), strict=True)):
        window = before[b : b + 1].clone()
        expected = [short_conv_step_(row[None], weight, window) for row in mine]
        assert torch.equal(part, torch.cat(expected))
    close = 1e-5 if dtype == torch.float32 else 2e-2
    naive = short_conv_naive(x, weight, steps.packed, before)
    torch.testing.assert_close(got, naive, rtol=close, atol=close)


@ragged
@dtypes
@pytest.mark.parametrize(("heads", "dim"), [(4, 16), (3, 20)])
def test_kda_is_the_step_at_every_position(lengths: list[int], dtype: torch.dtype, heads: int, dim: int) -> None:
    total = sum(lengths)
    q, k, v = torch.randn(3, total, heads, dim).to(dtype).unbind(0)
    g, beta = -5 * torch.rand(total, heads, dim), torch.rand(total, heads)
    states = torch.randn(len(lengths), heads, dim, dim)
    before, steps = states.clone(), VerifySteps.of(lengths, 4)
    got = kda_verify(q, k, v, g, beta, states, steps)
    assert torch.equal(states, before)
    at = 0
    for b, length in enumerate(lengths):
        state = before[b : b + 1].clone()  # alone: KDA's numbers don't depend on the batch
        for t in range(at, at + length):
            row = slice(t, t + 1)
            assert torch.equal(got[row], kda_step_(q[row], k[row], v[row], g[row], beta[row], state))
        at += length
    expected, _ = kda_recurrent(q, k, v, g, beta, steps.packed, before)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@ragged
@dtypes
def test_mla_is_the_step_at_every_position(lengths: list[int], dtype: torch.dtype) -> None:
    """Decode of the same requests side by side, each step over whole pages that hold no later token yet."""
    nope, extra, latent, value, heads, page = 16, 8, 32, 24, 4, 4
    contexts = [7, 0, 12, 3, 9][: len(lengths)]
    total, rows = sum(lengths), 24
    q = torch.randn(total, heads, nope + extra).to(dtype)
    w_k, w_v = torch.randn(heads, nope, latent).to(dtype), torch.randn(heads, value, latent).to(dtype)
    cache, steps = torch.randn(len(lengths), rows, latent + extra).to(dtype), VerifySteps.of(lengths, 4)
    got = mla_verify(q, cache, verify_biases(contexts, steps, page, CPU), w_k, w_v, steps)
    firsts = steps.packed.cu_seqlens.tolist()
    for j in range(max(lengths)):
        active = [b for b in steps.order if lengths[b] > j]
        ends = torch.tensor([contexts[b] + j for b in active])
        length = -(-(int(ends.max()) + 1) // page) * page
        fresh = cache[active][:, :length].clone()
        unwritten = torch.arange(length) > ends[:, None]
        fresh[unwritten] = 0.0  # as a recycled page is, where verify has its later positions
        bias = torch.zeros(len(active), 1, length).masked_fill(unwritten[:, None], -torch.inf)
        at = torch.tensor([firsts[b] + j for b in active])
        assert torch.equal(got[at], mla_step(q[at], fresh, bias, w_k, w_v))
    queries = [contexts[b] + j for b in range(len(lengths)) for j in range(lengths[b])]
    visible = (torch.arange(rows) <= torch.tensor(queries)[:, None])[:, None]
    expected = mla_absorbed(q[:, None], cache[steps.packed.rows_T], visible, w_k, w_v)[:, 0]
    close = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got, expected, rtol=close, atol=close * expected.abs().max().item())


def test_bad_lengths_are_refused() -> None:
    for lengths in ([], [3, 0]):
        with pytest.raises(EngineError, match="one position or more"):
            VerifySteps.of(lengths, 4)
