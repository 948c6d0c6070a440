"""An adapter as one flat tensor for SGLang: one handle to pass on, of GPU memory or of memory that processes share.

SGLang takes a whole adapter in one call and has no way to add to it, so there is one bucket, however large.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch

from miles_k3.adapters.layout import AdapterTensor
from miles_k3.types import AdapterUpdate

LOAD_FORMAT = "flattened_bucket"


def flat_adapter(update: AdapterUpdate, layout: Mapping[str, AdapterTensor]) -> tuple[torch.Tensor, dict[str, int]]:
    """(uint8 [bytes] of all tensors in BF16, in the layout's order; where each begins).

    Owns its memory: the update may be freed or changed afterwards. Lies on the device of the update's first tensor.
    """
    sizes = {name: update.tensors[name].numel() * torch.bfloat16.itemsize for name in layout}
    device = update.tensors[next(iter(layout))].device
    whole = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=device)
    starts, at = {}, 0
    for name, size in sizes.items():
        starts[name] = at
        whole[at : at + size].view(torch.bfloat16).copy_(update.tensors[name].detach().reshape(-1))
        at += size
    return whole, starts


def serialized(
    update: AdapterUpdate, layout: Mapping[str, AdapterTensor], ranks: int, *, here: int | None = None
) -> list[Any]:
    """What each tensor-parallel rank of an engine is sent. The first `here` of them, or all, are on this host.

    For those the bucket itself stays where it is: CUDA memory goes as an IPC handle, the host's as shared memory. The
    others get its bytes, all the same object, which a message holds once. The caller keeps nothing: SGLang copies.
    """
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    whole, starts = flat_adapter(update, layout)
    metadata = []
    for name, start in starts.items():
        shape = torch.Size(layout[name].shape)
        size = shape.numel() * torch.bfloat16.itemsize
        metadata.append(
            FlattenedTensorMetadata(
                name=name, shape=shape, dtype=torch.bfloat16, start_idx=start, end_idx=start + size, numel=size
            )
        )
    bucket = {"flattened_tensor": whole, "metadata": metadata}
    near = ranks if here is None else here
    handles = [MultiprocessingSerializer.serialize(bucket) for _ in range(near)]
    if near == ranks:
        return handles
    far = pickle.dumps({"flattened_tensor": whole.cpu(), "metadata": metadata}, protocol=pickle.HIGHEST_PROTOCOL)
    return [*handles, *[far] * (ranks - near)]
