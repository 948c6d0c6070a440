"""The sampler alone: the uniforms, the processed distribution, and what it must not depend on."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_k3.rollout.embedded.sampler import SamplingBatch, processed_logprobs, sample, signed_seed, uniforms
from miles_k3.types import SamplingParams

CPU = torch.device("cpu")


def batch_of(params: list[SamplingParams], vocab: int) -> SamplingBatch:
    return SamplingBatch.of(params, vocab, CPU)


def draw(logits: Tensor, params: list[SamplingParams], positions: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    return sample(logits, batch_of(params, logits.shape[-1]), torch.tensor(positions))


# --- uniforms -------------------------------------------------------------------------------------------------------
def split_mix(state: int) -> int:
    """SplitMix64's output function on unbounded integers."""
    mask = 2**64 - 1
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
    return state ^ state >> 31


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (1, 0), (2**63 - 1, 5), (12345678901234, 10**6), (2**64 - 1, 3)]
)
def test_uniform_equals_the_integer_formula(seed: int, position: int) -> None:
    golden = 0x9E3779B97F4A7C15
    bits = split_mix((split_mix((seed + golden) % 2**64) + (position + 1) * golden) % 2**64)
    assert uniforms(torch.tensor([signed_seed(seed)]), torch.tensor([position])).item() == (bits >> 40) / 2**24


def test_uniforms_are_uniform_and_unrelated() -> None:
    """Mean, variance, and correlation between neighbouring seeds and positions; all within five standard errors."""
    seeds, positions = torch.meshgrid(torch.arange(400), torch.arange(250), indexing="ij")
    u = uniforms(seeds.flatten(), positions.flatten()).view(400, 250).double()
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * 12**-0.5 / 100_000**0.5
    assert abs(u.var() - 1 / 12) < 0.002
    centred = (u - 0.5) * 12**0.5
    for product in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred[1:, 1:] * centred[:-1, :-1]):
        assert abs(product.mean()) < 5 / 100_000**0.5


# --- distribution ---------------------------------------------------------------------------------------------------
def brute_force(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities of one row, token by token."""
    p = (logits.double() / params.temperature).softmax(-1)
    order = sorted(range(len(p)), key=lambda i: (-p[i].item(), i))
    if params.top_k:
        order = order[: params.top_k]
    kept, total = [], sum(p[i].item() for i in order)
    reached = 0.0
    for i in order:
        kept.append(i)
        reached += p[i].item() / total
        if reached >= params.top_p:
            break
    out = torch.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=1e-6),
    SamplingParams(temperature=1.8, top_k=7, top_p=0.8),
]


@pytest.mark.parametrize("params", CASES)
def test_processed_distribution(params: SamplingParams) -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)) * 2
    got = processed_logprobs(logits, batch_of([params] * 4, 30)).exp()
    for row, expected in zip(got, logits, strict=True):
        torch.testing.assert_close(row.double(), brute_force(expected, params), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("params", [CASES[0], CASES[1], CASES[-1]])
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 seeds; the log-probability reported is that of the token drawn."""
    count = 20_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    seeded = [
        SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, seed=i)
        for i in range(count)
    ]
    tokens, logprobs, finite = draw(logits.expand(count, -1), seeded, [7] * count)
    expected = brute_force(logits, params)
    assert finite.all()
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], rtol=1e-4, atol=1e-4)
    seen = torch.bincount(tokens, minlength=12).double()
    assert not seen[expected == 0].any()
    live = expected > 0
    chi2 = ((seen - count * expected) ** 2 / (count * expected))[live].sum()
    assert chi2 < 3 * live.sum()


def test_greedy_takes_the_first_maximum_and_reports_the_raw_distribution() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0]])
    tokens, logprobs, _ = draw(logits, [SamplingParams(temperature=0, top_k=2, top_p=0.5)], [3])
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Alone, among others, and among others that need the filtering path."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(seed=i, top_k=3 if i % 2 else 0, temperature=1.0 if i != 4 else 0.0) for i in range(6)]
    positions = [3, 9, 1, 0, 5, 7]
    together = draw(logits, params, positions)
    for i in range(6):
        alone = draw(logits[i : i + 1], params[i : i + 1], positions[i : i + 1])
        assert alone[0][0] == together[0][i]
        assert alone[1][0] == pytest.approx(together[1][i].item(), abs=1e-6)


def test_positions_and_seeds_change_the_draw() -> None:
    logits = torch.zeros(1, 1000)
    tokens = {(s, p): draw(logits, [SamplingParams(seed=s)], [p])[0].item() for s in range(8) for p in range(8)}
    assert len(set(tokens.values())) > 50


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_row_is_reported_and_alone(bad: float) -> None:
    logits = torch.randn(3, 20)
    logits[1, 4] = bad
    params = [SamplingParams(seed=i) for i in range(3)]
    tokens, logprobs, finite = draw(logits, params, [0, 0, 0])
    assert finite.tolist() == [True, False, True]
    assert tokens[1] == 0
    assert logprobs[1] == -torch.inf
    for i in (0, 2):
        assert draw(logits[i : i + 1], params[i : i + 1], [0])[0][0] == tokens[i]


def test_tokens_without_probability_are_never_drawn() -> None:
    """A vocabulary whose tail has probability 0, over many draws that reach the end of the CDF."""
    logits = torch.full((20_000, 50), -1e9)
    logits[:, :3] = 0.0
    tokens, _, finite = draw(logits, [SamplingParams(seed=i) for i in range(20_000)], [0] * 20_000)
    assert finite.all()
    assert tokens.max() == 2


def test_seeds_of_64_bits() -> None:
    logits = torch.zeros(2, 100)
    tokens, _, _ = draw(logits, [SamplingParams(seed=2**64 - 1), SamplingParams(seed=-1)], [0, 0])
    assert tokens[0] == tokens[1]


# --- kernels --------------------------------------------------------------------------------------------------------
def test_kernels_draw_what_needs_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 logits, in whatever number of rows and order; top-k and top-p, which greedy requests don't need, are
    torch's."""
    seen: list[tuple[Any, ...]] = []
    drawn = torch.full((3,), -5), torch.full((3,), -5.0), torch.zeros(3, dtype=torch.bool)
    kernels = SimpleNamespace(draw_tokens=lambda *given: seen.append(given) or drawn)
    monkeypatch.setitem(sys.modules, "miles_k3.k3.kernels.token_draw", kernels)
    params = [SamplingParams(temperature=0.0, top_k=3), SamplingParams(seed=2**64 - 1, temperature=0.5)]
    logits, positions = torch.randn(3, 7).bfloat16(), torch.tensor([5, 6, 7])
    rows = SamplingBatch.of(params, 7, CPU, on_kernels=True).rows(torch.tensor([1, 0, 1]))
    assert sample(logits, rows, positions) is drawn
    ((given, temperature, greedy, seeds, at),) = seen
    assert given.dtype == torch.float32
    assert temperature.tolist() == [0.5, 1.0, 0.5]
    assert greedy.tolist() == [False, True, False]
    assert seeds.tolist() == [-1, 0, -1]
    assert at is positions
    batch = SamplingBatch.of([*params, SamplingParams(top_p=0.5)], 7, CPU, on_kernels=True)
    tokens, logprobs, finite = sample(logits, batch, positions)
    assert (tokens < 0).tolist() == (logprobs == -5.0).tolist() == (~finite).tolist() == [True, True, False]
