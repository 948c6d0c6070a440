"""The adapters of one step: which live versions its tokens belong to, and their deltas.

Shapes: T tokens, R slot rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.adapters.store import BASE_SLOT, AdapterSlot, AdapterStore, Factors
from miles_k3.k3.ops.lora import ExpertLoraTerm
from miles_k3.rollout.cache.device import put

EXPERTS = "block_sparse_moe.experts."


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """Adapter slots with the tokens they speak for: bool [T, 1], or None for every token of the step.

    `slot_T` int32 says the same by token: its place in `parts`, or -1.
    """

    parts: tuple[tuple[AdapterSlot, Tensor | None], ...] = ()
    slot_T: Tensor | None = None

    @classmethod
    def of(
        cls, store: AdapterStore, versions: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> StepAdapters:
        """`versions[i]` made the next `counts[i]` tokens; BASE_VERSION's tokens get no delta."""
        distinct = sorted(set(versions))
        slots = [(version, store.slot_index_of(version)) for version in distinct]
        if len(slots) == 1:
            index = slots[0][1]
            if index == BASE_SLOT:
                return cls()
            store.slots[index].wait()
            return cls(((store.slots[index], None),), torch.zeros(sum(counts), dtype=torch.int32, device=device))
        adapted = [(version, store.slots[index]) for version, index in slots if index != BASE_SLOT]
        place = {version: i for i, (version, _) in enumerate(adapted)}
        places = torch.tensor([place.get(version, -1) for version in versions], dtype=torch.int32)
        return cls.by_token([slot for _, slot in adapted], put(places.repeat_interleave(torch.tensor(counts)), device))

    @classmethod
    def by_token(cls, slots: Sequence[AdapterSlot], slot_T: Tensor) -> StepAdapters:
        """`slot_T` int32: each token's place in `slots`, negative for the bare base."""
        for slot in slots:
            slot.wait()
        return cls(tuple((slot, (slot_T == i).unsqueeze(1)) for i, slot in enumerate(slots)), slot_T)

    @property
    def scalings(self) -> list[float]:
        return [slot.scaling for slot, _ in self.parts]

    def factors(self, layer: int, module: str) -> list[Factors]:
        """A module's (A, B) in each part's adapter."""
        return [slot.layers[layer][module] for slot, _ in self.parts]

    def add_(self, y_TO: Tensor, x_TI: Tensor, layer: int, module: str) -> Tensor:
        """y += (alpha / r) B (A x) for the tokens of each part, in place."""
        for slot, rows_T1 in self.parts:
            a, b = slot.layers[layer][module]
            y_TO.addmm_(_low(x_TI, a, rows_T1), b.t(), alpha=slot.scaling)
        return y_TO

    def add_gate_up_(self, y_T2F: Tensor, x_TH: Tensor, layer: int, prefix: str) -> Tensor:
        """Both halves of a fused gate/up projection; a shared A is multiplied once."""
        gate, up = y_T2F.chunk(2, dim=-1)
        for slot, rows_T1 in self.parts:
            factors = slot.layers[layer]
            (a_gate, b_gate), (a_up, b_up) = factors[prefix + "gate_proj"], factors[prefix + "up_proj"]
            low = _low(x_TH, a_gate, rows_T1)
            gate.addmm_(low, b_gate.t(), alpha=slot.scaling)
            if slot.config is None or not slot.config.share_gate_up_a:
                low = _low(x_TH, a_up, rows_T1)
            up.addmm_(low, b_up.t(), alpha=slot.scaling)
        return y_T2F

    def expert_terms(self, layer: int) -> list[ExpertLoraTerm]:
        """The routed experts' factors of a layer."""
        terms = []
        for slot, rows_T1 in self.parts:
            (a1, b1), (a2, b2), (a3, b3) = (slot.layers[layer][f"{EXPERTS}w{n}"] for n in (1, 2, 3))
            terms.append(
                ExpertLoraTerm(a1=a1[0], b1=b1, a3=a3[0], b3=b3, a2=a2, b2=b2[0], scaling=slot.scaling, rows_T1=rows_T1)
            )
        return terms


def _low(x_TI: Tensor, a_RI: Tensor, rows_T1: Tensor | None) -> Tensor:
    low_TR = x_TI @ a_RI.t()
    return low_TR if rows_T1 is None else torch.where(rows_T1, low_TR, 0.0)
