"""AdapterUpdate: made from live parameters, hashed, and judged before anything is loaded from it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence, Set
from math import isfinite

import torch

from miles_k3.adapters.checksum import checksums, hash_table
from miles_k3.adapters.layout import AdapterTensor, gate_up_pairs
from miles_k3.adapters.shard import Holding, all_experts, flat_views, held_layout, new_flat
from miles_k3.errors import AdapterError
from miles_k3.types import AdapterConfig, AdapterUpdate, LentAdapter, Shard

DTYPES = (torch.float32, torch.bfloat16)
MAX_LISTED = 12  # names listed in one error; the rest is counted
_REMEMBERED = 4  # updates made in this process; of each only some numbers are kept


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """What was found out about an update's memory as it was hashed here; it holds until somebody writes there.

    `finite`: names of tensors without NaN and infinity; `one_a`: (gate, up) whose A factors are equal; `memory`: what
    is wrong with how it lies in memory.
    """

    fingerprint: tuple[object, ...]
    finite: frozenset[str]
    one_a: frozenset[tuple[str, str]]
    memory: tuple[str, ...]


_known_here: dict[str, _Known] = {}


def make_update(version: int, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> AdapterUpdate:
    """Clone live parameters into an update that owns its memory; dtype and device stay as they are.

    The trainer hands over its compute dtype (float32 on a laptop, bfloat16 on GPUs), not its float32 masters.
    """
    owned = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    digest = adapter_sha256(version, config, owned)
    update = AdapterUpdate(version=version, config=config, tensors=owned, sha256=digest)
    remember(update)
    return update


def as_shard(
    update: AdapterUpdate, layout: Mapping[str, AdapterTensor], experts: range | None = None
) -> AdapterUpdate:  # fmt: skip
    """The shard of a whole, verified update with the factors of `experts` (None: of all), in memory of its own."""
    experts = all_experts(layout) if experts is None else experts
    flat = cut(update, layout, experts)
    tensors = flat_views(flat, held_layout(layout, experts))
    sha256 = Holding.of(update.version, update.config, tensors, layout, experts).sha256
    made = dataclasses.replace(update, tensors=tensors, shard=Shard(experts=experts, flat=flat, sha256=sha256))
    remember(made)
    return made


def cut(update: AdapterUpdate, layout: Mapping[str, AdapterTensor], experts: range) -> torch.Tensor:
    """The flat memory of a shard of a whole, verified update."""
    held, like = held_layout(layout, experts), update.tensors[next(iter(layout))]
    flat = new_flat(held, dtype=like.dtype, device=like.device)
    for name, tensor in flat_views(flat, held).items():
        whole = update.tensors[name].detach()
        tensor.copy_(whole[experts.start : experts.stop] if layout[name].per_expert else whole)
    return flat


def remember(update: AdapterUpdate) -> None:
    """The hash of what `update` holds was computed just now: on a GPU nothing of it is read again to be judged, while
    nobody writes there. An engine that decodes would have to wait for that."""
    fingerprint, tensors = _fingerprint(update), update.tensors
    if fingerprint is None:
        return
    equal = (pair for pair in gate_up_pairs(tensors) if _equal(*(tensors.get(name) for name in pair)))
    _known_here[_own_sha256(update)] = _Known(
        fingerprint, frozenset(finite_names(tensors)), frozenset(equal), tuple(_memory_findings(update))
    )
    while len(_known_here) > _REMEMBERED:
        del _known_here[next(iter(_known_here))]


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


def _own_sha256(update: AdapterUpdate) -> str:
    """Of what is held: the whole, or a shard."""
    return update.sha256 if update.shard is None else update.shard.sha256


def _fingerprint(update: AdapterUpdate) -> tuple[object, ...] | None:
    """What changes when torch writes to the tensors, or they are others; None where hashing again is cheap or must be.

    The checksum of 0.8 GB reads more memory than the whole swap.
    """
    tensors = update.tensors
    if not all(isinstance(t, torch.Tensor) and on_gpu(t) and not t.is_inference() for t in tensors.values()):
        return None
    places = tuple((n, t.data_ptr(), t._version, t.dtype, t.shape, t.stride()) for n, t in tensors.items())
    return update.version, update.config, places


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _known(update: AdapterUpdate) -> _Known | None:
    """Where this very memory was hashed in this process, and has not been written to since."""
    seen = _known_here.get(_own_sha256(update))
    return seen if seen is not None and seen.fingerprint == _fingerprint(update) else None


def adapter_sha256(version: int, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over version, config, and each tensor's name, dtype, shape and checksum, whatever the mapping's order."""
    sums = checksums(list(tensors.values()))
    table = {name: (str(t.dtype), list(t.shape), c) for (name, t), c in zip(tensors.items(), sums, strict=True)}
    return hash_table(version, config, table)


def update_bytes(update: AdapterUpdate) -> int:
    """Payload bytes of an update."""
    return sum(t.numel() * t.element_size() for t in update.tensors.values())


def verify_update(
    update: AdapterUpdate, layout: Mapping[str, AdapterTensor], *, max_rank: int, expected_version: int | None,
    experts: range | None = None,
) -> None:  # fmt: skip
    """Judge an update against the whole adapter's `layout` (that of its own config) before any of it is loaded.

    `expected_version` is the current version + 1, or None to take any version >= 0 (nothing has been loaded yet);
    `experts`: those of the shard that is expected, None for the whole. Raises AdapterError with every finding, one a
    line.
    """
    held = layout if update.shard is None else held_layout(layout, update.shard.experts)
    plain = all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in update.tensors.values())
    known = _known(update) if plain else None
    problems = [
        *number_findings(update, max_rank, expected_version),
        *_share_findings(update, experts),
        *key_findings(update.tensors, held),
        *_tensor_findings(update.tensors, held, finite_names(update.tensors) if known is None else known.finite),
        *(_memory_findings(update) if known is None else known.memory),
    ]
    if update.config.share_gate_up_a:
        problems += _shared_a_findings(update.tensors, held, frozenset() if known is None else known.one_a)
    if plain and known is None and (update.shard is None or not problems):
        found, announced = _hash_again(update, layout), _own_sha256(update)
        if found != announced:
            problems.append(
                f"has sha256 {found[:12]}..., announced was {announced[:12]}...: "
                "version, config or tensors changed after the export; export it again"
            )
    if problems:
        raise AdapterError("\n".join(f"adapter v{update.version} {problem}" for problem in problems))


def _hash_again(update: AdapterUpdate, layout: Mapping[str, AdapterTensor]) -> str:
    if update.shard is None:
        return adapter_sha256(update.version, update.config, update.tensors)
    return Holding.of(update.version, update.config, update.tensors, layout, update.shard.experts).sha256


def _share_findings(update: AdapterUpdate, experts: range | None) -> Iterator[str]:
    found = None if update.shard is None else update.shard.experts
    if found != experts:
        yield f"came as {_share(found)}, expected was {_share(experts)}: it is meant for another engine or rank"


def _share(experts: range | None) -> str:
    return "a whole" if experts is None else f"the shard of experts {experts.start}-{experts.stop - 1}"


def _flat_findings(tensors: Mapping[str, torch.Tensor], shard: Shard) -> Iterator[str]:
    """A shard is read by its flat memory, so each tensor must be where the layout's order puts it."""
    at = shard.flat.data_ptr()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.data_ptr() != at or not tensor.is_contiguous():
            yield f"has {name} elsewhere than the shard's flat memory has it; use export_adapter or as_shard"
            return
        at += tensor.numel() * tensor.element_size()
    if at != shard.flat.data_ptr() + shard.flat.numel() * shard.flat.element_size():
        yield "has a shard whose flat memory is larger than its tensors; use export_adapter or as_shard"


def number_findings(
    update: AdapterUpdate | LentAdapter, max_rank: int, expected_version: int | None
) -> Iterator[str]:  # fmt: skip
    """Sentences on rank, alpha and version."""
    rank = update.config.rank
    if rank > max_rank:
        yield f"has rank {rank}, slots hold {max_rank}; set rollout.max_lora_rank: {rank}"
    if not (isfinite(update.config.alpha) and update.config.alpha > 0):
        yield f"has alpha {update.config.alpha}; expected a finite number above 0"
    if expected_version is None:
        if update.version < 0:
            yield "has a negative version; the first adapter is v0 (or the version a run resumes from)"
    elif update.version != expected_version:
        yield (
            f"was expected to be v{expected_version}, one after the current v{expected_version - 1}: "
            "a sync was lost, repeated or reordered"
        )


def key_findings(names: Mapping[str, object] | Sequence[str], layout: Mapping[str, object]) -> Iterator[str]:
    """Sentences on missing and unmatched names, with a guess at what an unmatched one was meant to be."""
    have = set(names)
    missing = [name for name in layout if name not in have]
    unmatched = [name for name in names if name not in layout]
    if missing:
        yield f"lacks {len(missing)} of {len(layout)} tensors: {listed(missing)}"
    if unmatched:
        shown = [name + _guess(name, missing, layout) for name in unmatched[:MAX_LISTED]]
        yield f"has {len(unmatched)} keys that match nothing in this model: {listed(shown, total=len(unmatched))}"


def _guess(name: str, missing: Sequence[str], layout: Mapping[str, object]) -> str:
    for candidates in (missing, list(layout)):
        close = difflib.get_close_matches(name, candidates[:2000], n=1, cutoff=0.8)
        if close:
            return f" (did you mean {close[0]}?)"
    return ""


def listed(names: Sequence[str], total: int | None = None) -> str:
    """The first names, and how many more there are."""
    total = len(names) if total is None else total
    shown = ", ".join(names[:MAX_LISTED])
    return shown if total <= MAX_LISTED else f"{shown} and {total - MAX_LISTED} more"


def _tensor_findings(
    tensors: Mapping[str, torch.Tensor], layout: Mapping[str, AdapterTensor], finite: Set[str]
) -> Iterator[str]:  # fmt: skip
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            yield f"has {name} as {type(tensor).__name__}; expected a plain dense tensor"
            continue
        expected = layout.get(name)
        if expected is not None and tuple(tensor.shape) != expected.shape:
            yield (
                f"has {name} of shape {list(tensor.shape)}, expected {list(expected.shape)}: "
                "an adapter for another model or rank"
            )
        if tensor.dtype not in DTYPES:
            yield f"has {name} in {tensor.dtype}, expected torch.float32 or torch.bfloat16"
        elif name not in finite:
            bad = int((~torch.isfinite(tensor)).sum())
            yield f"has {bad} non-finite of {tensor.numel()} values in {name}: training diverged, lower trainer.lr"


def finite_names(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of the tensors in `DTYPES` whose values are all finite. A device is read once and waited for once."""
    judged = {
        n: t for n, t in tensors.items()
        if isinstance(t, torch.Tensor) and t.layout is torch.strided and t.dtype in DTYPES
    }  # fmt: skip
    found = {n for n, t in judged.items() if not t.numel()}
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name in judged.keys() - found:
        groups.setdefault((judged[name].device, judged[name].dtype), []).append(name)
    for names in groups.values():
        held = [judged[n].detach() for n in names]
        largest = torch._foreach_norm(held, float("inf"))  # pyright: ignore[reportPrivateImportUsage]
        found |= {n for n, fine in zip(names, torch.stack(list(largest)).isfinite().tolist(), strict=True) if fine}
    return found


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite, without a temporary of the tensor's size."""
    low, high = torch.aminmax(tensor.detach())
    return isfinite(low.item()) and isfinite(high.item())


def _memory_findings(update: AdapterUpdate) -> Iterator[str]:
    if update.shard is not None:
        yield from _flat_findings(update.tensors, update.shard)
        return
    tensors = update.tensors
    owner: dict[tuple[torch.device, int], str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        own, held = tensor.numel() * tensor.element_size(), storage.nbytes()
        first = owner.setdefault((tensor.device, storage.data_ptr()), name)
        if first != name:
            yield f"has {name} in the same memory as {first}; each tensor must own its memory, use make_update"
        elif own != held or not tensor.is_contiguous():
            yield f"has {name} as a view ({own} of {held} bytes); each tensor must own its memory, use make_update"
        if tensor.requires_grad:
            yield f"has {name} as a live parameter (it requires grad); hand over a detached copy, use make_update"


def _shared_a_findings(
    tensors: Mapping[str, torch.Tensor], layout: Mapping[str, AdapterTensor], equal: Set[tuple[str, str]]
) -> Iterator[str]:  # fmt: skip
    for gate, up in (pair for pair in gate_up_pairs(layout) if pair not in equal):
        a, b = tensors.get(gate), tensors.get(up)
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
            continue  # already reported
        if a.dtype != b.dtype or (not torch.equal(a, b) and is_finite(a) and is_finite(b)):  # NaN is reported
            yield f"has different {gate} and {up}; export one A twice or set lora.share_gate_up_a: false"
