"""A lent adapter as each tensor-parallel rank of SGLang is sent it: a handle to memory of its host, and a table of it.

SGLang takes an adapter in one call and has no way to add to it, so a rank's shard is one flat bucket, however large.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from miles_k3.adapters.layout import AdapterTensor
from miles_k3.adapters.shard import all_experts, held_layout
from miles_k3.errors import AdapterError
from miles_k3.rollout.sglang.hooks.direct_swap import knows_shards
from miles_k3.rollout.sglang.span import worker_experts
from miles_k3.types import Handle, LentAdapter

LOAD_FORMAT = "flattened_bucket"


def payloads(lent: LentAdapter, layout: Mapping[str, AdapterTensor], *, tp: int, ep: int) -> list[bytes]:
    """What each of `tp` ranks of an engine is sent; `ep`: groups that its routed experts are split over.

    Raises AdapterError where the shards are not those that these ranks need.
    """
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    _refuse_misfit(lent, tp)
    each, found = tp // len(lent.shards), []
    for worker in range(tp):
        shard, needed = lent.shards[worker // each], worker_experts(worker, tp=tp, ep=ep, experts=all_experts(layout))
        metadata = [
            FlattenedTensorMetadata(
                name=name, shape=torch.Size(shape), dtype=torch.bfloat16, start_idx=start,
                end_idx=start + prod(shape) * torch.bfloat16.itemsize, numel=prod(shape) * torch.bfloat16.itemsize,
            )
            for name, shape, start in places(layout, shard.experts, needed)
        ]  # fmt: skip
        opened = _Opened(shard.once[worker % each])
        bucket = {"flattened_tensor": opened, "metadata": metadata, "needs": knows_shards}
        found.append(pickle.dumps(bucket, protocol=pickle.HIGHEST_PROTOCOL))
    return found


def places(
    layout: Mapping[str, AdapterTensor], held: range, needed: range
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(name, shape, first byte) of each tensor in a shard's flat memory; of the experts `held` those that are `needed`.

    Raises AdapterError where some of these are not held.
    """
    if needed and not (held.start <= needed.start and needed.stop <= held.stop):
        raise AdapterError(
            f"a shard of experts {held.start}-{held.stop - 1} came where {needed.start}-{needed.stop - 1} are needed: "
            "the ranks of the engine are in another order, or of another recipe"
        )
    at = 0
    for name, tensor in held_layout(layout, held).items():
        row, skipped = prod(tensor.shape[1:]) * torch.bfloat16.itemsize, 0
        shape = tensor.shape
        if tensor.per_expert:
            shape, skipped = (len(needed), *shape[1:]), needed.start - held.start
        yield name, shape, at + skipped * row
        at += tensor.shape[0] * row


def _refuse_misfit(lent: LentAdapter, tp: int) -> None:
    readers = sum(len(shard.once) for shard in lent.shards)
    if readers != tp or len({len(shard.once) for shard in lent.shards}) != 1:
        raise AdapterError(
            f"adapter v{lent.version} was lent by {len(lent.shards)} ranks to {readers} of SGLang's, which has {tp}"
        )


class _Opened:
    """Stands for the memory behind a handle: whoever unpickles it has opened that."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __reduce__(self) -> Any:
        return self._handle
