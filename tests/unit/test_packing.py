"""The packed layout entry by entry, and how sequences are dealt into steps and micro-batches."""

import pytest
import torch
from batch_cases import batch_of, make_group, make_sample, swap

from miles_k3.errors import DataError
from miles_k3.packing import pack_lengths, split_groups
from miles_k3.types import Group, Prompt


def test_splitting_and_packing_by_hand():
    assert split_groups([10, 1, 9, 2], 2) == [[0, 1], [2, 3]]
    assert split_groups([9, 1, 1, 1], 2) == [[0, 3], [1, 2]], "as many groups in each, however long they are"
    assert split_groups([5, 5], 3) == [[0], [1]]
    assert split_groups([], 2) == []
    assert pack_lengths([3, 7, 5, 5], 10) == [[0, 1], [2, 3]]
    assert pack_lengths([4, 4, 4], 4) == [[0], [1], [2]]


def test_routes_are_padded_at_the_last_token_of_each_sequence():
    prompt = Prompt(id="p", text="", token_ids=(1, 2), answer="")
    routes = [torch.full((n, 3, 2), n, dtype=torch.int16) for n in (4, 2)]
    samples = (
        make_sample(prompt, 1.0, answer=(7, 8, 9), routed_experts=routes[0]),
        make_sample(prompt, 0.0, answer=(5,), routed_experts=routes[1]),
    )
    (micro,) = batch_of(Group(prompt=prompt, samples=samples)).mini_batches[0].micro_batches
    assert micro.routed_experts is not None
    assert micro.routed_experts.dtype is torch.int16
    assert micro.routed_experts.shape == (8, 3, 2)
    assert micro.routed_experts[:, 0, 0].tolist() == [4, 4, 4, 4, -1, 2, 2, -1]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "1 of 2 samples carry routed experts"),
        (torch.zeros(6, 3, 2, dtype=torch.int16), r"\[6, 3, 2\].*\[5, 3, 2\]"),
        (torch.zeros(5, 4, 2, dtype=torch.int16), r"\[5, 4, 2\].*\[5, 3, 2\]"),
        (torch.zeros(5, 3, 2, dtype=torch.int64), "torch.int64"),
    ],
)
def test_routes_that_do_not_fit_are_refused(routes, message):
    group = make_group([0.0, 1.0], routed_experts=torch.zeros(5, 3, 2, dtype=torch.int16))
    group = swap(group, 1, make_sample(group.prompt, 1.0, routed_experts=routes))
    with pytest.raises(DataError, match=message):
        batch_of(group)


def test_an_overlong_sequence_is_refused_with_its_length_and_the_knob():
    group = make_group([0.0, 1.0], answer=range(9))
    assert batch_of(group, micro_batch_tokens=12).ledger.trained == 2
    with pytest.raises(DataError, match=r"2 sequences of 12, 12 tokens .*trainer\.micro_batch_tokens 11; set it to 12"):
        batch_of(group, micro_batch_tokens=11)


def test_packed_layout_entry_by_entry():
    prompt = Prompt(id="p", text="", token_ids=(1, 2, 3), answer="")
    good = make_sample(prompt, 1.0, answer=(7, 8, 9), mask=(True, False, True), logprobs=(-0.1, -0.2, -0.3))
    bad = make_sample(prompt, 0.0, answer=(5,), logprobs=(-0.7,))
    batch = batch_of(Group(prompt=prompt, samples=(good, bad)), advantage="group_mean", temperature=0.8)
    (mini,) = batch.mini_batches
    (micro,) = mini.micro_batches
    assert micro.tokens.tolist() == [1, 2, 3, 7, 8, 9, 1, 2, 3, 5]
    assert micro.targets.tolist() == [2, 3, 7, 8, 9, 0, 2, 3, 5, 0]
    assert micro.cu_seqlens.tolist() == [0, 6, 10]
    assert micro.loss_mask.tolist() == [0, 0, 1, 0, 1, 0, 0, 0, 1, 0]
    assert micro.advantages.tolist() == [0, 0, 0.5, 0.5, 0.5, 0, 0, 0, -0.5, 0]
    expected = torch.tensor([0, 0, -0.1, -0.2, -0.3, 0, 0, 0, -0.7, 0])
    assert torch.equal(micro.rollout_logprobs, expected)
    assert micro.sequence_ids.tolist() == [0, 1]
    assert micro.routed_experts is None
    dtypes = [t.dtype for t in (micro.tokens, micro.targets, micro.cu_seqlens, micro.loss_mask, micro.advantages)]
    assert dtypes == [torch.int64, torch.int64, torch.int32, torch.float32, torch.float32]
    assert (mini.num_loss_tokens, mini.num_sequences, batch.temperature) == (3, 2, 0.8)


def test_updates_get_whole_groups_and_their_own_denominators():
    groups = [make_group([0.0, 1.0], name=str(g), answer=range(1, 3 + 3 * g)) for g in range(6)]
    batch = batch_of(*groups, updates_per_rollout=3)
    assert len(batch.mini_batches) == 3
    seen = []
    for mini in batch.mini_batches:
        ids = sorted(i for micro in mini.micro_batches for i in micro.sequence_ids.tolist())
        assert {i ^ 1 for i in ids} == set(ids), "both samples of a group share a mini-batch"
        assert mini.num_sequences == len(ids) == 4
        assert mini.num_loss_tokens == sum(int(micro.loss_mask.sum()) for micro in mini.micro_batches)
        seen += ids
    assert sorted(seen) == list(range(12))
