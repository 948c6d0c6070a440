import pytest
import torch

from miles_k3.adapters.canary import Answers, canary_limit, check_canary
from miles_k3.errors import SyncError

NUM, LENGTH = 7, 9


def logprobs(seed=0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return [-torch.rand(LENGTH, generator=generator) * 5 + shift for _ in range(NUM)]


def answers(trainer_shift=0.0, engine_shift=0.0):
    return Answers(trainer=logprobs(shift=trainer_shift), engine=logprobs(shift=engine_shift))


def test_limits():
    assert canary_limit("float32", None) == 1e-3
    assert canary_limit("bfloat16", None) == 0.1
    assert canary_limit("bfloat16", 0.2) == 0.2


def test_agreement_is_measured():
    pair = answers(engine_shift=0.001)
    pair.engine[2][5] += 0.062
    report = check_canary(pair, max_diff=0.01, version=4)
    assert (report.version, report.num_tokens) == (4, NUM * LENGTH)
    assert report.median_diff == pytest.approx(0.001, rel=1e-2)
    assert report.max_diff == pytest.approx(0.063, rel=1e-2)
    assert report.trainer_moved is None


def test_difference_above_the_limit():
    with pytest.raises(SyncError, match=r"adapter v4: trainer and engine differ by 0\.2 nats.*limit 0\.05"):
        check_canary(answers(engine_shift=0.2), max_diff=0.05, version=4)


@pytest.mark.parametrize("tied", [1, 3])
def test_router_ties_on_less_than_half_of_the_trajectories_are_forgiven(tied):
    pair = answers()
    for tensor in pair.engine[:tied]:
        tensor += 0.2
    assert check_canary(pair, max_diff=0.05, version=4).median_diff == 0.0


def test_a_fault_on_most_trajectories_is_not():
    pair = answers()
    for tensor in pair.engine[:4]:
        tensor += 0.2
    with pytest.raises(SyncError, match="differ by"):
        check_canary(pair, max_diff=0.05, version=4)


def test_differences_do_not_cancel():
    pair = answers()
    for tensor in pair.engine:
        tensor[::2] += 0.2
        tensor[1::2] -= 0.2
    with pytest.raises(SyncError, match="differ by"):
        check_canary(pair, max_diff=0.05, version=4)


@pytest.mark.parametrize("shift", [0.3, 0.01])
def test_an_engine_that_stood_still_is_caught_below_the_limit_too(shift):
    with pytest.raises(
        SyncError, match=rf"the trainer moved by {shift} .* since v3, the engine by 0: it still answers"
    ):
        check_canary(answers(trainer_shift=shift), max_diff=0.5, version=4, previous=answers())


def test_an_engine_that_followed():
    report = check_canary(answers(0.3, 0.304), max_diff=0.05, version=4, previous=answers(0.0, 0.004))
    assert report.trainer_moved == pytest.approx(0.3, rel=1e-3)
    assert report.engine_moved == pytest.approx(0.3, rel=1e-3)


def test_a_trainer_that_stood_still():
    still = answers(engine_shift=0.01)
    assert check_canary(still, max_diff=0.05, version=4, previous=still).engine_moved == 0.0


@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_non_finite_answers(side, value):
    pair = answers()
    getattr(pair, side)[3][3] = value
    with pytest.raises(SyncError, match=f"1 of {NUM * LENGTH} canary log-probabilities of the {side} are not finite"):
        check_canary(pair, max_diff=1e9, version=1)


@pytest.mark.parametrize(("trainer", "engine"), [((3,), (4,)), ((0,), (0,)), ((2, 2), (2, 2))])
def test_answers_of_other_shapes(trainer, engine):
    with pytest.raises(SyncError, match="expected the same"):
        check_canary(
            Answers(trainer=[torch.zeros(trainer)], engine=[torch.zeros(engine)]), max_diff=1.0, version=1
        )  # fmt: skip


def test_no_answers():
    with pytest.raises(SyncError, match="at least one"):
        check_canary(Answers(trainer=[], engine=[]), max_diff=1.0, version=1)
