"""Whatever is harvested: each sample is trained once or counted once, and packing keeps its promises."""

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_k3.batch import group_advantages, make_batch
from miles_k3.config import AlgorithmSection
from miles_k3.packing import pack_lengths, split_groups
from miles_k3.types import Completion, FinishReason, Grade, Group, Prompt, Sample

LIMIT = 24
KINDS = st.sampled_from(["grpo", "group_mean", "rloo", "none"])
REWARDS = st.one_of(st.sampled_from([0.0, 0.35, 1.0]), st.floats(-10, 10))


@st.composite
def samples(draw, prompt):
    answer = tuple(draw(st.lists(st.integers(0, 99), max_size=LIMIT - len(prompt.token_ids))))
    finite = st.floats(-20, 0, width=32)
    completion = Completion(
        token_ids=answer,
        logprobs=tuple(
            draw(st.one_of(finite, st.just(math.nan)) if draw(st.integers(0, 9)) == 0 else finite) for _ in answer
        ),
        text="",
        finish_reason=draw(st.sampled_from([*FinishReason, FinishReason.STOP, FinishReason.STOP])),
        adapter_version=draw(st.integers(0, 3)),
    )
    mask = tuple(draw(st.booleans()) for _ in answer)
    failure = draw(st.sampled_from([None, None, "timeout"]))
    grade = Grade(reward=0.0 if failure else draw(REWARDS), failure=failure)
    return Sample(prompt=prompt, completion=completion, grade=grade, loss_mask=mask)


@st.composite
def harvests(draw):
    groups = []
    for g in range(draw(st.integers(0, 5))):
        ids = tuple(draw(st.lists(st.integers(100, 199), min_size=1, max_size=6)))
        prompt = Prompt(id=str(g), text="", token_ids=ids, answer="")
        groups.append(Group(prompt=prompt, samples=tuple(draw(st.lists(samples(prompt), min_size=2, max_size=5)))))
    return groups


@settings(deadline=None, max_examples=150)
@given(harvests(), KINDS, st.booleans(), st.booleans(), st.integers(1, 4))
def test_each_sample_is_trained_once_or_counted_once(groups, kind, drop_equal, mask_truncated, updates):
    algorithm = AlgorithmSection(advantage=kind, drop_equal_groups=drop_equal, mask_truncated=mask_truncated)

    def run():
        return make_batch(groups, algorithm, micro_batch_tokens=LIMIT, updates_per_rollout=updates, temperature=1.0)

    batch = run()
    flat = [sample for group in groups for sample in group.samples]
    group_of = [g for g, group in enumerate(groups) for _ in group.samples]
    trained, homes = [], {}
    assert len(batch.mini_batches) <= updates
    for m, mini in enumerate(batch.mini_batches):
        assert mini.micro_batches
        assert mini.num_loss_tokens == sum(int(micro.loss_mask.sum()) for micro in mini.micro_batches)
        assert mini.num_sequences == sum(len(micro.sequence_ids) for micro in mini.micro_batches)
        for micro in mini.micro_batches:
            check_micro_batch(micro, flat)
            trained += micro.sequence_ids.tolist()
            for index in micro.sequence_ids.tolist():
                assert homes.setdefault(group_of[index], m) == m, "a group is spread over two optimizer steps"
    assert len(set(trained)) == len(trained) == batch.ledger.trained
    assert batch.ledger.generated == len(flat) == len(trained) + sum(batch.ledger.dropped.values())
    assert all(math.isfinite(value) for value in batch.metrics.values())
    again = run()
    assert [m.sequence_ids.tolist() for mini in again.mini_batches for m in mini.micro_batches] == [
        m.sequence_ids.tolist() for mini in batch.mini_batches for m in mini.micro_batches
    ]


def check_micro_batch(micro, flat):
    """Unpack it again and compare with the samples it was made of."""
    assert len(micro.tokens) == micro.cu_seqlens[-1] <= LIMIT
    assert micro.advantages.isfinite().all()
    assert micro.rollout_logprobs[micro.loss_mask > 0].isfinite().all()
    ends = micro.cu_seqlens.tolist()
    for index, begin, end in zip(micro.sequence_ids.tolist(), ends, ends[1:], strict=False):
        sample = flat[index]
        ids = [*sample.prompt.token_ids, *sample.completion.token_ids]
        assert micro.tokens[begin:end].tolist() == ids
        assert micro.targets[begin:end].tolist() == [*ids[1:], 0]
        predicted = len(sample.prompt.token_ids) - 1
        mask = micro.loss_mask[begin:end]
        assert not mask[:predicted].any()
        assert mask[predicted:-1].tolist() == [float(m) for m in sample.loss_mask]
        assert mask[-1] == 0
        logprobs = torch.tensor(sample.completion.logprobs, dtype=torch.float32)
        assert torch.equal(
            micro.rollout_logprobs[begin + predicted : end - 1][mask[predicted:-1] > 0],
            logprobs[mask[predicted:-1] > 0],
        )


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 120))
def test_packing_covers_everything_within_the_limit(lengths, limit):
    packs = pack_lengths(lengths, limit)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in pack) for pack in packs]
    assert all(0 < total <= limit for total in sums)
    # First fit never leaves two bins that would go into one, so all but one are more than half full.
    assert sum(total * 2 <= limit for total in sums) <= 1


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 9))
def test_splitting_deals_whole_groups_evenly(sizes, parts):
    split = split_groups(sizes, parts)
    assert sorted(i for part in split for i in part) == list(range(len(sizes)))
    assert len(split) == min(parts, len(sizes))
    if split:
        assert max(map(len, split)) - min(map(len, split)) <= 1


@given(st.lists(REWARDS, min_size=2, max_size=16), KINDS)
def test_advantages_keep_order_size_and_zero(rewards, kind):
    advantages = group_advantages(rewards, kind)
    assert len(advantages) == len(rewards)
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    assert all(advantages[a] <= advantages[b] for a, b in pairwise(order))
    if kind != "none":
        assert abs(math.fsum(advantages)) <= 1e-9
        assert (len(set(rewards)) > 1) or set(advantages) == {0.0}
    if kind == "grpo":
        assert max(map(abs, advantages)) <= (len(rewards) - 1) / math.sqrt(len(rewards)) + 1e-9
