"""The resident base: the frozen weights of one process, held once and read by trainer and engine alike.

Shapes: E experts, I expert inner width, Z latent width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from miles_k3.errors import CheckpointError
from miles_k3.k3 import params as table
from miles_k3.k3.base_shard import BaseShard
from miles_k3.k3.config import MXFP4_GROUP, K3Config
from miles_k3.k3.ops import mxfp4
from miles_k3.k3.params import DType, Param, Part
from miles_k3.k3.safetensors_io import Checkpoint

if TYPE_CHECKING:
    from miles_k3.k3.kernels.mxfp4_unpack import PackedExperts

UNPACKED = "its experts are stored in BF16, so none can be kept packed; set model.base_dtype: bf16"
BASE_DTYPES = ("bf16", "mxfp4")  # routed experts dequantised once, or kept packed


@dataclass(slots=True, eq=False)
class ExpertBank:
    """The routed experts of one layer: packed as in the file, or dequantised once.

    Packed: w13 [E, 2I, Z/2] (w1 rows then w3 rows), w2 [E, Z, I/2], scales with one byte per 32 inputs.
    """

    w13_packed: Tensor | None
    w13_scale: Tensor | None
    w2_packed: Tensor | None
    w2_scale: Tensor | None
    w13: Tensor | None = None
    w2: Tensor | None = None
    _kernel_form: tuple[PackedExperts, PackedExperts] | None = field(default=None, init=False)

    def for_kernels(self) -> tuple[PackedExperts, PackedExperts] | None:
        """(w13, w2) as the Triton kernels take them; None where no codes are kept or a width doesn't fit.

        Waits for the device at the first call.
        """
        from miles_k3.k3.kernels.mxfp4_unpack import NIBBLE_BLOCK, PackedExperts  # Triton is not everywhere

        codes = (self.w13_packed, self.w2_packed)
        if self._kernel_form is None and not any(c is None or c.shape[-1] * 2 % NIBBLE_BLOCK for c in codes):
            assert self.w13_packed is not None, "judged above"
            assert self.w13_scale is not None, "codes come with scales"
            assert self.w2_packed is not None, "judged above"
            assert self.w2_scale is not None, "codes come with scales"
            self._kernel_form = (
                PackedExperts.of(self.w13_packed, self.w13_scale), PackedExperts.of(self.w2_packed, self.w2_scale)
            )  # fmt: skip
        return self._kernel_form

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(w13 [E, 2I, Z], w2 [E, Z, I]): the resident tensors, or a fresh dequantisation when only codes are kept."""
        return self.weight("w13", dtype), self.weight("w2", dtype)

    def weight(self, which: Literal["w13", "w2"], dtype: torch.dtype) -> Tensor:
        """One of the two: the resident tensor, or a fresh dequantisation when only codes are kept."""
        if which == "w13":
            return _decoded(self.w13_packed, self.w13_scale, dtype) if self.w13 is None else self.w13
        return _decoded(self.w2_packed, self.w2_scale, dtype) if self.w2 is None else self.w2

    @property
    def packed(self) -> bool:
        """Whether the codes are kept, and weights are unpacked when they are asked for."""
        return self.w13 is None

    @property
    def numbers_per_expert(self) -> int:
        """Of the larger weight, w13."""
        if self.w13 is not None:
            return self.w13[0].numel()
        assert self.w13_packed is not None, "codes were dropped"
        return 2 * self.w13_packed[0].numel()

    def keep_dense(self, dtype: torch.dtype) -> None:
        """Dequantise once and drop the codes, one matrix after the other."""
        self.w13 = _decoded(self.w13_packed, self.w13_scale, dtype)
        self.w13_packed = self.w13_scale = self._kernel_form = None
        self.w2 = _decoded(self.w2_packed, self.w2_scale, dtype)
        self.w2_packed = self.w2_scale = None

    def part(self, experts: slice) -> ExpertBank:
        """Some of the experts, as views."""
        fields = (self.w13_packed, self.w13_scale, self.w2_packed, self.w2_scale, self.w13, self.w2)
        return ExpertBank(*(None if t is None else t[experts] for t in fields))

    @property
    def tensors(self) -> list[Tensor]:
        """Whatever of it is held."""
        found = (self.w13_packed, self.w13_scale, self.w2_packed, self.w2_scale, self.w13, self.w2)
        return [t for t in found if t is not None]


def _decoded(packed: Tensor | None, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert packed is not None, "codes were dropped"
    assert scale is not None, "scales were dropped"
    return mxfp4.dequantize(packed, scale, dtype)


@dataclass(slots=True, eq=False)
class ResidentBase:
    """Every text tensor of the model, frozen; or one trainer rank's `shard` of them.

    `tensors` maps checkpoint names to tensors: BF16 ones in `dtype`, F32 ones in float32, A_log without its padding.
    `gate_up[prefix]` is the fused [2F, H] weight of a dense or shared MLP, whose halves `tensors` names too.
    """

    config: K3Config
    dtype: torch.dtype
    device: torch.device
    tensors: dict[str, Tensor] = field(default_factory=dict)
    gate_up: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[int, ExpertBank] = field(default_factory=dict)
    shard: BaseShard | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def num_bytes(self) -> int:
        """Bytes held, each storage counted once."""
        held = [*self.tensors.values(), *self.gate_up.values()]
        for bank in self.experts.values():
            held += bank.tensors
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())

    def num_params(self) -> int:
        """Parameters of the model that are held."""
        shard = self.shard or BaseShard.whole(self.config)
        held = (p for p in table.text_params(self.config) if shard.holds(p, self.config))
        return sum(p.num_params // (shard.tp_size if p.tp_dim is not None else 1) for p in held)


def load_base(folder: str | Path, config: K3Config, *, dtype: torch.dtype, device: torch.device | str = "cpu",
              base_dtype: str = "bf16", progress: Callable[[int], None] | None = None,
              shard: BaseShard | None = None) -> ResidentBase:  # fmt: skip
    """Stream a checkpoint, or what `shard` holds of it, into a ResidentBase; `progress` gets the bytes read so far.

    Everything the headers show is judged before the first byte is read. Raises CheckpointError naming file and tensor
    for anything missing, torn, foreign, of another shape or dtype, or never written.
    """
    with Checkpoint(folder) as checkpoint:
        checkpoint.require(checkpoint.table(config))
        if base_dtype == "mxfp4" and not checkpoint.packed:
            raise CheckpointError(f"{folder}: {UNPACKED}")
        text = table.text_params(config, packed=checkpoint.packed)
        return build_base(config, text, checkpoint.read, dtype=dtype, device=device,
                          base_dtype=base_dtype, progress=progress, shard=shard,
                          where=lambda p: checkpoint.where(p.name))  # fmt: skip


def build_base(config: K3Config, params: Iterable[Param], read: Callable[[Param], Tensor], *, dtype: torch.dtype,
               device: torch.device | str = "cpu", base_dtype: str = "bf16",
               progress: Callable[[int], None] | None = None,
               where: Callable[[Param], str] = lambda p: f"tensor {p.name}",
               shard: BaseShard | None = None) -> ResidentBase:  # fmt: skip
    """A ResidentBase from any source of tensors (`read(param)`), e.g. a checkpoint or a generator.

    `params` may be some layers only, in any order, but fused tensors must come whole. `where` begins the sentence of
    an error. Raises CheckpointError for content that can't be right, and for a fused tensor with a part missing.
    """
    if base_dtype not in BASE_DTYPES:
        raise ValueError(f"base_dtype is {base_dtype!r}; expected one of {', '.join(BASE_DTYPES)}")
    base = ResidentBase(config=config, dtype=dtype, device=torch.device(device), shard=shard)
    builder = _Builder(base, base_dtype == "bf16")
    done = 0
    for p in params:
        if shard is not None and not shard.holds(p, config):
            continue
        builder.place(p, read(p), where)
        done += p.num_bytes
        if progress is not None:
            progress(done)
    return builder.finish()


def strip_a_log(a_log: Tensor, heads: int, where: str) -> Tensor:
    """A_log without its zero padding. Raises CheckpointError when the padding holds anything but zeros (trap 2).

    `where` begins the sentence: the file and the tensor.
    """
    if a_log[heads:].any():
        raise CheckpointError(
            f"{where}: entries from {heads} on must be zero padding but are not; "
            f"config.json says linear_attn_config.num_heads {heads}, copy both from one source"
        )
    return a_log[:heads]


def _check_scales(scale: Tensor, where: str) -> None:
    """No writer leaves a whole matrix at scale 2^-127, but a hole in a copy and a forgotten expert look like that."""
    largest = int(scale.max())
    if largest == 0:
        raise CheckpointError(f"{where}: every scale byte is 0, so it was never written; copy the file again")
    if largest == mxfp4.NAN_SCALE:
        raise CheckpointError(f"{where}: scale byte {mxfp4.NAN_SCALE} means NaN; copy the file again")


class _Builder:
    """Puts tensors where they stay. A fused tensor is done when all its parts came; then experts are dequantised."""

    def __init__(self, base: ResidentBase, keep_dense: bool) -> None:
        self._base, self._keep_dense = base, keep_dense
        self._shard = base.shard or BaseShard.whole(base.config)
        self._awaited: dict[str, set[str]] = {}  # prefix of a fused tensor -> its parts that did not come yet

    def place(self, p: Param, tensor: Tensor, where: Callable[[Param], str]) -> None:
        """Copy one checkpoint tensor to its place, converted to the base's dtype where it isn't F32 or packed."""
        base = self._base
        if p.is_scale:
            _check_scales(tensor, where(p))
        if p.part is Part.EXPERT:
            self._place_expert(p, tensor)
        elif p.part in (Part.DENSE, Part.SHARED) and not p.module.endswith("down_proj"):
            self._place_gate_up(p, tensor)
        else:
            if p.name.endswith("A_log"):
                tensor = strip_a_log(tensor, base.config.kda_num_heads, where(p))
            dtype = torch.float32 if p.dtype is DType.F32 else base.dtype
            tensor = self._shard.part(p, tensor)
            base.tensors[p.name] = tensor.to(device=base.device, dtype=dtype, copy=True)

    def finish(self) -> ResidentBase:
        """The base. Raises CheckpointError when parts of a fused tensor never came: its memory holds anything."""
        if self._awaited:
            prefix, names = next(iter(self._awaited.items()))
            raise CheckpointError(f"tensor {min(names)} never came ({len(names)} missing below {prefix})")
        return self._base

    def _came(self, p: Param, prefix: str, parts: Callable[[], Iterable[str]]) -> bool:
        """Note that `p` came; whether it was the last of the fused tensor's `parts`."""
        if prefix not in self._awaited:
            self._awaited[prefix] = set(parts())
        awaited = self._awaited[prefix]
        awaited.discard(p.name)
        if awaited:
            return False
        del self._awaited[prefix]
        return True

    def _place_gate_up(self, p: Param, tensor: Tensor) -> None:
        base, tensor = self._base, self._shard.part(p, tensor)
        rows = tensor.shape[0]
        prefix = p.module.rpartition(".")[0] + "."
        if prefix not in base.gate_up:
            base.gate_up[prefix] = torch.empty(2 * rows, p.shape[1], dtype=base.dtype, device=base.device)
        start = 0 if p.module.endswith("gate_proj") else rows
        base.tensors[p.name] = base.gate_up[prefix][start : start + rows]
        base.tensors[p.name].copy_(tensor)
        self._came(p, prefix, lambda: (f"{prefix}{half}_proj.weight" for half in ("gate", "up")))

    def _place_expert(self, p: Param, tensor: Tensor) -> None:
        base, layer, expert = self._base, p.layer, p.expert
        assert layer is not None
        assert expert is not None
        if layer not in base.experts:
            dtype = None if p.quantised else base.dtype
            base.experts[layer] = _empty_bank(base.config, len(self._shard.experts), base.device, dtype)
        place = expert - self._shard.experts.start
        _slot(base.experts[layer], p.name, place, base.config.moe_intermediate_size).copy_(tensor)
        names = partial(table.expert_names, base.config, layer, self._shard.experts, packed=p.quantised)
        last = self._came(p, f"{table.moe_prefix(layer)}experts.", names)
        if last and self._keep_dense and base.experts[layer].packed:
            base.experts[layer].keep_dense(base.dtype)


def _slot(bank: ExpertBank, name: str, expert: int, inter: int) -> Tensor:
    """Where the bank keeps a tensor of its expert number `expert`: w1 and w3 are the upper and lower half of w13."""
    weight, kind = name.rsplit(".", 2)[-2:]
    w13 = {"weight_packed": bank.w13_packed, "weight_scale": bank.w13_scale, "weight": bank.w13}
    w2 = {"weight_packed": bank.w2_packed, "weight_scale": bank.w2_scale, "weight": bank.w2}
    whole = (w2 if weight == "w2" else w13)[kind]
    assert whole is not None, "the bank is of the other form"
    start = inter if weight == "w3" else 0
    return whole[expert] if weight == "w2" else whole[expert, start : start + inter]


def _empty_bank(c: K3Config, num_experts: int, device: torch.device, dtype: torch.dtype | None) -> ExpertBank:
    """Room for packed experts, or for plain ones of a `dtype`."""
    e, i, z = num_experts, c.moe_intermediate_size, c.routed_expert_hidden_size
    if dtype is not None:
        w13, w2 = (torch.empty(shape, dtype=dtype, device=device) for shape in ((e, 2 * i, z), (e, z, i)))
        return ExpertBank(None, None, None, None, w13=w13, w2=w2)

    def codes(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=device)

    return ExpertBank(
        w13_packed=codes(e, 2 * i, z // 2),
        w13_scale=codes(e, 2 * i, z // MXFP4_GROUP),
        w2_packed=codes(e, z, i // 2),
        w2_scale=codes(e, z, i // MXFP4_GROUP),
    )
