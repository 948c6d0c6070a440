"""An export read back and compared, tensor by tensor, with a computation of its own in float64.

Nothing of the way out is used again but the readers: each weight is W + (alpha / r) B A as a whole, and what was stored
must be a right rounding of it. The sum that was rounded was taken in float32, so a value within its error of a border
between two codes may have gone either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from miles_k3.adapters.content import AdapterSource, parts
from miles_k3.adapters.layout import split_expert, tensor_name
from miles_k3.adapters.peft_read import PeftReader
from miles_k3.errors import CheckpointError
from miles_k3.k3.config import K3Config
from miles_k3.k3.params import Param, Part
from miles_k3.k3.safetensors_header import shown
from miles_k3.k3.safetensors_io import Checkpoint

_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_AGAIN = "export it again"
Table = Mapping[str, Param]
_FP32_ERROR = 2.0**-20  # of a float32 sum of products, relative to the sum of their magnitudes; generous


def verify_merged(exported: Path, base: Path, config: K3Config, adapter: AdapterSource) -> int:
    """How many tensors were compared: all of them. Raises CheckpointError with the first findings."""
    with Checkpoint(exported) as found, Checkpoint(base) as before:
        found.require(found.table(config))
        table = {p.name: p for p in before.present(before.table(config))}
        written = {p.name: p for p in found.present(found.table(config))}
        if no_vision := sorted(p.name for p in table.values() if p.part is Part.VISION and p.name not in written):
            raise CheckpointError(f"{exported} lacks the base's tensor {no_vision[0]}; {_AGAIN}")
        problems = [x for p in written.values() for x in _problems(p, found, written, before, table, adapter)]
        if problems:
            raise CheckpointError(shown(problems))
    return len(written)


def verify_peft(exported: Path, config: K3Config, adapter: AdapterSource, sha256: str) -> int:
    """The same for a PEFT folder: every tensor, bit by bit."""
    with PeftReader(exported, config) as found:
        if (other := found.verify()) != sha256:
            raise CheckpointError(
                f"{exported} has sha256 {other[:12]}..., the adapter {sha256[:12]}...; export it again"
            )
        for t in found.layout.values():
            for expert in parts(t):
                if not torch.equal(found.read(t.name, expert), adapter.read(t.name, expert)):
                    raise CheckpointError(f"{exported}: tensor {t.name} differs from the adapter's; export it again")
        return len(found.layout)


def _problems(
    p: Param, found: Checkpoint, written: Table, base: Checkpoint, table: Table, adapter: AdapterSource
) -> Iterator[str]:
    module, expert = split_expert(p.module)
    if tensor_name(module, "A") not in adapter.layout:
        if not torch.equal(found.read(p).view(torch.uint8), base.read(table[p.name]).view(torch.uint8)):
            yield f"{found.where(p.name)} differs from the base's, though the adapter doesn't touch it; {_AGAIN}"
        return
    if p.is_scale:
        return  # judged with its codes
    a, b = (adapter.read(tensor_name(module, factor), expert or 0).double() for factor in ("A", "B"))
    before = _weight(base, table, p.module)
    wanted = before + adapter.config.alpha / adapter.config.rank * (b @ a)
    slack = _FP32_ERROR * (before.abs() + adapter.config.scaling * (b.abs() @ a.abs()))
    if p.quantised:
        wrong = _wrong_codes(found.read(p), found.read(written[f"{p.module}.weight_scale"]), wanted, slack)
    else:
        wrong = _wrong_bf16(found.read(p), wanted, slack)
    if wrong:
        yield f"{found.where(p.name)}: {wrong} of {wanted.numel()} values are no rounding of base + adapter; {_AGAIN}"


def _weight(checkpoint: Checkpoint, table: Table, module: str) -> Tensor:
    """A stored weight in float64, decoded by the definition of its format."""
    if plain := table.get(f"{module}.weight"):
        return checkpoint.read(plain).double()
    packed, scale = (checkpoint.read(table[f"{module}.weight_{kind}"]) for kind in ("packed", "scale"))
    return _decoded(packed, scale)


def _decoded(packed: Tensor, scale: Tensor) -> Tensor:
    """E2M1 nibbles, low one first, times 2^(byte - 127) of their 32."""
    nibbles = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.long)
    nibbles[..., 0::2], nibbles[..., 1::2] = packed.long() % 16, packed.long() // 16
    values = _LEVELS[nibbles % 8] * (1 - 2 * (nibbles // 8))
    return values * _unit(scale).repeat_interleave(32, dim=-1)


def _unit(scale: Tensor) -> Tensor:
    """2^(byte - 127)."""
    return torch.ldexp(torch.ones_like(scale, dtype=torch.float64), scale.int() - 127)


def _wrong_bf16(stored: Tensor, wanted: Tensor, slack: Tensor) -> int:
    """Values farther from the exact one than half the distance to their neighbours in BF16."""
    value = stored.double()
    _, exponent = torch.frexp(value)
    step = torch.ldexp(torch.ones_like(value), exponent.clamp(min=-125) - 8)
    return int(((value - wanted).abs() > step / 2 + slack).logical_or(~torch.isfinite(value)).sum())


def _wrong_codes(packed: Tensor, scale: Tensor, wanted: Tensor, slack: Tensor) -> int:
    """Values that aren't the nearest level of their group's scale, and groups that another scale would serve better.

    The least scale that holds a group without clipping is the published choice; half of it is right where its error is
    smaller.
    """
    unit, (most, error) = _unit(scale), (x.unflatten(-1, (-1, 32)).amax(-1) for x in (wanted.abs(), slack))
    too_small, too_large = most - error > 12 * unit, (most + error <= 3 * unit) & (scale > 0)
    bad_scale = too_small | (too_large & ~((most <= error) & (scale == 127)))
    clipped = most - error > 6 * unit
    bad_scale |= clipped & (_error(wanted, unit) > _error(wanted, 2 * unit) + _error_slack(slack, unit))
    unit, bad_scale = (x.repeat_interleave(32, dim=-1) for x in (unit, bad_scale))
    distance = (_decoded(packed, scale) - wanted).abs()
    return int((distance > _nearest(wanted, unit) + slack).logical_or(bad_scale).sum())


def _nearest(wanted: Tensor, unit: Tensor) -> Tensor:
    """Distance to the nearest level."""
    return torch.stack([(wanted.abs() - level * unit).abs() for level in _LEVELS]).amin(0)


def _error(wanted: Tensor, unit: Tensor) -> Tensor:
    """Squared error of each group at that scale."""
    return _nearest(wanted, unit.repeat_interleave(32, dim=-1)).square().unflatten(-1, (-1, 32)).sum(-1)


def _error_slack(slack: Tensor, unit: Tensor) -> Tensor:
    """How far the two errors may be apart because the sum was taken in float32."""
    return 32 * 2 * 12 * unit * slack.unflatten(-1, (-1, 32)).amax(-1)
