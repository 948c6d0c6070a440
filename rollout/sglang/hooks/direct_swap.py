"""An adapter from GPU memory into its slot without a turn through the host, and experts as wholes.

SGLang copies each tensor to the host when it is loaded, and at its first use pins, scales and copies each of the 896
experts of a layer by itself: 1.3 to 1.7 s for 0.8 GB on an H200. Here the packed factors of a layer's experts go into
the slot in one copy each, and tensors that come from a GPU are copied to the rank's own. An expert-parallel rank is
given the factors of its own experts only, where SGLang expects all of them.

Shapes: E experts of this rank, R rank of the adapter, M rank that the slots hold, c parts in a stacked A (gate and up).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_EXPERT_TARGETS = ("gate_up_proj", "down_proj")
READABLE = f"{__name__}."  # what SGLang's guard against foreign classes lets through once this hook is in
_MOVED = "miles_k3_experts_moved"  # on an adapter whose experts' factors are in its slot, and nowhere else


def knows_shards() -> None:
    """A shard's message refers to this, so that a process of SGLang's without the hook can't read it: it would take the
    shard for a whole adapter, and miss its experts in it without a word."""


def fill_a(slot_ENI: Tensor, a_ERI: Tensor, *, parts: int) -> None:
    """Stacked A [E or 1, c * R, in] into a slot [E or 1, c * M, in]: parts begin at multiples of M; the rest is 0."""
    held, rank = slot_ENI.shape[1] // parts, a_ERI.shape[1] // parts
    _refuse_misfit(slot_ENI, a_ERI, (slot_ENI.shape[0], rank * parts, slot_ENI.shape[2]), rank <= held)
    slot_ENI.zero_()
    for part in range(parts):
        slot_ENI[:, part * held : part * held + rank].copy_(a_ERI[:, part * rank : (part + 1) * rank])


def fill_b(slot_EOM: Tensor, b_EOR: Tensor, *, scaling: float) -> None:
    """B [E or 1, out, R], scaled, into a slot [E or 1, out, M]; the rest is 0. The kernels don't scale experts."""
    rank = b_EOR.shape[2]
    _refuse_misfit(slot_EOM, b_EOR, (*slot_EOM.shape[:2], rank), rank <= slot_EOM.shape[2])
    slot_EOM.zero_()
    slot_EOM[:, :, :rank].copy_(b_EOR * scaling)


def _refuse_misfit(slot: Tensor, given: Tensor, expected: tuple[int, ...], rank_fits: bool) -> None:
    if tuple(given.shape) != expected or not rank_fits:
        raise ValueError(f"an expert factor of shape {list(given.shape)} came for a slot of {list(slot.shape)}")


def rank_columns(factor: Tensor, target: str, which: str, *, columns: slice, width: int) -> Tensor:
    """A tensor-parallel rank's part of a packed factor: `columns` of an expert's `width`, where the factor has them."""
    if target == "down_proj" and which == "A":
        return factor[..., columns]
    if target == "gate_up_proj" and which == "B":
        return torch.cat([factor[:, columns], factor[:, width + columns.start : width + columns.stop]], dim=1)
    return factor


def split_names(names: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """(target, A or B) -> the name of a layer's packed factor of routed experts, as SGLang has renamed them."""
    found = {}
    for name, factor in names.items():
        if ".experts." not in name or getattr(factor, "ndim", 0) != 3:
            continue
        target = next((t for t in _EXPERT_TARGETS if f".experts.{t}." in name), None)
        if target is not None:
            found[target, "A" if ".lora_A." in name else "B"] = name
    return found


def install() -> None:
    from sglang.srt.lora import lora as adapters
    from sglang.srt.lora.layers import FusedMoEWithLoRA
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.mem_pool import LoRAMemoryPool
    from sglang.srt.utils.common import SafeUnpickler

    take, load = LoRAAdapter._process_weight, LoRAMemoryPool.load_lora_weight_to_buffer

    @functools.wraps(take)
    def keep_on_device(self: Any, name: str, loaded_weight: Tensor) -> None:
        layer = adapters.get_layer_id(name)
        if layer is None or not loaded_weight.is_cuda:
            take(self, name, loaded_weight)
            return
        # A copy: the memory is the sender's, who goes on with it, and may be another GPU's.
        self.layers[layer].weights[name] = loaded_weight.to(f"cuda:{torch.cuda.current_device()}", copy=True)

    @functools.wraps(load)
    def experts_as_wholes(
        self: Any, uid: str, buffer_id: int, lora_adapter: Any, lora_modules: Any, *rest: Any, **options: Any
    ) -> None:
        if lora_adapter is None or uid is None:  # the base's slot
            load(self, uid, buffer_id, lora_adapter, lora_modules, *rest, **options)
            return
        if getattr(lora_adapter, _MOVED, False):
            raise RuntimeError(
                f"adapter {uid} lost its slot and its experts' factors with it: the pool must hold all loaded adapters"
            )
        held = _take_experts(lora_adapter, lora_modules, FusedMoEWithLoRA)
        load(self, uid, buffer_id, lora_adapter, lora_modules, *rest, **options)
        for layer in list(held):
            module = next(m for m in lora_modules[layer].values() if isinstance(m, FusedMoEWithLoRA))
            _fill_layer(self, layer, buffer_id, module.base_layer, held.pop(layer), lora_adapter.scaling)
            setattr(lora_adapter, _MOVED, True)

    SafeUnpickler.ALLOWED_MODULE_PREFIXES.add(READABLE)
    LoRAAdapter._process_weight = keep_on_device
    LoRAMemoryPool.load_lora_weight_to_buffer = experts_as_wholes


def _take_experts(adapter: Any, modules: Any, wrapper: type) -> dict[int, dict[str, Tensor]]:
    """The packed factors of the layers' routed experts, off the adapter's own lists: with a slot for each loaded
    adapter, one that has its slot never needs them again, and they are nearly all of its memory."""
    held = {}
    for index, layer in enumerate(adapter.layers):
        if any(isinstance(m, wrapper) for m in modules[index].values()):
            names = split_names(layer.weights).values()
            held[index] = {name: layer.weights.pop(name) for name in names}
    return {index: factors for index, factors in held.items() if factors}


def _fill_layer(pool: Any, layer: int, slot: int, experts: Any, factors: Mapping[str, Tensor], scaling: float) -> None:
    width = experts.intermediate_size_per_partition
    columns = slice(experts.moe_tp_rank * width, (experts.moe_tp_rank + 1) * width)
    for (target, which), name in split_names(factors).items():
        part = rank_columns(factors[name], target, which, columns=columns, width=width * experts.moe_tp_size)
        if which == "A":
            parts = 2 if target == "gate_up_proj" else 1
            fill_a(pool.A_buffer[f"{target}_moe"][layer][slot], part, parts=parts)
        else:
            fill_b(pool.B_buffer[f"{target}_moe"][layer][slot], part, scaling=scaling)
