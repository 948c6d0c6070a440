"""The frozen head's log-probabilities, entropies and their gradients against the naive form, in float64."""

from __future__ import annotations

import pytest
import torch

from miles_k3.trainer.loss import token_entropy, token_logprobs
from miles_k3.trainer.model import head
from miles_k3.trainer.model.head import head_logprobs


@pytest.mark.parametrize("rows", [2, 1000])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_equals_the_naive_form(monkeypatch: pytest.MonkeyPatch, rows: int, entropy_gradient: bool) -> None:
    monkeypatch.setattr(head, "CHUNK_NUMBERS", rows * 11)
    torch.manual_seed(0)
    x = torch.randn(5, 7, requires_grad=True)
    weight, targets, temperature = torch.randn(11, 7), torch.tensor([0, 10, 3, 3, 7]), 0.7
    to_logprobs, to_entropies = torch.randn(5), torch.randn(5)

    logprobs, entropies = head_logprobs(x, weight, targets, temperature, entropy_gradient=entropy_gradient)
    (logprobs @ to_logprobs + entropies @ to_entropies).backward()
    found, x.grad = x.grad, None

    x64 = x.detach().double().requires_grad_()
    logits = x64 @ weight.double().t()
    wanted = token_logprobs(logits, targets, temperature), token_entropy(logits, temperature)
    loss = wanted[0] @ to_logprobs.double()
    (loss + wanted[1] @ to_entropies.double() if entropy_gradient else loss).backward()
    torch.testing.assert_close((logprobs, entropies), tuple(w.float() for w in wanted), rtol=1e-5, atol=1e-5)
    assert x64.grad is not None
    torch.testing.assert_close(found, x64.grad.float(), rtol=1e-5, atol=1e-5)


def test_nothing_wanted_is_fine() -> None:
    x = torch.randn(0, 7, requires_grad=True)
    logprobs, entropies = head_logprobs(x, torch.randn(11, 7), torch.zeros(0, dtype=torch.int64), 1.0)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
