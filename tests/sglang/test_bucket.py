"""What the ranks of an engine over two machines are sent, read by SGLang's own code."""

from __future__ import annotations

import torch
from helpers.tiny import tiny_adapter

from miles_k3.adapters.layout import adapter_layout
from miles_k3.adapters.update import make_update
from miles_k3.k3.config import K3Config
from miles_k3.rollout.sglang.bucket import serialized
from miles_k3.types import AdapterConfig

ADAPTER = AdapterConfig(rank=4, alpha=8.0)


def test_near_and_far_ranks_read_the_same_adapter(config: K3Config) -> None:
    """A far one gets the bytes: it deserializes them, with SGLang's guard against foreign classes, to tensors."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    update = make_update(0, ADAPTER, tiny_adapter(config, ADAPTER))
    layout = adapter_layout(config, ADAPTER)
    sent = serialized(update, layout, 4, here=2)
    assert sent[2] is sent[3], "a message holds the bytes once"
    size = sum(t.numel() for t in update.tensors.values()) * 2
    assert len(sent[0]) < size / 4, "a near one gets a handle"
    assert size < len(sent[3]) < 1.5 * size + 100_000
    for one in (sent[0], sent[3]):
        read = MultiprocessingSerializer.deserialize(one)
        bucket = FlattenedTensorBucket(flattened_tensor=read["flattened_tensor"], metadata=read["metadata"])
        tensors = dict(bucket.reconstruct_tensors())
        assert tensors.keys() == update.tensors.keys()
        assert all(torch.equal(t, update.tensors[name].to(torch.bfloat16)) for name, t in tensors.items())
