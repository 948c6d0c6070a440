"""AdapterSync and its canary: what both sides score, and when a difference stops the run."""

from types import SimpleNamespace

import pytest
import torch
from helpers.tiny import tiny_config

from miles_k3 import sync
from miles_k3.errors import SyncError
from miles_k3.recipe import load_recipe
from miles_k3.rollout.sglang.lending import Lending
from miles_k3.rollout.sglang.neighbour import NeighbourEngine
from miles_k3.rollout.tasks.registry import make_task
from miles_k3.tokenizer import load_tokenizer
from miles_k3.world import World

SENT = SimpleNamespace(version=1, payload_bytes=8, load_s=0.0)


class Side:
    """Scores each token by its id, and the sequences numbered in `off` lower by `by`."""

    def __init__(self, off=(), by=0.0):
        self.off, self.by = off, by

    def score(self, sequences):
        return [
            -torch.tensor(s[1:], dtype=torch.float32) / 256 - (self.by if i in self.off else 0.0)
            for i, s in enumerate(sequences)
        ]

    def export_adapter(self, experts=None):
        return None


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("tiny-cpu").recipe


@pytest.fixture(scope="module")
def tokenizer(recipe):
    return load_tokenizer(recipe.model.path)


def canary_of(recipe, tokenizer, task_section=None):
    task = make_task(task_section or recipe.task, tokenizer, seed=0)
    before = task.state_dict()
    canary = sync.make_canary(recipe, task, tokenizer, tokenizer.eos_token_id)
    assert task.state_dict() == before
    return canary


def test_canary_scores_right_answers_to_held_out_questions(recipe, tokenizer):
    canary = canary_of(recipe, tokenizer)
    assert canary == canary_of(recipe, tokenizer)
    assert len(canary.sequences) >= sync.MIN_TRAJECTORIES
    assert 64 <= sum(len(s) - start for s, start in zip(canary.sequences, canary.starts, strict=True)) < 64 + 12
    question, answer = (
        tokenizer.decode(part) for part in (canary.sequences[0][:-2], canary.sequences[0][canary.starts[0] :])
    )
    assert "arithmetic problem" in question
    assert answer.endswith("<|end_of_msg|>")


def test_canary_of_a_task_without_held_out_questions(recipe, tokenizer, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"prompt": "say {i}", "answer": "{i}"}}\n' for i in range(9)))
    section = recipe.task.model_copy(update={"name": f"jsonl:{path}", "params": {}})
    canary = canary_of(recipe, tokenizer, section)
    assert len(canary.sequences) >= sync.MIN_TRAJECTORIES


def run_sync(monkeypatch, recipe, tokenizer, trainer, engine):
    monkeypatch.setattr(sync, "publish", lambda update, engine: SENT)
    return sync.AdapterSync(recipe, canary_of(recipe, tokenizer), trainer, engine)()


def test_a_difference_on_a_few_sequences_is_a_router_tie(monkeypatch, recipe, tokenizer):
    metrics = run_sync(monkeypatch, recipe, tokenizer, Side(), Side(off=[0, 3], by=0.02))
    assert metrics["sync/canary_diff"] == 0.0


def test_a_difference_everywhere_stops_the_run(monkeypatch, recipe, tokenizer):
    with pytest.raises(SyncError, match=r"adapter v1: trainer and engine differ by 0\.02 nats"):
        run_sync(monkeypatch, recipe, tokenizer, Side(), Side(off=range(99), by=0.02))


def test_a_rank_without_an_engine_of_its_own_judges_nothing(monkeypatch, recipe, tokenizer):
    """Its shard is asked for; the numbers are those of the ranks that have an engine."""
    asked = []

    class Exporting(Side):
        def export_adapter(self, experts=None):
            asked.append(experts)

    class Two:
        def together(self, work):
            return work()

        def everywhere(self, work):
            return [{"sync/version": 0, "sync/bytes": 8, "sync/load_s": 1.0, "sync/canary_diff": 0.5}, work()]

    monkeypatch.setattr(sync, "publish", lambda update, engine: SENT)
    neighbour = NeighbourEngine(Lending(recipe, tiny_config(), World(rank=1, size=2)))
    canary = canary_of(recipe, tokenizer)
    told = sync.AdapterSync(recipe, canary, Exporting(), neighbour, Two(), range(4, 8))()  # type: ignore[arg-type]
    assert told["sync/canary_diff"] == 0.5
    assert asked == [range(4, 8)]
