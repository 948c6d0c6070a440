from dataclasses import replace

import pytest
import torch

from miles_k3.adapters.transport.stream import Incoming, Outgoing, TensorSpec
from miles_k3.errors import TransportError


def test_a_bucket_below_a_tensors_size_splits_it(new_update):
    update = new_update(0)
    largest = max(t.nbytes for t in update.tensors.values())
    outgoing = Outgoing(update, largest // 3)
    incoming = Incoming(outgoing.manifest)
    slot = torch.empty(outgoing.manifest.slot_bytes, dtype=torch.uint8)
    for index in range(outgoing.manifest.num_buckets):
        outgoing.fill(index, slot)
        incoming.take(index, slot)
    found = incoming.finish()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in update.tensors.items())


def test_the_same_buckets_hold_many_tensors(new_update):
    update = new_update(0)
    assert Outgoing(update, 1 << 30).manifest.num_buckets == 1
    assert Outgoing(update, 1 << 30).manifest.slot_bytes == sum(t.nbytes for t in update.tensors.values())


def test_what_is_missing_is_said(new_update):
    outgoing = Outgoing(new_update(3), 1000)
    incoming = Incoming(outgoing.manifest)
    slot = torch.empty(1000, dtype=torch.uint8)
    outgoing.fill(0, slot)
    incoming.take(0, slot)
    with pytest.raises(TransportError, match=r"v3: bucket 2 of \d+ came where 1 was due"):
        incoming.take(2, slot)
    with pytest.raises(TransportError, match=r"v3: it ended after 1 of \d+ buckets"):
        incoming.finish()


def test_a_strange_announcement_is_refused(new_update):
    manifest = Outgoing(new_update(0), 1000).manifest
    with pytest.raises(TransportError, match="type 'float12'"):
        Incoming(replace(manifest, tensors=(TensorSpec(name="a", dtype="float12", shape=(1,)),)))
    with pytest.raises(TransportError, match="2 tensors of 1 names"):
        Incoming(replace(manifest, tensors=manifest.tensors[:1] * 2))
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        Outgoing(new_update(0), 0)
