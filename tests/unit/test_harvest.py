"""A harvest shared by ranks is the harvest of one rank. The ranks are played one after the other."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_k3.batch import make_batch
from miles_k3.errors import DataError
from miles_k3.harvest import Share, held_out_quality, join_shares, sample_share
from miles_k3.recipe import load_recipe
from miles_k3.types import Completion, FinishReason, Grade, Prompt
from miles_k3.world import World

RECIPE = load_recipe("tiny-cpu", ["rollout.group_size=3", "eval.prompts=7"]).recipe
PROMPTS = [Prompt(id=f"p{i}", text=str(i), token_ids=(i, i + 1), answer=str(i)) for i in range(7)]


class Engine:
    """Answers are a function of prompt and seed."""

    def __init__(self) -> None:
        self.asked_for_routes: set[bool] = set()

    async def generate(self, token_ids, params, *, request_id=None) -> Completion:
        self.asked_for_routes.add(params.return_routed_experts)
        draw = random.Random(f"{token_ids} {params.seed} {params.temperature}")
        await asyncio.sleep(random.random() * 0.003)
        tokens = tuple(draw.choices(range(100), k=draw.randint(1, 5)))
        routes = torch.tensor([[[len(tokens)]]], dtype=torch.int16) if params.return_routed_experts else None
        return Completion(token_ids=tokens, logprobs=(-1.0,) * len(tokens), text=str(sum(tokens)),
                          finish_reason=FinishReason.STOP, adapter_version=0, routed_experts=routes)  # fmt: skip

    def abort(self, request_id: str) -> None:
        raise AssertionError(request_id)


class Grader:
    async def grade(self, prompt: Prompt, text: str) -> Grade:
        score = (int(text) + int(prompt.id[1:])) % 4
        return Grade(reward=0.0, failure="timeout: late") if score == 3 else Grade(reward=[0.0, 0.1, 1.0][score])


def parts_of(rank: int, size: int, engine: Engine | None = None) -> Any:
    return SimpleNamespace(
        world=World(rank=rank, size=size), engine=engine or Engine(), rewards=Grader(),
        model=SimpleNamespace(config=SimpleNamespace(eos_token_id=7)),
        task=SimpleNamespace(eval_prompts=lambda n: PROMPTS[:n]),
    )  # fmt: skip


def shares_of(size: int) -> list[Share]:
    made = [sample_share(RECIPE, parts_of(rank, size), PROMPTS, step=4) for rank in range(size)]
    return [pickle.loads(pickle.dumps(share)) for share in made]


@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_any_number_of_ranks_gets_the_same_harvest(size: int) -> None:
    def outcome(shares: list[Share]) -> Any:
        groups = join_shares(shares, PROMPTS, 3)
        assert [g.prompt for g in groups] == PROMPTS
        batch = make_batch(groups, RECIPE.algorithm, micro_batch_tokens=64, updates_per_rollout=1, temperature=1.0)
        samples = [(s.prompt.id, s.completion.token_ids, s.grade, s.loss_mask) for g in groups for s in g.samples]
        return samples, batch.metrics, batch.ledger

    assert outcome(shares_of(size)) == outcome(shares_of(1))


def test_ranks_that_read_other_data_are_found() -> None:
    shares = shares_of(3)
    shares[2] = dataclasses.replace(shares[2], prompts=("q0", *shares[2].prompts[1:]))
    with pytest.raises(DataError, match="rank 2 drew other prompts than rank 0"):
        join_shares(shares, PROMPTS, 3)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_an_evaluation_shared_by_ranks_is_that_of_one(size: int) -> None:
    pieces: list[Any] = []

    class Recording(World):
        """Keeps each rank's piece, and hands all of them to the last."""

        def everywhere(self, work):
            pieces.append(work())
            return pieces if self.rank == self.size - 1 else [pieces[-1]]

    result = None
    for rank in range(size):
        parts = parts_of(rank, size)
        parts.world = Recording(rank=rank, size=size)
        if rank == size - 1 or len(parts.world.share(7)):
            result = held_out_quality(RECIPE, parts)
        else:
            pieces.append([])
    assert result == held_out_quality(RECIPE, parts_of(0, 1))
    assert result is not None
    assert result.num_prompts == 7


@pytest.mark.parametrize("replay", [False, True])
def test_routes_are_asked_for_and_gathered_only_where_they_are_replayed(replay: bool) -> None:
    engine = Engine()
    algorithm = RECIPE.algorithm.model_copy(update={"routing_replay": replay})
    recipe = RECIPE.model_copy(update={"algorithm": algorithm})
    share = sample_share(recipe, parts_of(0, 1, engine), PROMPTS, step=1)
    assert engine.asked_for_routes == {replay}
    (group, *_) = join_shares([pickle.loads(pickle.dumps(share))], PROMPTS, 3)
    for sample in group.samples:
        routes = sample.completion.routed_experts
        assert (routes is not None) == replay
        if routes is not None:
            assert routes.tolist() == [[[len(sample.completion.token_ids)]]]
