"""Routed experts against a loop over tokens and experts, with LoRA terms and row masks; values and gradients.

Tolerance: fp32 sums over at most 64 products of values near 1 to 50; 1e-4 of the largest value.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from miles_k3.k3.ops.latent_moe import Dispatch, grouped_linear, grouped_linear_naive, latent_experts
from miles_k3.k3.ops.lora import ExpertLoraTerm

E, Z, I, R = 5, 12, 8, 3
situated = partial(latent_experts, situ_beta=4.0, situ_linear_beta=25.0)
ROUTES = {
    "mixed": [[0, 2], [2, 4], [4, 0], [2, 0], [0, 4], [4, 2], [1, 2]],
    "some experts empty": [[1, 3], [3, 1], [1, 3]],
    "all to one": [[3], [3], [3], [3]],
    "one token": [[4, 1]],
    "every expert": [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]],
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def base(tokens: int, top_k: int) -> dict[str, Tensor]:
    """Gates reach 8, ups 40: SiTU saturates."""
    return {
        "z": draw(tokens, Z, seed=1), "weights": draw(tokens, top_k, seed=2).sigmoid(),
        "w1": 4 * Z**-0.5 * draw(E, I, Z, seed=3), "w3": 12 * Z**-0.5 * draw(E, I, Z, seed=4),
        "w2": 0.3 * draw(E, Z, I, seed=5),
    }  # fmt: skip


def term(seed: int, rows: Tensor | None = None) -> ExpertLoraTerm:
    return ExpertLoraTerm(
        a1=draw(R, Z, seed=seed), b1=0.5 * draw(E, I, R, seed=seed + 1), a3=draw(R, Z, seed=seed + 2),
        b3=0.5 * draw(E, I, R, seed=seed + 3), a2=draw(E, R, I, seed=seed + 4), b2=0.1 * draw(Z, R, seed=seed + 5),
        scaling=0.5 + seed / 100, rows_T1=rows,
    )  # fmt: skip


def loop(x: dict[str, Tensor], experts: list[list[int]], terms: list[ExpertLoraTerm]) -> Tensor:
    """Spec 2.6 step 6 and 5.4, a token and an expert at a time."""
    out = []
    for t, chosen in enumerate(experts):
        live = [term for term in terms if term.rows_T1 is None or term.rows_T1[t].item()]
        total, z = torch.zeros(Z), x["z"][t]
        for k, e in enumerate(chosen):
            gate = x["w1"][e] @ z + sum(m.scaling * (m.b1[e] @ (m.a1 @ z)) for m in live)
            up = x["w3"][e] @ z + sum(m.scaling * (m.b3[e] @ (m.a3 @ z)) for m in live)
            h = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
            y = x["w2"][e] @ h + sum(m.scaling * (m.b2 @ (m.a2[e] @ h)) for m in live)
            total = total + x["weights"][t, k] * y
        out.append(total)
    return torch.stack(out)


def ours(x: dict[str, Tensor], experts: list[list[int]], terms: list[ExpertLoraTerm]) -> Tensor:
    w13 = torch.cat([x["w1"], x["w3"]], dim=1)
    return situated(x["z"], x["weights"], torch.tensor(experts), w13, x["w2"], lora=terms)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES.keys())
@pytest.mark.parametrize("adapters", [0, 1, 2])
def test_values_and_all_gradients_match_the_loop(routes, adapters):
    """Two adapters in one batch: rows of one, of the other, of both and of none."""
    masks = [(torch.arange(len(routes)) % 3 != m).float()[:, None] for m in range(2)]
    terms = [term(10), term(30)][:adapters] if adapters < 2 else [term(10, masks[0]), term(30, masks[1])]
    x = base(len(routes), len(routes[0]))
    factors = [f for m in terms for f in (m.a1, m.b1, m.a3, m.b3, m.a2, m.b2)]
    leaves = [t.requires_grad_() for t in (*x.values(), *factors)]
    actual, expected = ours(x, routes, terms), loop(x, routes, terms)
    assert_near(actual, expected)
    probe = draw(*expected.shape, seed=6)
    grads = [torch.autograd.grad((y * probe).sum(), leaves, allow_unused=True) for y in (actual, expected)]
    for got, want in zip(*grads, strict=True):
        assert got is not None
        assert_near(got, torch.zeros_like(got) if want is None else want)


def test_no_token_at_all():
    """An expert-parallel rank may get none."""
    x = base(0, 2)
    z = x["z"].requires_grad_()
    out = situated(z, x["weights"], torch.zeros(0, 2, dtype=torch.int64), torch.cat([x["w1"], x["w3"]], 1), x["w2"],
                   lora=[term(10)])  # fmt: skip
    assert out.shape == (0, Z)
    assert torch.autograd.grad(out.sum(), z)[0].shape == (0, Z)


def test_zero_b_factors_give_exactly_the_base():
    """A fresh adapter changes no bit."""
    x, routes = base(7, 2), ROUTES["mixed"]
    fresh = term(10)
    for factor in (fresh.b1, fresh.b3, fresh.b2):
        factor.zero_()
    assert torch.equal(ours(x, routes, [fresh]), ours(x, routes, []))


def test_a_masked_row_is_exactly_the_base():
    x, routes = base(7, 2), ROUTES["mixed"]
    mask = (torch.arange(7) < 3).float()[:, None]
    mixed, without, whole = (ours(x, routes, terms) for terms in ([term(10, mask)], [], [term(10)]))
    assert torch.equal(mixed[3:], without[3:])
    assert_near(mixed[:3], whole[:3])
    assert (mixed[:3] - without[:3]).abs().min() > 1e-3


def test_scaling_enters_once():
    """Doubling the scaling of a linear piece (w2's delta) doubles it."""
    x, routes = base(7, 2), ROUTES["mixed"]
    single = term(10)
    for factor in (single.b1, single.b3):
        factor.zero_()
    double = ExpertLoraTerm(**{n: getattr(single, n) for n in ("a1", "b1", "a3", "b3", "a2", "b2")},
                            scaling=2 * single.scaling)  # fmt: skip
    plain, once, twice = (ours(x, routes, terms) for terms in ([], [single], [double]))
    assert_near(twice - plain, 2 * (once - plain))


def test_unchosen_experts_are_never_read():
    """NaN in the weights of experts that no token chose."""
    x, routes = base(3, 2), ROUTES["some experts empty"]
    expected = ours(x, routes, [term(10)])
    poisoned = {n: t.clone() for n, t in x.items()}
    adapter = term(10)
    for tensor in (*(poisoned[n] for n in ("w1", "w2", "w3")), adapter.b1, adapter.b3, adapter.a2):
        tensor[[0, 2, 4]] = torch.nan
    assert torch.equal(ours(poisoned, routes, [adapter]), expected)


def test_bf16_sums_the_weighted_experts_in_fp32():
    """Each expert's output is rounded to bf16, weighted and summed in fp32, rounded once (spec 2.6 step 6)."""
    x = {n: t.bfloat16() for n, t in base(2, 5).items()}
    weights = base(2, 5)["weights"]
    routes = torch.tensor(ROUTES["every expert"])
    w13 = torch.cat([x["w1"], x["w3"]], dim=1)
    out = situated(x["z"], weights, routes, w13, x["w2"])
    single = [situated(x["z"], torch.ones(2, 1), routes[:, k : k + 1], w13, x["w2"]).float() for k in range(5)]
    expected = sum(weights[:, k, None] * single[k] for k in range(5))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), torch.as_tensor(expected), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [[3, 3, 7, 7, 9], [0, 0, 0, 0, 9], [9, 9, 9, 9, 9], [1, 2, 3, 4, 5]])
@pytest.mark.parametrize("widths", [(12, 8), (3, 16), (16, 3), (1, 1)])
def test_grouped_linear_matches_the_loop(dtype, ends, widths):
    """Widths below 16 bytes (a small LoRA rank) and empty segments, values and both gradients."""
    x = draw(ends[-1], widths[0], seed=1).to(dtype).requires_grad_()
    weight = draw(E, widths[1], widths[0], seed=2).to(dtype).requires_grad_()
    ends_E = torch.tensor(ends, dtype=torch.int32)
    outs = [form(x, weight, ends_E) for form in (grouped_linear, grouped_linear_naive)]
    close = partial(torch.testing.assert_close, rtol=(t := 2**-7 if dtype == torch.bfloat16 else 1e-5), atol=t)
    close(outs[0], outs[1])
    probe = draw(*outs[0].shape, seed=3).to(dtype)
    for fast, naive in zip(*(torch.autograd.grad((y * probe).sum(), (x, weight)) for y in outs), strict=True):
        close(fast, naive)


def test_dispatch_sorts_by_expert_and_back():
    experts = torch.tensor(ROUTES["mixed"])
    dispatch = Dispatch.of(experts, E)
    x = torch.arange(7.0)[:, None].expand(-1, 2)
    assert dispatch.ends_E.tolist() == [4, 5, 10, 10, 14]
    assert torch.equal(experts.flatten()[dispatch.order_M], experts.flatten().sort().values)
    assert torch.equal(dispatch.unsort(dispatch.sort(x)), x[:, None].expand(-1, 2, -1))
