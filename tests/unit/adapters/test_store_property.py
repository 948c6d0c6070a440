"""Any order of loads, acquires and releases, against a plain model of which versions are alive."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from miles_k3.adapters.store import BASE_VERSION, AdapterStore
from miles_k3.adapters.update import make_update
from miles_k3.errors import AdapterError
from miles_k3.types import AdapterConfig


def test_any_order_of_events(config, new_tensors):
    by_rank = {r: new_tensors(adapter=AdapterConfig(rank=r, alpha=1.0)) for r in (1, 3)}
    module = "language_model.model.layers.1.self_attn.o_proj"

    class Events(RuleBasedStateMachine):
        @initialize(num_slots=st.integers(2, 4))
        def start(self, num_slots):
            self.num_slots = num_slots
            self.store = AdapterStore(config, max_rank=3, dtype=torch.float32, num_slots=num_slots)
            self.live: list[int] = []  # oldest first; the last is the current one
            self.held: list[int] = []
            self.next = 0

        def update(self, rank, version):
            tensors = {n: torch.full_like(t, float(version)) for n, t in by_rank[rank].items()}
            return make_update(version, AdapterConfig(rank=rank, alpha=float(1 + version)), tensors)

        @rule(rank=st.sampled_from([1, 3]))
        def load(self, rank):
            free = [v for v in self.live[:-1] if v not in self.held]
            possible = len(self.live) < self.num_slots or bool(free)
            assert self.store.idle_slot_free() == possible
            if not possible:
                with pytest.raises(AdapterError, match="has to wait"):
                    self.store.load(self.update(rank, self.next))
                return
            self.store.load(self.update(rank, self.next))
            if len(self.live) == self.num_slots:
                self.live.remove(free[0])
            self.live.append(self.next)
            self.next += 1

        @rule(skew=st.sampled_from([-1, 1, 2]))
        def load_a_wrong_version(self, skew):
            if not self.live:
                return
            with pytest.raises(AdapterError):
                self.store.load(self.update(1, self.next + skew))

        @rule(data=st.data())
        def acquire(self, data):
            version = data.draw(st.sampled_from([BASE_VERSION, *range(self.next + 1)]))
            if version != BASE_VERSION and version not in self.live:
                with pytest.raises(AdapterError, match="is not live"):
                    self.store.acquire(version)
                return
            assert self.store.acquire(version) == version
            self.held.append(version)

        @rule()
        def acquire_the_newest(self):
            newest = self.live[-1] if self.live else BASE_VERSION
            assert self.store.acquire() == newest
            self.held.append(newest)

        @rule(data=st.data())
        def release(self, data):
            if self.held:
                version = data.draw(st.sampled_from(self.held))
                self.store.release(version)
                self.held.remove(version)

        @invariant()
        def slots_hold_what_they_say(self):
            assert self.store.live_versions() == (BASE_VERSION, *self.live)
            assert self.store.current_version == (self.live[-1] if self.live else BASE_VERSION)
            for version in self.live:
                slot = self.store.slots[self.store.slot_index_of(version)]
                assert slot.version == version
                assert slot.config is not None
                assert slot.scaling == (1 + version) / slot.config.rank
                a, b = slot.get(module)
                rank = slot.config.rank
                assert (a[:rank] == version).all()
                assert (b[:, :rank] == version).all()
                assert not a[rank:].any()
                assert not b[:, rank:].any()
            for version in set(self.held):
                assert self.store.users(version) == self.held.count(version)

    run_state_machine_as_test(
        Events,
        settings=settings(
            max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
