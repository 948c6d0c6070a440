"""AdapterSync: which trajectories both sides score, and when a difference stops the run."""

from types import SimpleNamespace

import pytest
import torch

from miles_k3 import sync
from miles_k3.errors import SyncError
from miles_k3.k3.config import K3Config
from miles_k3.recipe import load_recipe

SENT = SimpleNamespace(version=1, payload_bytes=8, load_s=0.0)


class Side:
    """Scores a trajectory by its tokens, and the trajectories numbered in `off` lower by `by`."""

    def __init__(self, off=(), by=0.0):
        self.off, self.by, self.seen = off, by, []

    def score(self, sequences):
        (tokens,) = sequences
        self.seen.append(tuple(tokens))
        number = len(self.seen) - 1
        return [-torch.tensor(tokens[1:], dtype=torch.float32) / 256 - (self.by if number in self.off else 0.0)]

    def export_adapter(self):
        return None


@pytest.fixture
def build(monkeypatch):
    monkeypatch.setattr(sync, "publish", lambda update, engine: SENT)
    recipe = load_recipe("tiny-cpu").recipe
    config = K3Config.from_folder(recipe.model.path)
    return lambda trainer, engine: sync.AdapterSync(recipe, config, trainer, engine)


def test_one_trajectory_where_the_sides_agree(build):
    trainer, engine = Side(), Side()
    assert build(trainer, engine)()["sync/canary_diff"] == 0.0
    assert trainer.seen == engine.seen
    assert len(trainer.seen) == 1


@pytest.mark.parametrize("off", [[0], [0, 1], [0, 2]])
def test_a_difference_on_some_trajectories_is_a_router_tie(build, off):
    trainer, engine = Side(), Side(off=off, by=0.02)
    metrics = build(trainer, engine)()
    assert metrics["sync/canary_diff"] == pytest.approx(0.02, rel=1e-3)
    assert trainer.seen == engine.seen
    assert len(set(trainer.seen)) == 1 + sync.NUM_SPARE


def test_a_difference_on_every_trajectory_stops_the_run(build):
    with pytest.raises(SyncError, match=r"adapter v1: trainer and engine differ by 0\.02 nats"):
        build(Side(), Side(off=range(9), by=0.02))()
