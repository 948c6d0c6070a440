import gc
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from miles_k3.adapters import store as store_module
from miles_k3.adapters.layout import adapter_layout, tensor_name
from miles_k3.adapters.store import BASE_SLOT, BASE_VERSION, AdapterStore
from miles_k3.adapters.update import make_update
from miles_k3.errors import AdapterError
from miles_k3.types import AdapterConfig

MAX_RANK = 8


@pytest.fixture
def store(config):
    return AdapterStore(config, max_rank=MAX_RANK, dtype=torch.float32)


def snapshot(slot):
    return {m: (p.a.clone(), p.b.clone()) for m, p in slot.factors.items()}, slot.version, slot.scaling, slot.config


def assert_same(slot, before):
    tensors, *rest = before
    assert rest == [slot.version, slot.scaling, slot.config]
    for module, (a, b) in tensors.items():
        assert torch.equal(slot.factors[module].a, a)
        assert torch.equal(slot.factors[module].b, b)


def assert_holds(slot, update, dtype=torch.float32):
    rank = update.config.rank
    assert slot.scaling == update.config.alpha / rank
    for module, (a, b) in slot.factors.items():
        assert torch.equal(a[..., :rank, :], update.tensors[tensor_name(module, "A")].to(dtype))
        assert torch.equal(b[..., :rank], update.tensors[tensor_name(module, "B")].to(dtype))
        assert not a[..., rank:, :].any()
        assert not b[..., rank:].any()


def addresses(store):
    return [(t.data_ptr(), t.shape) for slot in store.slots for pair in slot.factors.values() for t in pair]


def test_a_new_store_serves_the_base(store):
    assert store.current_version == BASE_VERSION
    assert store.slot_index_of(BASE_VERSION) == BASE_SLOT
    assert store.live_versions() == (BASE_VERSION,)
    assert store.idle_slot_free()
    assert store.acquire() == BASE_VERSION
    store.release(BASE_VERSION)


def test_swaps_alternate_and_addresses_stay(store, new_update):
    before, slots, layers = addresses(store), list(store.slots), [s.layers for s in store.slots]
    for version in range(6):
        update = new_update(version)
        store.load(update)
        assert store.current_version == version
        assert_holds(store.slots[store.slot_index_of(version)], update)
        expected = (BASE_VERSION, version - 1, version) if version else (BASE_VERSION, 0)
        assert store.live_versions() == expected
        assert len({store.slot_index_of(v) for v in expected}) == len(expected)
    assert addresses(store) == before
    assert all(a is b for a, b in zip(slots, store.slots, strict=True))
    assert all(a is s.layers for a, s in zip(layers, store.slots, strict=True))


def test_access_by_module_and_by_layer_is_the_same_memory(store, config, adapter):
    slot = store.slots[0]
    for t in adapter_layout(config, adapter).values():
        pair = slot.get(t.module)
        assert pair is slot.layers[t.layer][t.local_module]
        assert (
            tuple((pair.a if t.factor == "A" else pair.b).shape)
            == adapter_layout(config, replace(adapter, rank=MAX_RANK))[t.name].shape
        )
    with pytest.raises(KeyError):
        slot.get("language_model.model.layers.0.self_attn.q_proj")


def test_padding_is_zeroed_whatever_was_there(store, new_update):
    for slot in store.slots:
        for pair in slot.factors.values():
            for t in pair:
                t.fill_(float("nan"))
    full = new_update(0, adapter=AdapterConfig(rank=MAX_RANK, alpha=16.0))
    store.load(full)
    assert_holds(store.slots[store.slot_index_of(0)], full)
    store.load(new_update(1))
    small = new_update(2, adapter=AdapterConfig(rank=3, alpha=2.0))  # into the slot that held the full rank
    store.load(small)
    assert_holds(store.slots[store.slot_index_of(2)], small)


def test_float32_update_into_bfloat16_slots(config, new_update):
    store = AdapterStore(config, max_rank=MAX_RANK, dtype=torch.bfloat16)
    update = new_update(0)
    store.load(update)
    assert_holds(store.slots[0], update, torch.bfloat16)


def test_versions_count_up(store, new_update):
    store.load(new_update(40))  # a resumed run starts here
    for wrong in (40, 42, 39, 0):
        with pytest.raises(AdapterError, match="expected to be v41"):
            store.load(new_update(wrong))
    store.load(new_update(41))


def test_a_held_version_is_not_overwritten(store, new_update):
    for version in (0, 1):
        store.load(new_update(version))
    assert store.acquire(0) == 0
    assert store.acquire() == 1
    assert store.acquire(0) == 0
    before = [snapshot(s) for s in store.slots]
    assert not store.idle_slot_free()
    with pytest.raises(AdapterError, match=r"v2 has to wait.*v0 by 2, v1 by 1.*v1 stays"):
        store.load(new_update(2))
    store.release(0)
    assert not store.idle_slot_free()
    for slot, was in zip(store.slots, before, strict=True):
        assert_same(slot, was)
    store.release(0)
    assert store.idle_slot_free()  # users of the current version don't stand in the way
    store.load(new_update(2))
    assert store.live_versions() == (BASE_VERSION, 1, 2)
    with pytest.raises(AdapterError, match="v0 is not live; live are the base"):
        store.acquire(0)
    assert store.users(1) == 1


def test_the_current_version_is_never_overwritten_though_nobody_uses_it(store, new_update):
    for version in (0, 1):
        store.load(new_update(version))
    store.acquire(0)
    before = snapshot(store.slots[store.slot_index_of(1)])
    assert not store.idle_slot_free()
    with pytest.raises(AdapterError, match="v2 has to wait"):
        store.load(new_update(2))
    assert_same(store.slots[store.slot_index_of(1)], before)


def test_users_of_the_base_hold_no_slot(store, new_update):
    for version in range(3):
        store.acquire(BASE_VERSION)
        store.load(new_update(version))
    assert store.users(BASE_VERSION) == 3


def test_release_without_acquire(store, new_update):
    store.load(new_update(0))
    with pytest.raises(AdapterError, match="more often than acquired"):
        store.release(0)


def test_more_slots_keep_more_versions_and_the_oldest_goes_first(config, new_update):
    store = AdapterStore(config, max_rank=MAX_RANK, dtype=torch.float32, num_slots=3)
    for version in range(3):
        store.load(new_update(version))
    assert store.live_versions() == (BASE_VERSION, 0, 1, 2)
    store.acquire(0)
    store.load(new_update(3))
    assert store.live_versions() == (BASE_VERSION, 0, 2, 3)


def test_one_slot_is_refused(config):
    with pytest.raises(ValueError, match="at least 2"):
        AdapterStore(config, max_rank=4, dtype=torch.float32, num_slots=1)


@pytest.mark.parametrize("warm", [False, True])
def test_a_failure_at_any_tensor_changes_nothing(config, new_update, monkeypatch, warm):
    num_tensors = len(new_update(0).tensors)
    copy = store_module.copy_padded
    for fail_at in range(num_tensors):
        store = AdapterStore(config, max_rank=MAX_RANK, dtype=torch.float32)
        first = 2 if warm else 0
        for version in range(first):
            store.load(new_update(version))
        before = snapshot(store.slots[store.slot_index_of(1)]) if warm else None
        calls = 0

        def failing(target, source, rank_dim, fail_at=fail_at):
            nonlocal calls
            calls += 1
            if calls > fail_at:
                target.fill_(float("nan"))
                raise RuntimeError("out of memory")
            copy(target, source, rank_dim)

        monkeypatch.setattr(store_module, "copy_padded", failing)
        with pytest.raises(AdapterError, match=r"out of memory; (v1|the base without adapter) stays"):
            store.load(new_update(first))
        monkeypatch.setattr(store_module, "copy_padded", copy)
        assert store.current_version == first - 1
        assert store.live_versions() == ((BASE_VERSION, 1) if warm else (BASE_VERSION,))  # v0's slot was being filled
        if before is not None:
            assert_same(store.slots[store.slot_index_of(1)], before)
        good = new_update(first)
        store.load(good)
        assert_holds(store.slots[store.slot_index_of(first)], good)


def test_a_refused_update_touches_no_slot(store, new_update):
    for version in (0, 1):
        store.load(new_update(version))
    before = [snapshot(s) for s in store.slots]
    good = new_update(2)
    name = next(iter(good.tensors))
    faulty = [
        replace(good, sha256="0" * 64),
        replace(good, version=5),
        replace(good, tensors={n: t for n, t in good.tensors.items() if n != name}),
        new_update(2, adapter=AdapterConfig(rank=MAX_RANK + 1, alpha=1.0)),
    ]
    for update in faulty:
        with pytest.raises(AdapterError):
            store.load(update)
        for slot, was in zip(store.slots, before, strict=True):
            assert_same(slot, was)
        assert store.live_versions() == (BASE_VERSION, 0, 1)


def test_a_version_can_not_be_acquired_while_its_slot_is_filled(store, new_update, monkeypatch):
    for version in (0, 1):
        store.load(new_update(version))
    seen: list[str] = []
    copy = store_module.copy_padded

    def probing(target, source, rank_dim):
        if not seen:
            thread = threading.Thread(target=lambda: seen.append(try_acquire(store, 0)))
            thread.start()
            thread.join(10)
        copy(target, source, rank_dim)

    monkeypatch.setattr(store_module, "copy_padded", probing)
    store.load(new_update(2))
    assert seen == ["refused"]


def try_acquire(store, version):
    try:
        store.acquire(version)
    except AdapterError:
        return "refused"
    return "given"


def test_memory_stays_flat_over_fifty_syncs(config, new_update):
    big = replace(config, hidden_size=768, num_experts=48, moe_intermediate_size=256)
    store = AdapterStore(big, max_rank=MAX_RANK, dtype=torch.bfloat16)
    adapter = AdapterConfig(rank=MAX_RANK, alpha=16.0)
    layout = adapter_layout(big, adapter)
    tensors = {t.name: torch.full(t.shape, 0.5) for t in layout.values()}
    payload = sum(t.numel() * 4 for t in tensors.values())
    assert payload > 4 << 20

    def sync(version):
        store.load(make_update(version, adapter, tensors))

    for version in range(5):
        sync(version)
    gc.collect()
    before = resident_bytes()
    for version in range(5, 55):
        sync(version)
    assert resident_bytes() - before < 2 * payload


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("sizes", [(3, 900, 5, 700, 64), (3, 5), (900, 700)])
def test_large_and_small_tensors_are_all_copied(monkeypatch, sizes):
    monkeypatch.setattr(store_module, "LARGE", 64)
    sources = [torch.randn(n) for n in sizes]
    targets = [torch.full((n,), torch.nan) for n in sizes]
    store_module.copy_all_(targets, sources)
    assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))
