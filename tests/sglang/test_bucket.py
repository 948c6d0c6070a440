"""What the ranks of an engine are sent, read by SGLang's own code."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import tiny_adapter

from miles_k3.adapters.layout import adapter_layout
from miles_k3.adapters.transport.loan import Loan
from miles_k3.adapters.update import cut, make_update
from miles_k3.k3.config import K3Config
from miles_k3.rollout.sglang.bucket import payloads
from miles_k3.rollout.sglang.hooks.direct_swap import READABLE
from miles_k3.rollout.sglang.span import worker_experts
from miles_k3.types import AdapterConfig, LentAdapter

ADAPTER = AdapterConfig(rank=4, alpha=8.0)


def test_each_rank_reads_its_shard(config: K3Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a handle, with SGLang's guard against foreign classes; of two lenders, two readers each. One without our hook
    can read none."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.common import SafeUnpickler
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    update, layout = make_update(0, ADAPTER, tiny_adapter(config, ADAPTER)), adapter_layout(config, ADAPTER)
    experts = range(config.num_experts)
    half = len(experts) // 2
    loans = []
    for held in (experts[:half], experts[half:]):
        loans.append(Loan(cut(update, layout, held), held, readers=2, keep=True))
    lent = LentAdapter(version=0, config=ADAPTER, sha256=update.sha256, shards=tuple(loan.lent for loan in loans))
    messages, known = payloads(lent, layout, tp=4, ep=4), SafeUnpickler.ALLOWED_MODULE_PREFIXES
    with pytest.raises(RuntimeError, match=r"Blocked unsafe class loading \(miles_k3.*knows_shards"):
        MultiprocessingSerializer.deserialize(messages[0])
    monkeypatch.setattr(SafeUnpickler, "ALLOWED_MODULE_PREFIXES", {*known, READABLE})
    for worker, sent in enumerate(messages):
        assert len(sent) < 30_000, "a handle and a table"
        read = MultiprocessingSerializer.deserialize(sent)
        bucket = FlattenedTensorBucket(flattened_tensor=read["flattened_tensor"], metadata=read["metadata"])
        needed = worker_experts(worker, tp=4, ep=4, experts=experts)
        tensors = dict(bucket.reconstruct_tensors())
        assert tensors.keys() == update.tensors.keys()
        for name, tensor in tensors.items():
            whole = update.tensors[name].to(torch.bfloat16)
            own = whole[needed.start : needed.stop] if layout[name].per_expert else whole
            assert torch.equal(tensor, own), (worker, name)
