"""What rounding leaves of an adapter's delta: measured on every weight while it is merged, summed by kind of layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from miles_k3.k3.ops import mxfp4


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
    return _loss(base, delta, stored, half.masked_fill_(base == 0, 0.0))


def mxfp4_loss(base: Tensor, delta: Tensor, packed: Tensor, scale: Tensor) -> Loss:
    """`base` and `delta` fp32 [rows, D]; `packed` and `scale` what was written for their sum."""
    exponent = mxfp4.scale_exponent(base.unflatten(-1, (-1, 32)).abs().amax(-1))
    unit = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    size = mxfp4.nearest_level((base.unflatten(-1, (-1, 32)) / unit.unsqueeze(-1)).abs_())
    # To the next level: outwards (beyond 6 the scale doubles) its octave's step, inwards that of the octave below.
    outwards = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    inwards = torch.where(size <= 2, 0.5, torch.where(size <= 4, 1.0, 2.0))
    half = torch.where((delta * base >= 0).view_as(size), outwards, inwards).mul_(unit.unsqueeze(-1) / 2)
    half.masked_fill_((base.unflatten(-1, (-1, 32)) == 0).all(-1, keepdim=True), 0.0)  # takes the delta's own scale
    loss = _loss(base, delta, mxfp4.dequantize(packed, scale), half.flatten(-2))
    loss.groups, loss.rescaled = scale.numel(), int((scale.int() != exponent + mxfp4.SCALE_BIAS).sum())
    return loss


def _loss(base: Tensor, delta: Tensor, stored: Tensor, half_step: Tensor) -> Loss:
    square, moved = delta.square(), stored - base
    return Loss(
        numbers=base.numel(),
        changed=int(moved.count_nonzero()),
        energy=_sum(square),
        below=_sum(square.mul_(delta.abs() < half_step)),
        along=_sum(moved * delta),
        error=_sum(moved.sub_(delta).square_()),
    )


def _sum(values: Tensor) -> float:
    """Rows in float32, their sums in float64."""
    return float(values.sum(-1).double().sum())
