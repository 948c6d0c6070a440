"""KDA's state across context-parallel ranks: who continues whose sequence, and the folds that say with which state.

A rank's end state is linear in the state it starts from: S_end = M S_start + E, with E the end state from zero and M
the product of the chunks' transitions. Each rank gathers all ranks' [E | M] and folds those before it (spec 4.4). On
the way back the gradients fold from behind, with the transposed M.
Shape legend: N heads, K key channels, V value channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from miles_k3.trainer.distributed import Axis
from miles_k3.trainer.model.collectives import all_gather_states
from miles_k3.trainer.model.context import TokenLayout


@dataclass(frozen=True, slots=True, eq=False)
class StateHandover:
    """`before`: ranks, oldest first, whose tokens precede this slice in its first sequence; `after`: those that go on
    with its last one, nearest first."""

    before: range
    after: range
    cp: Axis

    @classmethod
    def of(cls, layout: TokenLayout) -> StateHandover | None:
        """None where no sequence crosses from one slice to the next, on any rank."""
        each, cp = layout.num_local, layout.cp
        if all(edge in layout.cu_seqlens for edge in range(each, layout.num_padded, each)):
            return None
        start, stop = cp.rank * each, (cp.rank + 1) * each
        first, last = layout.sequence_at(start)[0] // each, (layout.sequence_at(stop - 1)[1] - 1) // each
        return cls(range(first, cp.rank), range(cp.rank + 1, last + 1), cp)

    @property
    def spans(self) -> bool:
        """Whether one sequence goes through this whole slice and beyond both its ends."""
        return bool(self.before) and bool(self.after)

    def incoming(self, end_NKV: Tensor, transition_NKK: Tensor) -> Tensor | None:
        """The state that this rank's first sequence starts from, [N, K, V]; None where it starts here. Collective."""
        value_dim = end_NKV.shape[-1]
        ends, transitions = self._exchange(end_NKV, transition_NKK).tensor_split([value_dim], dim=-1)
        if not self.before:
            return None
        state = ends[self.before[0]]
        for rank in self.before[1:]:
            state = transitions[rank] @ state + ends[rank]
        return state

    def outgoing(self, d_start_NKV: Tensor, transition_NKK: Tensor) -> Tensor | None:
        """The gradient of this rank's last end state, [N, K, V], from each rank's gradient of its own starting state
        with nothing coming back to it from behind; None where the sequence ends here. Collective."""
        value_dim = d_start_NKV.shape[-1]
        d_starts, transitions = self._exchange(d_start_NKV, transition_NKK).tensor_split([value_dim], dim=-1)
        if not self.after:
            return None
        grad = d_starts[self.after[-1]]
        for rank in reversed(self.after[:-1]):
            grad = transitions[rank].transpose(-1, -2) @ grad + d_starts[rank]
        return grad

    def _exchange(self, states: Tensor, transitions: Tensor) -> Tensor:
        """[ranks, N, K, V + K]."""
        packed = states.new_empty(*states.shape[:-1], states.shape[-1] + transitions.shape[-1])
        packed[..., : states.shape[-1]] = states
        packed[..., states.shape[-1] :] = transitions
        return all_gather_states(packed, self.cp)
