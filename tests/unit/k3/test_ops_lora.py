"""Low-rank deltas against merged weights; masks of mixed batches; a fresh adapter changes no bit.

Tolerance: fp32, 1e-5 of values near 10.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miles_k3.k3.ops.lora import LoraTerm, linear_lora, lora_delta

T, IN, OUT, R = 9, 20, 12, 4


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def term(seed: int, rows: Tensor | None = None, scaling: float = 2.0) -> LoraTerm:
    return LoraTerm(draw(R, IN, seed=seed), draw(OUT, R, seed=seed + 1), scaling, rows)


X, W = draw(T, IN, seed=1), draw(OUT, IN, seed=2)


def merged(*terms: LoraTerm) -> Tensor:
    return W + sum(t.scaling * t.b @ t.a for t in terms)


def test_delta_equals_the_merged_weight():
    terms = [term(10), term(20, scaling=0.25)]
    torch.testing.assert_close(linear_lora(X, W, terms), X @ merged(*terms).T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(lora_delta(X, terms[:1]), 2 * (X @ terms[0].a.T) @ terms[0].b.T, rtol=1e-5, atol=1e-4)


def test_no_term_is_the_plain_linear():
    assert lora_delta(X, []) is None
    assert torch.equal(linear_lora(X, W), X @ W.T)


def test_a_mixed_batch_gives_each_row_its_own_adapter():
    """Rows 0..2 with adapter 1, 3..5 with adapter 2, the rest with none, to the bit."""
    index = torch.arange(T)
    one, two = ((index // 3 == i).float()[:, None] for i in range(2))
    mixed = linear_lora(X, W, [term(10, one), term(20, two)])
    for rows, own in ((slice(0, 3), [term(10)]), (slice(3, 6), [term(20)]), (slice(6, 9), [])):
        torch.testing.assert_close(mixed[rows], linear_lora(X, W, own)[rows], rtol=0, atol=1e-5)
    assert torch.equal(mixed[6:], (X @ W.T)[6:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_b_changes_no_bit(dtype):
    fresh = LoraTerm(draw(R, IN, seed=10).to(dtype), torch.zeros(OUT, R, dtype=dtype), 2.0)
    x, w = X.to(dtype), W.to(dtype)
    assert torch.equal(linear_lora(x, w, [fresh]), x @ w.T)


def test_gradients_match_the_merged_weight():
    t = term(10)
    leaves = [leaf.requires_grad_() for leaf in (X.clone(), t.a, t.b)]
    probe = draw(T, OUT, seed=5)
    ours = torch.autograd.grad((linear_lora(leaves[0], W, [t]) * probe).sum(), leaves)
    theirs = torch.autograd.grad((leaves[0] @ merged(t).T * probe).sum(), leaves)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)
