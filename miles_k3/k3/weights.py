"""The resident base: the frozen weights of one process, held once and read by trainer and engine alike.

Shapes: E experts, I expert inner width, Z latent width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from miles_k3.errors import CheckpointError
from miles_k3.k3 import params as table
from miles_k3.k3.config import K3Config
from miles_k3.k3.ops import mxfp4
from miles_k3.k3.params import DType, Param, Part
from miles_k3.k3.safetensors_io import Checkpoint


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

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(w13 [E, 2I, Z], w2 [E, Z, I]): the resident tensors, or a fresh dequantisation when only codes are kept."""
        if self.w13 is not None and self.w2 is not None:
            return self.w13, self.w2
        assert self.w13_packed is not None and self.w13_scale is not None
        assert self.w2_packed is not None and self.w2_scale is not None
        return mxfp4.dequantize(self.w13_packed, self.w13_scale, dtype), mxfp4.dequantize(
            self.w2_packed, self.w2_scale, dtype
        )

    def keep_dense(self, dtype: torch.dtype) -> None:
        """Dequantise once and drop the codes."""
        self.w13, self.w2 = self.dense(dtype)
        self.w13_packed = self.w13_scale = self.w2_packed = self.w2_scale = None


@dataclass(slots=True, eq=False)
class ResidentBase:
    """Every text tensor of the model, frozen.

    `tensors` maps checkpoint names to tensors: BF16 ones in `dtype`, F32 ones in float32, A_log without its padding.
    `gate_up[prefix]` is the fused [2F, H] weight of a dense or shared MLP, whose halves `tensors` names too.
    """

    config: K3Config
    dtype: torch.dtype
    device: torch.device
    tensors: dict[str, Tensor] = field(default_factory=dict)
    gate_up: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[int, ExpertBank] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def num_bytes(self) -> int:
        """Bytes held, each storage counted once."""
        held = [*self.tensors.values(), *self.gate_up.values()]
        for bank in self.experts.values():
            held += [
                t
                for t in (bank.w13_packed, bank.w13_scale, bank.w2_packed, bank.w2_scale, bank.w13, bank.w2)
                if t is not None
            ]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def load_base(folder: str | Path, config: K3Config, *, dtype: torch.dtype, device: torch.device | str = "cpu",
              base_dtype: str = "bf16", progress: Callable[[int], None] | None = None) -> ResidentBase:  # fmt: skip
    """Stream a checkpoint into a ResidentBase; `progress` gets the bytes read so far.

    Raises CheckpointError naming file and tensor for anything missing, torn, foreign, or of another shape or dtype.
    """
    with Checkpoint(folder) as checkpoint:
        if problems := checkpoint.check(table.iter_params(config)):
            raise CheckpointError("\n".join(problems[:20]))
        return build_base(config, table.text_params(config), checkpoint.read, dtype=dtype, device=device,
                          base_dtype=base_dtype, progress=progress)  # fmt: skip


def build_base(config: K3Config, params: Iterable[Param], read: Callable[[Param], Tensor], *, dtype: torch.dtype,
               device: torch.device | str = "cpu", base_dtype: str = "bf16",
               progress: Callable[[int], None] | None = None) -> ResidentBase:  # fmt: skip
    """A ResidentBase from any source of tensors (`read(param)`), e.g. a checkpoint or a generator."""
    base = ResidentBase(config=config, dtype=dtype, device=torch.device(device))
    done, layer = 0, None
    for p in params:
        if base_dtype == "bf16" and layer in base.experts and p.layer != layer:
            base.experts[layer].keep_dense(dtype)
        layer = p.layer
        _place(base, p, read(p))
        done += p.num_bytes
        if progress is not None:
            progress(done)
    if base_dtype == "bf16" and layer in base.experts:
        base.experts[layer].keep_dense(dtype)
    return base


def _place(base: ResidentBase, p: Param, tensor: Tensor) -> None:
    if p.part is Part.EXPERT:
        _place_expert(base, p, tensor)
    elif p.part in (Part.DENSE, Part.SHARED) and p.module.endswith(("gate_proj", "up_proj")):
        _place_gate_up(base, p, tensor)
    else:
        if p.name.endswith("A_log"):
            tensor = strip_a_log(tensor, base.config.kda_num_heads, p.name)
        dtype = torch.float32 if p.dtype is DType.F32 else base.dtype
        base.tensors[p.name] = tensor.to(device=base.device, dtype=dtype, copy=True)


def strip_a_log(a_log: Tensor, heads: int, name: str) -> Tensor:
    """A_log without its zero padding. Raises CheckpointError when the padding holds anything but zeros (trap 2)."""
    if a_log[heads:].any():
        raise CheckpointError(
            f"tensor {name}: entries {heads}.. must be zero padding but are not; is num_heads {heads} right?"
        )
    return a_log[:heads]


def _place_gate_up(base: ResidentBase, p: Param, tensor: Tensor) -> None:
    prefix, rows = p.module.rpartition(".")[0] + ".", p.shape[0]
    if prefix not in base.gate_up:
        base.gate_up[prefix] = torch.empty(2 * rows, p.shape[1], dtype=base.dtype, device=base.device)
    start = 0 if p.module.endswith("gate_proj") else rows
    base.tensors[p.name] = base.gate_up[prefix][start : start + rows]
    base.tensors[p.name].copy_(tensor)


def _place_expert(base: ResidentBase, p: Param, tensor: Tensor) -> None:
    assert p.layer is not None and p.expert is not None
    bank = base.experts.get(p.layer)
    if bank is None:
        bank = base.experts[p.layer] = _empty_bank(base.config, base.device)
    weight, kind = p.name.rsplit(".", 2)[-2:]
    suffix = kind.removeprefix("weight_")
    if weight == "w2":
        target = getattr(bank, f"w2_{suffix}")[p.expert]
    else:
        inter = base.config.moe_intermediate_size
        start = 0 if weight == "w1" else inter
        target = getattr(bank, f"w13_{suffix}")[p.expert, start : start + inter]
    target.copy_(tensor)


def _empty_bank(c: K3Config, device: torch.device) -> ExpertBank:
    e, i, z = c.num_experts, c.moe_intermediate_size, c.routed_expert_hidden_size

    def codes(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=device)

    return ExpertBank(codes(e, 2 * i, z // 2), codes(e, 2 * i, z // 32), codes(e, z, i // 2), codes(e, z, i // 32))
