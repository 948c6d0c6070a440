"""Any tensors in any buckets arrive as they were, in memory of their own; any fault on the way is noticed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miles_k3.adapters.transport.stream import BUCKETS_ALIVE, Incoming, Outgoing
from miles_k3.adapters.update import make_update
from miles_k3.errors import TransportError
from miles_k3.types import AdapterConfig, AdapterUpdate

CONFIG = AdapterConfig(rank=2, alpha=4.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def updates(draw: st.DrawFn) -> AdapterUpdate:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors = {}
    for index, (shape, dtype) in enumerate(draw(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6))):
        values = torch.randint(-100, 100, shape, generator=generator).to(dtype)
        turned = draw(st.booleans())  # a transposed tensor is made contiguous by make_update
        tensors[f"layers.{index}"] = values.T if turned and values.ndim == 2 else values
    return make_update(draw(st.integers(0, 9)), CONFIG, tensors)


def moved(outgoing: Outgoing, incoming: Incoming, order: list[int], damage: int | None = None) -> AdapterUpdate:
    """The buckets `order` through two slots that are overwritten at once, byte `damage` of the stream changed."""
    manifest = outgoing.manifest
    slots = [torch.zeros(manifest.slot_bytes, dtype=torch.uint8) for _ in range(BUCKETS_ALIVE)]
    for index in order:
        slot = slots[index % BUCKETS_ALIVE]
        outgoing.fill(index, slot)
        if damage is not None and damage // manifest.bucket_bytes == index:
            slot[damage % manifest.bucket_bytes] ^= 1
        incoming.take(index, slot)
        slot.fill_(0xAA)
    return incoming.finish()


@settings(deadline=None, max_examples=150)
@given(update=updates(), bucket_bytes=st.integers(1, 64))
def test_any_tensors_arrive_in_buckets_of_any_size(update: AdapterUpdate, bucket_bytes: int) -> None:
    outgoing = Outgoing(update, bucket_bytes)
    found = moved(outgoing, Incoming(outgoing.manifest), list(range(outgoing.manifest.num_buckets)))
    assert (found.version, found.config, found.sha256) == (update.version, update.config, update.sha256)
    assert list(found.tensors) == list(update.tensors)
    for name, tensor in update.tensors.items():
        got = found.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got, tensor)
        assert got.untyped_storage().nbytes() == got.nbytes, "it owns its memory"
    assert len({t.data_ptr() for t in found.tensors.values() if t.numel()}) == sum(
        1 for t in found.tensors.values() if t.numel()
    )


@settings(deadline=None, max_examples=150)
@given(update=updates(), bucket_bytes=st.integers(1, 24), data=st.data())
def test_any_fault_on_the_way_is_noticed(update: AdapterUpdate, bucket_bytes: int, data: st.DataObject) -> None:
    outgoing = Outgoing(update, bucket_bytes)
    manifest = outgoing.manifest
    assume(manifest.num_buckets)
    order = list(range(manifest.num_buckets))
    at = data.draw(st.integers(0, manifest.num_buckets - 1))
    fault = data.draw(st.sampled_from(["drop", "double", "reorder", "damage", "another version"]))
    damage = None
    if fault == "drop":
        order.pop(at)
    elif fault == "double":
        order.insert(at, order[at])
    elif fault == "reorder":
        assume(at + 1 < len(order))
        order[at], order[at + 1] = order[at + 1], order[at]
    elif fault == "damage":
        damage = data.draw(st.integers(0, manifest.total_bytes - 1))
    else:
        object.__setattr__(manifest, "version", manifest.version + 1)
    with pytest.raises(TransportError):
        moved(outgoing, Incoming(manifest), order, damage)
