"""What rounding leaves of an adapter's delta: measured on every weight while it is merged, summed by kind of layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from miles_k3.k3.ops import mxfp4

# From each E2M1 level to the next one outwards (the scale doubles beyond 6) and inwards, in units of the scale.
_OUTWARDS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0)
_INWARDS = (0.5, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0)


@dataclass(slots=True)
class Loss:
    """Sums over weights w with delta d that were stored as v.

    `energy`: d²; `below`: d² where |d| is less than half the step from w's code to the next one in d's direction, so
    that it vanishes where nothing else in its group moves; `error`: (v - w - d)²; `along`: (v - w) d, whose share of
    `energy` is how much of the delta's direction survived. `rescaled`: groups of 32 whose scale changed.
    """

    numbers: int = 0
    changed: int = 0
    energy: float = 0.0
    below: float = 0.0
    error: float = 0.0
    along: float = 0.0
    groups: int = 0
    rescaled: int = 0

    def add(self, other: Loss) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def shares(self) -> dict[str, float]:
        """The sums as shares: of the delta's energy, of the numbers, of the groups."""
        energy = self.energy or 1.0
        return {
            "below_half_step": self.below / energy,
            "error": self.error / energy,
            "kept": self.along / energy,
            "numbers_changed": self.changed / max(self.numbers, 1),
            "groups_rescaled": self.rescaled / max(self.groups, 1),
        }


class Losses(dict[str, Loss]):
    """By kind of layer."""

    def note(self, kind: str, loss: Loss) -> None:
        self.setdefault(kind, Loss()).add(loss)

    def take(self) -> dict[str, dict[str, float]]:
        """What was noted since the last call, as JSON."""
        taken = {kind: asdict(loss) for kind, loss in self.items()}
        self.clear()
        return taken

    @classmethod
    def merged(cls, notes: Iterable[Mapping[str, Mapping[str, float]]]) -> Losses:
        out = cls()
        for note in notes:
            for kind, sums in note.items():
                out.note(kind, Loss(**sums))  # type: ignore[arg-type]
        return out

    def total(self) -> Loss:
        out = Loss()
        for loss in self.values():
            out.add(loss)
        return out


def bf16_loss(base: Tensor, delta: Tensor, stored: Tensor) -> Loss:
    """`base` fp32 that BF16 holds, `delta` fp32, `stored` what was written, as fp32."""
    _, exponent = torch.frexp(base)
    half = torch.ldexp(torch.ones_like(base), exponent.clamp(min=-125) - 9)  # BF16 has 8 bits: a step is 2^(e - 8)
    return _loss(base, delta, stored, torch.where(base == 0, 0.0, half))


def mxfp4_loss(base: Tensor, delta: Tensor, packed: Tensor, scale: Tensor) -> Loss:
    """`base` and `delta` fp32 [rows, D]; `packed` and `scale` what was written for their sum."""
    base_packed, base_scale = mxfp4.quantize(base)
    codes = (mxfp4.unpack_codes(base_packed) & 7).int()
    outwards = torch.tensor(_OUTWARDS)[codes]
    inwards = torch.tensor(_INWARDS)[codes]
    step = torch.where(delta * base >= 0, outwards, inwards)
    one = torch.ones_like(base_scale, dtype=torch.float32)
    group = torch.ldexp(one, base_scale.int() - mxfp4.SCALE_BIAS).repeat_interleave(32, dim=-1)
    empty = (base.unflatten(-1, (-1, 32)) == 0).all(-1).repeat_interleave(32, dim=-1)  # takes the delta's own scale
    loss = _loss(base, delta, mxfp4.dequantize(packed, scale), torch.where(empty, 0.0, step * group / 2))
    loss.groups, loss.rescaled = scale.numel(), int((scale != base_scale).sum())
    return loss


def _loss(base: Tensor, delta: Tensor, stored: Tensor, half_step: Tensor) -> Loss:
    square = delta.double().square()
    moved = stored - base
    return Loss(
        numbers=base.numel(),
        changed=int((moved != 0).sum()),
        energy=float(square.sum()),
        below=float(square[delta.abs() < half_step].sum()),
        error=float((moved - delta).double().square().sum()),
        along=float((moved.double() * delta).sum()),
    )
