"""KDA against fla's naive forms: outputs, final states and every gradient, over ragged packed lengths.

Tolerances: both sides compute in fp32 and differ in the order of their sums, over at most 70 tokens and 12 channels;
2e-5 of the largest value is some 100 roundings.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.fla_oracle import naive_chunk_kda, naive_kda_lowerbound_gate, naive_recurrent_kda
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from miles_k3.k3.ops.kda import CHUNK, kda_chunk, kda_gate, kda_recurrent, kda_step
from miles_k3.k3.ops.packed import Packed

N, K, V = 3, 8, 12
BOUNDARY_LENGTHS = (1, 15, 16, 17, 31, 32, 33)
TOLERANCE = 2e-5
FORMS = pytest.mark.parametrize("form", [kda_recurrent, kda_chunk])
INPUTS = ("q", "k", "v", "g", "beta", "state")


def draw(lengths: tuple[int, ...], seed: int = 0, state: bool = True) -> dict[str, Tensor]:
    """Raw q and k of very different sizes, decays over the whole of (-5, 0)."""
    rng = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    sizes = torch.exp(normal(tokens, N, 1))
    start = normal(len(lengths), N, K, V) if state else torch.zeros(len(lengths), N, K, V)
    return {
        "q": normal(tokens, N, K) * sizes, "k": normal(tokens, N, K) / sizes, "v": normal(tokens, N, V),
        "g": -5 * torch.sigmoid(3 * normal(tokens, N, K)), "beta": torch.sigmoid(2 * normal(tokens, N)),
        "state": start,
    }  # fmt: skip


def fla_naive(
    x: dict[str, Tensor], lengths: tuple[int, ...], naive: Callable = naive_recurrent_kda, **options
) -> tuple:
    """A batch padded with zeros: k = beta = g = 0 leaves a state alone. fla scales q by K^-0.5 itself."""
    unit = {n: x[n] / torch.sqrt((x[n] ** 2).sum(-1, keepdim=True) + 1e-6) for n in "qk"}
    parts = ({**x, **unit}[n].split(lengths) for n in INPUTS[:5])
    padded = [pad_sequence(list(p), batch_first=True) for p in parts]
    out, state = naive(*padded, initial_state=x["state"], output_final_state=True, **options)
    return torch.cat([o[:length] for o, length in zip(out, lengths, strict=True)]), state


def ours(form: Callable, x: dict[str, Tensor], lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return form(*(x[n] for n in INPUTS[:5]), Packed.from_lengths(lengths), x["state"])


def gradients(run: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]], x: dict[str, Tensor]) -> dict[str, Tensor]:
    """d(random projection of output and final state) / d(each input)."""
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    rng = torch.Generator().manual_seed(1)
    out, state = run(leaves)
    loss = sum((t * torch.randn(t.shape, generator=rng)).sum() for t in (out, state))
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))  # type: ignore[arg-type]


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert torch.isfinite(actual).all()
    limit = tolerance * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=limit)


def assert_matches_fla(form: Callable, x: dict[str, Tensor], lengths: tuple[int, ...]) -> None:
    for actual, expected in zip(ours(form, x, lengths), fla_naive(x, lengths), strict=True):
        assert_near(actual, expected)
    expected = gradients(lambda leaves: fla_naive(leaves, lengths), x)
    actual = gradients(lambda leaves: ours(form, leaves, lengths), x)
    for name in INPUTS:
        assert_near(actual[name], expected[name])


@FORMS
@pytest.mark.parametrize("lengths", [BOUNDARY_LENGTHS, BOUNDARY_LENGTHS[::-1], (1,), (1, 1, 1), (16, 16), (70, 5)])
def test_outputs_states_and_gradients_match_fla(form, lengths):
    assert_matches_fla(form, draw(lengths), lengths)


@FORMS
def test_no_initial_state_is_a_zero_state(form):
    x = draw((5, 18), state=False)
    packed = Packed.from_lengths((5, 18))
    out, state = form(*(x[n] for n in INPUTS[:5]), packed)
    expected = fla_naive(x, (5, 18))
    assert_near(out, expected[0])
    assert_near(state, expected[1])


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_form_matches_flas_chunk_form(chunk_size):
    """fla's chunk form wants whole chunks; ours has its own chunk size, which must not show."""
    lengths = (32, 64)
    x = draw(lengths)
    expected = fla_naive(x, lengths, naive_chunk_kda, chunk_size=chunk_size)
    for actual, other in zip(ours(kda_chunk, x, lengths), expected, strict=True):
        assert_near(actual, other)


@FORMS
@pytest.mark.parametrize("case", ["strongest", "none", "by channel", "late", "early", "alternating"])
def test_extreme_decays_stay_finite_and_exact(form, case):
    """g = -5 for 70 tokens is e^-350 in all: exponentials of differences that aren't causal would overflow."""
    lengths = (70, 33)
    x = draw(lengths)
    token = torch.arange(sum(lengths))[:, None, None]
    channel = torch.arange(K)
    strong = {
        "strongest": torch.ones(1), "none": torch.zeros(1), "by channel": (channel % 2).float(),
        "late": (token % CHUNK >= CHUNK // 2).float(), "early": (token % CHUNK < CHUNK // 2).float(),
        "alternating": ((token + channel) % 2).float(),
    }  # fmt: skip
    x["g"] = (-5.0 * strong[case]).expand(sum(lengths), N, K).clone()
    assert_matches_fla(form, x, lengths)


@FORMS
@pytest.mark.parametrize("names", ["k", "q", "qk", "v"])
def test_zero_vectors_give_finite_outputs_and_gradients(form, names):
    """The eps sits inside the root, so a zero vector has a norm and a gradient."""
    lengths = (17, 3)
    x = draw(lengths)
    for name in names:
        x[name][::2] = 0.0
    assert_matches_fla(form, x, lengths)


@FORMS
@pytest.mark.parametrize("cut", [1, 7, 15, 16, 17, 32, 39])
def test_state_carried_over_a_cut_equals_the_uncut_sequence(form, cut):
    """Chunked prefill: values and, through the state, gradients."""
    x = draw((40,))

    def cut_run(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        first = {n: leaves[n][:cut] for n in INPUTS[:5]} | {"state": leaves["state"]}
        out1, state = ours(form, first, (cut,))
        second = {n: leaves[n][cut:] for n in INPUTS[:5]} | {"state": state}
        out2, state = ours(form, second, (40 - cut,))
        return torch.cat([out1, out2]), state

    for actual, expected in zip(cut_run(x), ours(form, x, (40,)), strict=True):
        assert_near(actual, expected)
    expected_grads = gradients(lambda leaves: ours(form, leaves, (40,)), x)
    for name, grad in gradients(cut_run, x).items():
        assert_near(grad, expected_grads[name])


@FORMS
def test_packed_sequences_do_not_see_each_other(form):
    """Values of one sequence, its state and its gradients don't depend on the neighbours, NaN included."""
    lengths = (16, 5, 20)
    x = draw(lengths)
    out, state = ours(form, x, lengths)
    alone = {n: x[n][16:21] for n in INPUTS[:5]} | {"state": x["state"][1:2]}
    poisoned = {n: t.clone() for n, t in x.items()}
    for n in INPUTS[:5]:
        poisoned[n][:16] = poisoned[n][21:] = torch.nan
    poisoned["state"][::2] = torch.nan
    packed_out, packed_state = ours(form, poisoned, lengths)
    for result in (ours(form, alone, (5,)), (packed_out[16:21], packed_state[1:2])):
        assert_near(result[0], out[16:21], 1e-6)
        assert_near(result[1], state[1:2], 1e-6)


def test_one_step_matches_fla_and_leaves_the_given_state_alone():
    x = draw((1, 1, 1, 1))
    before = x["state"].clone()
    out, state = kda_step(*(x[n] for n in INPUTS))
    expected_out, expected_state = fla_naive(x, (1, 1, 1, 1))
    assert_near(out, expected_out)
    assert_near(state, expected_state)
    assert torch.equal(x["state"], before)


def test_a_zero_beta_token_only_decays_the_state():
    """Padding rule: k = beta = g = 0 changes nothing at all."""
    x = draw((1,))
    x["beta"][:] = 0.0
    _, state = kda_step(*(x[n] for n in INPUTS))
    assert_near(state, x["g"].exp().unsqueeze(-1) * x["state"], 1e-6)
    x["g"][:] = 0.0
    assert torch.equal(kda_step(*(x[n] for n in INPUTS))[1], x["state"])


@FORMS
def test_bf16_inputs_are_computed_in_fp32(form):
    """The state and the recurrence stay fp32 whatever the activations are: same numbers as from their fp32 copies."""
    lengths = (20, 9)
    x = draw(lengths)
    low = {n: x[n].bfloat16() for n in "qkv"}
    out, state = ours(form, {**x, **low}, lengths)
    assert out.dtype == state.dtype == torch.float32
    expected = ours(form, {**x, **{n: t.float() for n, t in low.items()}}, lengths)
    assert torch.equal(out, expected[0])
    assert torch.equal(state, expected[1])


def test_gate_matches_flas_lower_bound_gate_and_its_gradients():
    rng = torch.Generator().manual_seed(2)
    f = torch.randn(11, N, K, generator=rng) * 3
    a_log = torch.rand(N, generator=rng) * 1.5
    dt_bias = torch.randn(N, K, generator=rng) - 1
    leaves = [t.requires_grad_() for t in (f, a_log, dt_bias)]
    actual = kda_gate(f, a_log, dt_bias, -5.0)
    expected = naive_kda_lowerbound_gate(f, a_log, dt_bias.flatten(), lower_bound=-5.0)
    assert_near(actual, expected, 1e-6)
    assert ((actual <= 0) & (actual >= -5)).all()
    weight = torch.randn(f.shape, generator=rng)
    for ours_, theirs in zip(
        *(torch.autograd.grad((g * weight).sum(), leaves) for g in (actual, expected)), strict=True
    ):
        assert_near(ours_, theirs)


def test_gate_is_fp32_for_bf16_input():
    gate = kda_gate(torch.ones(2, N, K, dtype=torch.bfloat16), torch.zeros(N), torch.full((N, K), 1e-3), -5.0)
    assert gate.dtype == torch.float32
    torch.testing.assert_close(gate, torch.full_like(gate, -5 / (1 + torch.exp(torch.tensor(-1.001)).item())))
