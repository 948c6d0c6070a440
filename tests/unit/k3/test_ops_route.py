"""The router: fp32 sigmoid scores, a bias that chooses but doesn't weigh, renormalised weights."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_k3.k3.ops.latent_moe import route

T, H, E = 50, 24, 8


def draw(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x, gate = torch.randn(T, H, generator=rng), torch.randn(E, H, generator=rng) * 1.5 * H**-0.5
    return x, gate, 0.3 * torch.randn(E, generator=rng)


def by_expert(weights: Tensor, experts: Tensor) -> Tensor:
    """[T, K] pairs as a dense [T, E], whatever their order."""
    return torch.zeros(len(weights), E).scatter(1, experts, weights)


def test_choice_and_weights_token_by_token():
    x, gate, bias = draw()
    weights, experts = route(x, gate, bias, top_k=3, renormalize=True, scaling=2.5)
    assert weights.dtype == torch.float32
    assert experts.dtype == torch.int64
    unbiased_choice_differs = 0
    for t in range(T):
        scores = [1 / (1 + torch.exp(-(gate[e].double() @ x[t].double())).item()) for e in range(E)]
        chosen = sorted(range(E), key=lambda e, s=scores: -(s[e] + bias[e].item()))[:3]
        assert sorted(experts[t].tolist()) == sorted(chosen)
        unbiased_choice_differs += sorted(chosen) != sorted(sorted(range(E), key=lambda e, s=scores: -s[e])[:3])
        total = sum(scores[e] for e in chosen)
        for e, weight in zip(experts[t].tolist(), weights[t].tolist(), strict=True):
            assert abs(weight - 2.5 * scores[e] / total) < 1e-5
    assert unbiased_choice_differs > T // 10, "the bias must change choices for this test to mean something"


def test_a_constant_in_the_bias_changes_nothing():
    x, gate, bias = draw()
    expected = route(x, gate, bias, top_k=2, renormalize=True, scaling=1.0)
    for actual, other in zip(route(x, gate, bias + 0.5, top_k=2, renormalize=True, scaling=1.0), expected, strict=True):
        assert torch.equal(actual, other)


def test_the_bias_never_weighs():
    """With every expert chosen the bias has nothing left to do."""
    x, gate, bias = draw()
    dense = [by_expert(*route(x, gate, b, top_k=E, renormalize=True, scaling=1.0)) for b in (bias, 5 * bias, 0 * bias)]
    for other in dense[1:]:
        torch.testing.assert_close(other, dense[0], rtol=1e-6, atol=1e-7)  # the sum's order differs


def test_without_renormalisation_the_weights_are_the_scores():
    x, gate, bias = draw()
    weights, experts = route(x, gate, bias, top_k=2, renormalize=False, scaling=3.0)
    torch.testing.assert_close(weights, 3 * torch.sigmoid(x @ gate.T).gather(1, experts))


def test_scores_are_taken_in_fp32_from_bf16_activations():
    """Two experts closer than bf16 can tell apart: the better one must win."""
    x = torch.ones(1, H, dtype=torch.bfloat16)
    gate = torch.zeros(E, H, dtype=torch.float32)
    gate[3], gate[5] = 2.0 / H, 2.0 / H * (1 + 1e-4)
    _, experts = route(x, gate, torch.zeros(E), top_k=1, renormalize=True, scaling=1.0)
    assert experts.item() == 5
    low = (x @ gate.bfloat16().T).sigmoid()
    assert low[0, 3] == low[0, 5]


def test_all_scores_near_zero_stay_finite():
    x, gate, bias = draw()
    weights, _ = route(1e3 * x, -gate.abs().sum() * torch.sign(x[:E]), bias, top_k=2, renormalize=True, scaling=1.0)
    assert torch.isfinite(weights).all()


def test_gradients_reach_activations_and_gate_but_not_the_bias():
    x, gate, bias = (t.requires_grad_() for t in draw())
    weights, experts = route(x, gate, bias, top_k=2, renormalize=True, scaling=1.0)
    probe = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((weights * probe).sum(), (x, gate, bias), allow_unused=True)
    scores = torch.sigmoid(x @ gate.T).gather(1, experts)
    expected = torch.autograd.grad((scores / scores.sum(-1, keepdim=True) * probe).sum(), (x, gate))
    torch.testing.assert_close(grads[:2], expected, rtol=1e-4, atol=1e-6)
    assert grads[2] is None or not grads[2].any()


def test_forced_experts_replay_a_choice_with_their_own_scores():
    """Rollout routing replay; a row that holds -1 falls back to the router's choice."""
    x, gate, bias = draw()
    own_weights, own = route(x, gate, bias, top_k=2, renormalize=True, scaling=1.0)
    forced = torch.stack([(own[:, 0] + 1) % E, (own[:, 0] + 3) % E], dim=1).to(torch.int16)
    forced[::2, 1] = -1
    weights, experts = route(x, gate, bias, top_k=2, renormalize=True, scaling=1.0, forced_TK=forced)
    assert torch.equal(experts[::2], own[::2])
    assert torch.equal(weights[::2], own_weights[::2])
    assert torch.equal(experts[1::2], forced[1::2].long())
    scores = torch.sigmoid(x @ gate.T).gather(1, experts)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    again = route(x, gate, bias, top_k=2, renormalize=True, scaling=1.0, forced_TK=own)
    assert torch.equal(again[0], own_weights)
