"""Log-probabilities and entropies of tokens against torch's own Categorical."""

import math

import pytest
import torch
from loss_cases import gradient

from miles_k3.trainer.loss import token_entropy, token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_token_logprobs_and_entropy_equal_the_distribution(temperature):
    logits_TV = 3 * torch.randn(7, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets_T = torch.arange(7)
    distribution = torch.distributions.Categorical(logits=logits_TV / temperature)
    logprobs_T, entropy_T = token_logprobs(logits_TV, targets_T, temperature), token_entropy(logits_TV, temperature)
    torch.testing.assert_close(logprobs_T, distribution.log_prob(targets_T), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy_T, distribution.entropy(), rtol=1e-12, atol=1e-12)
    leaf = logits_TV.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets_T, temperature), [leaf])
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, temperature), [leaf])


def test_half_precision_logits_are_computed_in_fp32():
    logits_TV = (4 * torch.randn(5, 300, generator=torch.Generator().manual_seed(2))).bfloat16()
    targets_T = torch.arange(5)
    logprobs_T = token_logprobs(logits_TV, targets_T, 1.0)
    assert logprobs_T.dtype is torch.float32
    assert token_entropy(logits_TV, 1.0).dtype is torch.float32
    torch.testing.assert_close(
        logprobs_T, token_logprobs(logits_TV.double(), targets_T, 1.0).float(), rtol=1e-6, atol=1e-6
    )


def test_excluded_and_huge_logits_give_finite_numbers():
    logits_TV = torch.tensor([[0.0, -math.inf, 1.0], [1e5, -1e5, 0.0]], requires_grad=True)
    entropy_T = token_entropy(logits_TV, 1.0)
    (entropy_T.sum() + token_logprobs(logits_TV, torch.tensor([0, 0]), 1.0).sum()).backward()
    assert entropy_T.isfinite().all()
    assert gradient(logits_TV).isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_cannot_divide_is_refused(temperature):
    with pytest.raises(ValueError, match="above 0"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), temperature)
    with pytest.raises(ValueError, match="above 0"):
        token_entropy(torch.zeros(1, 2), temperature)
