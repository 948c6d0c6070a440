import gc
import weakref
from dataclasses import replace

import pytest
import torch

from miles_k3.adapters.store import AdapterStore
from miles_k3.adapters.transport import publish
from miles_k3.adapters.update import update_bytes
from miles_k3.errors import AdapterError, SyncError


class StoreEngine:
    """The adapter side of an engine, and nothing else of it."""

    def __init__(self, config):
        self.store = AdapterStore(config, max_rank=4, dtype=torch.float32)

    @property
    def adapter_version(self):
        return self.store.current_version

    def load_adapter(self, update):
        self.store.load(update)


class DroppingEngine(StoreEngine):
    def load_adapter(self, update):
        pass


class TornEngine(StoreEngine):
    def load_adapter(self, update):
        super().load_adapter(update)
        raise RuntimeError("lost a worker")


def test_a_hand_over_is_measured(config, new_update):
    engine = StoreEngine(config)
    for version in range(3):
        update = new_update(version)
        report = publish(update, engine)
        assert engine.adapter_version == report.version == version
        assert (report.num_tensors, report.payload_bytes) == (len(update.tensors), update_bytes(update))
        assert 0 < report.load_s < 10


def test_nothing_of_the_update_is_kept(config, new_update):
    engine = StoreEngine(config)
    update = new_update(0)
    watched = [weakref.ref(t) for t in update.tensors.values()]
    publish(update, engine)
    del update
    gc.collect()
    assert not any(ref() is not None for ref in watched)


def test_failure_keeps_the_old_version(config, new_update):
    engine = StoreEngine(config)
    publish(new_update(0), engine)
    with pytest.raises(AdapterError, match="sha256"):
        publish(replace(new_update(1), sha256="0" * 64), engine)
    assert engine.adapter_version == 0
    publish(new_update(1), engine)


def test_a_dropped_update_is_noticed(config, new_update):
    with pytest.raises(SyncError, match="v0 was sent, but the engine serves v-1"):
        publish(new_update(0), DroppingEngine(config))


def test_a_torn_load_is_noticed(config, new_update):
    with pytest.raises(SyncError, match="left the engine at v0 instead of v-1: lost a worker"):
        publish(new_update(0), TornEngine(config))
