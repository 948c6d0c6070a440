"""The policy loss against its formula as a loop, against finite differences, and against itself in pieces."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from loss_cases import counts, gradient, loss_of, make_case

from miles_k3.config import AlgorithmSection
from miles_k3.trainer.loss import (
    bounded_exp,
    finalize_metrics,
    k3,
    merge_sums,
)


def brute_force_loss(case, a: AlgorithmSection) -> float:
    """The documented formula, token by token in Python floats."""
    rows = {name: values.tolist() for name, values in case.items()}
    per_sequence = []
    for begin, end in pairwise(rows["cu_seqlens"]):
        terms = []
        for t in range(begin, end):
            if not rows["loss_mask"][t]:
                continue
            new, old, advantage = rows["logprobs"][t], rows["old_logprobs"][t], rows["advantages"][t]
            ratio = math.exp(new - old)
            gain = min(ratio * advantage, min(max(ratio, 1 - a.clip_low), 1 + a.clip_high) * advantage)
            if a.dual_clip is not None and advantage < 0:
                gain = max(gain, a.dual_clip * advantage)
            if a.importance_cap is not None:
                gain *= min(math.exp(old - rows["rollout_logprobs"][t]), a.importance_cap)
            q_over_p = math.exp(rows["ref_logprobs"][t] - new)
            kl = ratio * (q_over_p - math.log(q_over_p) - 1)
            terms.append(-gain + a.kl_coef * kl - a.entropy_coef * rows["entropy"][t])
        per_sequence += [terms] if terms else []
    if a.loss_normalization == "token":
        return sum(map(sum, per_sequence)) / sum(map(len, per_sequence))
    return sum(sum(terms) / len(terms) for terms in per_sequence) / len(per_sequence)


VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sequence": {"loss_normalization": "sequence"},
    "clip_higher": {"clip_low": 0.1, "clip_high": 0.6, "importance_cap": None},
    "dual_clip": {"dual_clip": 1.2},
    "kl": {"kl_coef": 0.3, "importance_cap": None},
    "entropy": {"entropy_coef": 0.2},
    "all": {
        "loss_normalization": "sequence",
        "clip_low": 0.15,
        "dual_clip": 1.5,
        "kl_coef": 0.3,
        "entropy_coef": 0.1,
        "importance_cap": 1.1,
    },
}


@pytest.mark.parametrize("knobs", VARIANTS.values(), ids=VARIANTS)
def test_loss_equals_the_formula_written_as_a_loop(knobs):
    algorithm = AlgorithmSection(**knobs)
    for seed in range(5):
        case = make_case(seed)
        assert loss_of(case, algorithm).loss.item() == pytest.approx(brute_force_loss(case, algorithm), rel=1e-12)
        single = {name: v.float() if v.dtype == torch.float64 else v for name, v in case.items()}
        assert loss_of(single, algorithm).loss.item() == pytest.approx(
            brute_force_loss(case, algorithm), rel=2e-5, abs=1e-6
        )


@pytest.mark.parametrize("knobs", VARIANTS.values(), ids=VARIANTS)
def test_gradients_are_those_of_finite_differences(knobs):
    case = make_case(3)

    def total(logprobs, entropy):
        return loss_of(case, AlgorithmSection(**knobs), logprobs=logprobs, entropy=entropy).loss

    inputs = [case[name].clone().requires_grad_() for name in ("logprobs", "entropy")]
    # The importance weight depends on old and rollout only, so finite differences in logprobs see it as a constant.
    assert torch.autograd.gradcheck(total, inputs)


@pytest.mark.parametrize("knobs", VARIANTS.values(), ids=VARIANTS)
def test_only_logprobs_and_entropy_get_gradients(knobs):
    case = make_case(4)
    leaves = {name: v.clone().requires_grad_() for name, v in case.items() if v.dtype == torch.float64}
    loss_of({**case, **leaves}, AlgorithmSection(**{**knobs, "kl_coef": 0.1, "entropy_coef": 0.1})).loss.backward()
    with_gradient = {name for name, leaf in leaves.items() if leaf.grad is not None and leaf.grad.any()}
    assert with_gradient == {"logprobs", "entropy"}


def test_kl_term_has_the_gradient_of_the_kl_to_the_base():
    """Over a whole small vocabulary the expectation can be summed up: exact KL, no sampling noise."""
    generator = torch.Generator().manual_seed(1)
    old_V, ref_V = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    logits_V = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    logp_V = logits_V.log_softmax(-1)
    (expected,) = torch.autograd.grad((logp_V.exp() * (logp_V - ref_V)).sum(), logits_V, retain_graph=True)
    # Each token once, with the advantage term off, weighted by how often the old policy samples it.
    frequency_V = old_V.exp()
    total = logp_V.new_zeros(())
    for token in range(6):
        one = slice(token, token + 1)
        case = {
            "logprobs": logp_V[one],
            "old_logprobs": old_V[one],
            "rollout_logprobs": old_V[one],
            "ref_logprobs": ref_V[one],
            "advantages": torch.zeros(1),
            "loss_mask": torch.ones(1),
            "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32),
        }
        total = total + frequency_V[token] * loss_of(case, AlgorithmSection(kl_coef=1.0)).loss
    (actual,) = torch.autograd.grad(total, logits_V, retain_graph=True)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(total, (logp_V.exp() * (logp_V - ref_V)).sum(), rtol=1e-10, atol=0)


def test_logged_kl_is_an_independent_kl_and_unharmed_by_backward():
    case = make_case(2)
    case["logprobs"].requires_grad_()
    out = loss_of(case, AlgorithmSection(kl_coef=0.5))
    out.loss.backward()
    inside = case["loss_mask"] > 0
    difference = (case["ref_logprobs"] - case["logprobs"].detach())[inside]
    expected = (difference.exp() - 1 - difference).mean().item()
    assert finalize_metrics([out.sums])["kl_base"] == pytest.approx(expected, rel=1e-12)
    without = finalize_metrics([loss_of(case, AlgorithmSection()).sums])
    assert without["kl_base"] == pytest.approx(expected, rel=1e-12), "a coefficient of 0 still logs it"


def split_case(case, cut):
    """Sequences before and from `cut` as two micro-batches."""
    at = int(case["cu_seqlens"][cut])
    first = {name: v[:at] for name, v in case.items()} | {"cu_seqlens": case["cu_seqlens"][: cut + 1]}
    second = {name: v[at:] for name, v in case.items()} | {"cu_seqlens": case["cu_seqlens"][cut:] - at}
    return first, second


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("knobs", VARIANTS.values(), ids=VARIANTS)
def test_micro_batches_add_up_to_one_big_batch(knobs, cut):
    case, algorithm = make_case(5), AlgorithmSection(**knobs)
    whole = case["logprobs"].clone().requires_grad_()
    out = loss_of(case, algorithm, logprobs=whole)
    out.loss.backward()
    pieces = case["logprobs"].clone().requires_grad_()
    outs = [loss_of(part, algorithm, **counts(case)) for part in split_case({**case, "logprobs": pieces}, cut)]
    for part in outs:
        part.loss.backward()
    torch.testing.assert_close(outs[0].loss + outs[1].loss, out.loss, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(gradient(pieces), gradient(whole), rtol=1e-12, atol=1e-15)
    together, apart = finalize_metrics([out.sums]), finalize_metrics([part.sums for part in outs])
    assert apart == pytest.approx(together, rel=1e-12)
    assert finalize_metrics([merge_sums([part.sums for part in outs])]) == pytest.approx(together, rel=1e-12)


def test_means_weigh_tokens_and_maxima_stay_maxima():
    scalar = torch.tensor
    parts = [
        {"tokens": scalar(1.0), "x_sum": scalar(5.0), "x_max": scalar(5.0)},
        {"tokens": scalar(9.0), "x_sum": scalar(9.0), "x_max": scalar(1.5)},
    ]
    assert finalize_metrics(parts) == {"tokens": 10.0, "x": pytest.approx(1.4), "x_max": 5.0}
    assert finalize_metrics([]) == {}
    with pytest.raises(ValueError, match="y_sum"):
        merge_sums([parts[0], {**parts[1], "y_sum": scalar(0.0)}])


def test_metrics_are_what_they_say():
    case, algorithm = make_case(6), AlgorithmSection(importance_cap=1.2, dual_clip=1.5)
    metrics = finalize_metrics([loss_of(case, algorithm).sums])
    inside = case["loss_mask"] > 0
    new, old, rollout, advantages = (
        case[name][inside] for name in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    )
    ratio, weight = (new - old).exp(), (old - rollout).exp()
    expected = {
        "tokens": inside.sum(),
        "sequences": 3,
        "ratio": ratio.mean(),
        "clip_low_fraction": ((ratio < 0.8) & (advantages < 0)).double().mean(),
        "clip_high_fraction": ((ratio > 1.28) & (advantages > 0)).double().mean(),
        "dual_clip_fraction": ((ratio > 1.5) & (advantages < 0)).double().mean(),
        "kl_update": (ratio - 1 - (new - old)).mean(),
        "mismatch_abs": (old - rollout).abs().mean(),
        "mismatch_abs_max": (old - rollout).abs().max(),
        "mismatch_kl": (weight - 1 - (old - rollout)).mean(),
        "importance_weight": weight.clamp(max=1.2).mean(),
        "importance_over_cap_fraction": (weight > 1.2).double().mean(),
        "kl_base": ((case["ref_logprobs"][inside] - new).expm1() - (case["ref_logprobs"][inside] - new)).mean(),
        "entropy": case["entropy"][inside].mean(),
    }
    assert metrics == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-10)
    assert metrics["importance_over_cap_fraction"] > 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_tokens_may_hold_anything(poison):
    algorithm = AlgorithmSection(**VARIANTS["all"])
    case = make_case(1)
    clean = case["logprobs"].clone().requires_grad_()
    expected = loss_of(case, algorithm, logprobs=clean)
    expected.loss.backward()
    outside = case["loss_mask"] == 0
    poisoned = {name: v.masked_fill(outside, poison) if v.dtype == torch.float64 else v for name, v in case.items()}
    poisoned["logprobs"].requires_grad_()
    out = loss_of(poisoned, algorithm)
    out.loss.backward()
    assert torch.equal(out.loss, expected.loss)
    assert torch.equal(gradient(poisoned["logprobs"]), gradient(clean))
    assert finalize_metrics([out.sums]) == finalize_metrics([expected.sums])


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_fully_masked_batch_is_exactly_zero_with_a_graph(normalization):
    case = make_case(1)
    case["loss_mask"].zero_()
    logprobs = torch.full_like(case["logprobs"], math.nan).requires_grad_()
    knobs = {**VARIANTS["all"], "loss_normalization": normalization}
    out = loss_of(case, AlgorithmSection(**knobs), logprobs=logprobs)
    assert out.loss.item() == 0.0
    out.loss.backward()
    assert torch.equal(gradient(logprobs), torch.zeros_like(logprobs))
    assert finalize_metrics([out.sums]) == {"tokens": 0.0, "sequences": 0.0}


@pytest.mark.parametrize("shift", [1e4, -1e4, 90.0, -90.0])
@pytest.mark.parametrize("which", ["logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs"])
def test_overflowing_log_ratios_stay_finite(which, shift):
    case = make_case(1, dtype=torch.float32)
    case[which] = case[which] + shift
    case["logprobs"].requires_grad_()
    out = loss_of(case, AlgorithmSection(**VARIANTS["all"]))
    out.loss.backward()
    assert out.loss.isfinite()
    assert gradient(case["logprobs"]).isfinite().all()
    assert all(math.isfinite(value) for value in finalize_metrics([out.sums]).values())


def test_k3_beyond_the_bound_goes_on_as_its_tangent():
    far = torch.tensor([19.9, 25.0, 1e4], dtype=torch.float64, requires_grad=True)
    k3(far).sum().backward()
    assert (gradient(far) > 0).all(), "the pull towards the base must not turn round"
    assert torch.autograd.gradcheck(
        k3, torch.tensor([-40.0, -1.0, 0.0, 3.0, 21.0], dtype=torch.float64).requires_grad_()
    )
    assert bounded_exp(torch.tensor([1e4, -1e4])).isfinite().all()


def test_truncated_answers_do_not_dilute_the_loss():
    """Masked in the numerator, masked in the denominator: the loss is that of the batch without them."""
    case = make_case(9)
    masked = {**case, "loss_mask": case["loss_mask"].clone()}
    at = int(case["cu_seqlens"][3])
    masked["loss_mask"][at:] = 0.0
    without, _ = split_case(case, 3)
    for normalization in ("token", "sequence"):
        algorithm = AlgorithmSection(loss_normalization=normalization)
        torch.testing.assert_close(
            loss_of(masked, algorithm).loss, loss_of(without, algorithm).loss, rtol=1e-12, atol=0
        )


def test_padding_behind_the_last_sequence_changes_nothing():
    case, algorithm = make_case(9), AlgorithmSection(**VARIANTS["all"])
    padded = {n: v if n == "cu_seqlens" else torch.cat([v, v.new_zeros(5)]) for n, v in case.items()}
    torch.testing.assert_close(loss_of(padded, algorithm).loss, loss_of(case, algorithm).loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("knob", "missing"), [("kl_coef", "ref_logprobs"), ("entropy_coef", "entropy")])
def test_a_term_without_its_input_is_refused(knob, missing):
    case, knobs = make_case(0), AlgorithmSection.model_validate({knob: 0.1})
    del case[missing]
    with pytest.raises(ValueError, match=missing):
        loss_of(case, knobs)
