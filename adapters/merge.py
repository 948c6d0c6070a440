"""The adapter folded into plain weights: W + (alpha / r) B A, once.

For export to tools that know no LoRA, and as an oracle. The engines never merge: their base stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from miles_k3.adapters.layout import split_expert, split_name, tensor_name
from miles_k3.adapters.update import listed
from miles_k3.errors import AdapterError
from miles_k3.types import AdapterUpdate

MERGE_MARKER = "miles_k3.merged_adapter"


class MergedWeights(dict[str, torch.Tensor]):
    """Weights that already hold an adapter; `metadata` belongs into the file they are saved to."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], metadata: dict[str, str]) -> None:
        super().__init__(weights)
        self.metadata = metadata


def merge_metadata(update: AdapterUpdate) -> dict[str, str]:
    """The marker of a merged checkpoint, for safetensors' metadata: which adapter is inside."""
    return {MERGE_MARKER: f"v{update.version} {update.sha256}"}


def merged_delta(update: AdapterUpdate, module: str, expert: int | None = None) -> torch.Tensor:
    """(alpha / r) B A of one module in float32: [out, in]; routed experts [E, out, in], or [out, in] of one `expert`.

    Raises AdapterError when the adapter has no such module or expert.
    """
    try:
        a, b = (update.tensors[tensor_name(module, factor)] for factor in ("A", "B"))
    except KeyError as e:
        raise AdapterError(f"adapter v{update.version} has no tensor {e.args[0]}") from None
    if expert is not None:
        num_experts = max(a.shape[0], b.shape[0]) if a.dim() == 3 else 0
        if not 0 <= expert < num_experts:
            raise AdapterError(
                f"adapter v{update.version} has {num_experts} experts in {module}, asked for number {expert}"
            )
        a, b = (f[0 if f.shape[0] == 1 else expert] for f in (a, b))
    return (b.float() @ a.float()).mul_(update.config.scaling)


def merge_into(weights: Mapping[str, torch.Tensor], update: AdapterUpdate) -> MergedWeights:
    """New weights with the adapter inside; the input stays as it is, and untargeted tensors are shared with it.

    Keys are checkpoint names: `<module>.weight`; routed experts dequantised, one a tensor (`...experts.7.w1.weight`) or
    stacked ([E, out, in], `...experts.w1.weight`). Raises AdapterError as `merge_stream` does.
    """
    metadata = weights.metadata if isinstance(weights, MergedWeights) else None
    return MergedWeights(merge_stream(weights.items(), update, metadata=metadata), merge_metadata(update))


def merge_stream(
    weights: Iterable[tuple[str, torch.Tensor]], update: AdapterUpdate, *, metadata: Mapping[str, str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Like `merge_into`, a tensor at a time. `metadata` is that of the files the weights come from.

    The sum is taken in float32 and rounded to the weight's dtype once. Raises AdapterError at once when the weights
    already hold an adapter; on the way on a packed or misshapen target; at the end when a target never came.
    """
    if metadata and MERGE_MARKER in metadata:
        raise AdapterError(
            f"the weights already hold adapter {metadata[MERGE_MARKER].split()[0]}; "
            f"merge v{update.version} into the base instead"
        )
    return _merge(weights, update)


def _merge(weights: Iterable[tuple[str, torch.Tensor]], update: AdapterUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    missing = _targets(update)
    for name, weight in weights:
        full, _, leaf = name.rpartition(".")
        module, expert = split_expert(full)
        if tensor_name(module, "A") not in update.tensors:
            yield name, weight
            continue
        if leaf == "weight_packed":
            raise AdapterError(
                f"{name} is packed MXFP4; dequantise it before merging (a 4-bit base is never rewritten)"
            )
        if leaf != "weight":
            yield name, weight
            continue
        delta = merged_delta(update, module, expert)
        if delta.shape != weight.shape:
            raise AdapterError(
                f"{name} is {list(weight.shape)}, the adapter's delta {list(delta.shape)}: another model's adapter"
            )
        missing -= (
            {full} if expert is not None or delta.dim() == 2 else {f for f in missing if split_expert(f)[0] == module}
        )
        yield name, delta.to(weight.device).add_(weight).to(weight.dtype)
    if missing:
        raise AdapterError(f"no weight came for {len(missing)} modules of the adapter: {listed(sorted(missing))}")


def _targets(update: AdapterUpdate) -> set[str]:
    """The modules that must get a delta, routed experts one by one."""
    out: set[str] = set()
    for module in {split_name(name)[0] for name in update.tensors}:
        a, b = (update.tensors[tensor_name(module, factor)] for factor in ("A", "B"))
        if a.dim() == 2:
            out.add(module)
        else:
            experts, _, leaf = module.rpartition(".")
            out |= {f"{experts}.{expert}.{leaf}" for expert in range(max(a.shape[0], b.shape[0]))}
    return out
