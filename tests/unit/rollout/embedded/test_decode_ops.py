"""The engine's fast forms against their plain twins."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from miles_k3.k3.ops import decode, kda, mla, norm, situ
from miles_k3.k3.ops.attn_res import attn_res_naive
from miles_k3.k3.ops.latent_moe import latent_experts
from miles_k3.k3.ops.lora import ExpertLoraTerm
from miles_k3.k3.ops.packed import Packed
from miles_k3.k3.ops.padded_experts import PaddedDispatch, padded_experts
from miles_k3.k3.ops.residual_bank import ResidualBank
from miles_k3.k3.ops.short_conv import push_window, short_conv_step


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_kda_step() -> None:
    q, k, v = torch.randn(3, 5, 4, 16).unbind(0)
    g, beta, state = -5 * torch.rand(5, 4, 16), torch.rand(5, 4), torch.randn(5, 4, 16, 16)
    expected, after = kda.kda_step(q, k, v, g, beta, state)
    close(decode.kda_step_(q, k, v, g, beta, state), expected)
    close(state, after)


def test_short_conv_step() -> None:
    x, weight, window = torch.randn(5, 12), torch.randn(12, 1, 4), torch.randn(5, 3, 12)
    expected, after = short_conv_step(x, weight, window), push_window(x, window)
    close(decode.short_conv_step_(x, weight, window), expected)
    close(window, after)


def test_mla_step() -> None:
    q, cache = torch.randn(3, 4, 24), torch.randn(3, 10, 40)
    w_k, w_v = torch.randn(4, 16, 32), torch.randn(4, 24, 32)
    visible = torch.arange(10) < torch.tensor([[10], [1], [4]])
    bias = torch.zeros(3, 1, 10).masked_fill(~visible[:, None], -torch.inf)
    expected = mla.mla_absorbed(q[:, None], cache, visible[:, None], w_k, w_v)[:, 0]
    close(decode.mla_step(q, cache, bias, w_k, w_v), expected)


def test_mla_chunk_continues_mla_expanded() -> None:
    """The last tokens of two sequences over all their keys, against one causal pass over the whole sequences."""
    lengths, ends = [9, 6], [3, 5]
    whole = Packed.from_lengths(lengths)
    q, k, v = torch.randn(15, 4, 24), torch.randn(15, 4, 24), torch.randn(15, 4, 8)
    expected = mla.mla_expanded(q, k, v, whole)
    last = torch.cat([torch.arange(9 - 3, 9), torch.arange(15 - 5, 15)])
    queries = torch.tensor([[6], [1]]) + torch.arange(5)
    visible = (torch.arange(9) <= queries[:, :, None]).unsqueeze(1)
    got = mla.mla_chunk(q[last], whole.pad(k), whole.pad(v), visible, Packed.from_lengths(ends))
    close(got, expected[last])


def test_situ() -> None:
    hidden = torch.randn(7, 20) * 30
    gate, up = hidden.chunk(2, dim=-1)
    expected = situ.situ(gate, up, 4.0, 25.0)
    close(decode.situ_(hidden.clone(), 4.0, 25.0), expected)
    bf16 = hidden.to(torch.bfloat16)
    gate, up = bf16.chunk(2, dim=-1)
    assert torch.equal(decode.situ_(bf16.clone(), 4.0, 25.0), situ.situ(gate, up, 4.0, 25.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(7, 20) * 3).to(dtype), torch.randn(20).to(dtype)
    close(decode.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5), 1e-6 if dtype == torch.float32 else 1e-2)


def test_residual_bank() -> None:
    """Two banked rows, prefix changes in between, and a selection of tokens."""
    embedding, first, second, third = torch.randn(4, 6, 32).unbind(0)
    weight, proj = torch.randn(32), torch.randn(1, 32)
    query = weight * proj[0]
    residual = ResidualBank(embedding, 3)
    assert torch.equal(residual.mix(query), embedding)
    residual.bank(first)
    close(residual.mix(query), attn_res_naive(first, [embedding], weight, proj))
    residual.add(second)
    close(residual.mix(query), attn_res_naive(first + second, [embedding], weight, proj))
    residual.bank(third)
    expected = attn_res_naive(third, [embedding, first + second], weight, proj)
    close(residual.mix(query), expected)
    close(residual.select(torch.tensor([5, 0, 5])).mix(query), expected[[5, 0, 5]])


@dataclass
class ExpertCase:
    """20 tokens, 5 experts of which each token takes 2, rank 3."""

    z: Tensor
    weights: Tensor
    experts: Tensor
    banks: tuple[Tensor, Tensor]
    lora: list[ExpertLoraTerm]

    @classmethod
    def draw(cls, *, masked: bool) -> ExpertCase:
        mask = (torch.arange(20) % 3 > 0).unsqueeze(1) if masked else None
        term = ExpertLoraTerm(
            a1=torch.randn(3, 32), b1=torch.randn(5, 16, 3), a3=torch.randn(3, 32), b3=torch.randn(5, 16, 3),
            a2=torch.randn(5, 3, 16), b2=torch.randn(32, 3), scaling=0.7, rows_T1=mask,
        )  # fmt: skip
        return cls(
            z=torch.randn(20, 32),
            weights=torch.rand(20, 2),
            experts=torch.stack([torch.randperm(5)[:2] for _ in range(20)]),
            banks=(torch.randn(5, 32, 32) * 0.2, torch.randn(5, 32, 16) * 0.2),
            lora=[term],
        )

    def padded(self, lora: list[ExpertLoraTerm]) -> Tensor:
        dispatch = PaddedDispatch.of(self.experts, 5)
        assert dispatch is not None
        return padded_experts(
            self.z, self.weights, dispatch, *self.banks, lora=lora, situ_beta=4.0, situ_linear_beta=25.0
        )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_padded_experts(masked: bool, adapted: bool) -> None:
    case = ExpertCase.draw(masked=masked)
    lora = case.lora if adapted else []
    expected = latent_experts(
        case.z, case.weights, case.experts, *case.banks, lora=lora, situ_beta=4.0, situ_linear_beta=25.0
    )
    close(case.padded(lora), expected, 1e-4)


def test_padded_experts_keep_bad_rows_to_themselves() -> None:
    """A NaN token, the first one, whose row also fills the empty places."""
    case = ExpertCase.draw(masked=True)
    case.z[0] = torch.nan
    out = case.padded(case.lora)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


def test_padding_is_refused_when_one_expert_takes_all() -> None:
    experts = torch.zeros(64, 1, dtype=torch.int64)
    assert PaddedDispatch.of(experts, 8) is None
    assert PaddedDispatch.of(torch.arange(64)[:, None] % 8, 8) is not None
