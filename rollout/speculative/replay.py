"""ReplaySSM (spec 6.6): instead of a state for each drafted position, keep what moves the state, and replay it.

Verify records of each position and layer the raw key and value, log decay, beta and convolution input. Once it is known
how many positions a request keeps, `fold_` moves its state and windows on, all layers and heads at once, by decode's
own operations on the very numbers that verify used: the result is the state that decode would have, bit for bit.

Shapes: T positions of a verify, B requests, L KDA layers, S slots, N heads, K and V channels, D three times the KDA
width, W convolution width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.k3.ops.decode import kda_advance_
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.cache.layout import Layout
from miles_k3.rollout.speculative.verify import VerifySteps

FOLD_BYTES = 1 << 26  # states that a fold holds outside of their slots at once; one request's where that is more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayBuffer:
    """Room for the positions of one verify, token by token; made once and written over by the next."""

    raw_TLD: Tensor
    k_TLNK: Tensor
    v_TLNV: Tensor
    g_TLNK: Tensor  # fp32, as beta
    beta_TLN: Tensor
    on_kernels: bool = False

    @classmethod
    def for_layout(
        cls, layout: Layout, positions: int, device: torch.device, *, on_kernels: bool = False
    ) -> ReplayBuffer:
        """For so many positions of all requests together; nothing is initialised. `on_kernels`: the fold must be that
        of the kernels that decode and verify, to be equal bit for bit."""
        t, l, n, d = positions, layout.kda_layers, layout.heads, layout.head_dim
        make = torch.empty
        return cls(
            raw_TLD=make(t, l, 3 * n * d, dtype=layout.dtype, device=device),
            k_TLNK=make(t, l, n, d, dtype=layout.dtype, device=device),
            v_TLNV=make(t, l, n, d, dtype=layout.dtype, device=device),
            g_TLNK=make(t, l, n, d, device=device), beta_TLN=make(t, l, n, device=device), on_kernels=on_kernels,
        )  # fmt: skip

    def record(self, layer: int, raw_TD: Tensor, k_TNK: Tensor, v_TNV: Tensor, g_TNK: Tensor, beta_TN: Tensor) -> None:
        """What layer `layer` of the KDA layers was given. Raises EngineError where it doesn't fit."""
        pairs = list(zip(self._parts, (raw_TD, k_TNK, v_TNV, g_TNK, beta_TN), strict=True))
        if len(raw_TD) > len(self.raw_TLD):
            raise EngineError(
                f"a verify of {len(raw_TD)} positions, room for {len(self.raw_TLD)}: make a larger buffer"
            )
        if bad := [(x.dtype, buffer.dtype) for buffer, x in pairs if x.dtype != buffer.dtype]:
            raise EngineError(f"a replay keeps numbers as they are: got {bad[0][0]}, the buffer holds {bad[0][1]}")
        for buffer, x in pairs:
            buffer[: len(x), layer] = x

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.raw_TLD, self.k_TLNK, self.v_TLNV, self.g_TLNK, self.beta_TLN

    def fold_(
        self,
        states_LSNKV: Tensor,
        windows_LSWD: Tensor,
        slots: Sequence[int],
        kept: Sequence[int],
        steps: VerifySteps,
    ) -> None:
        """Move each request's slot on by the first `kept` positions of its verify, 0 to all of them, in place.

        Records behind them are never read. Raises EngineError for a count out of range or a slot named twice.
        """
        if bad := [(n, most) for n, most in zip(kept, steps.lengths, strict=True) if not 0 <= n <= most]:
            raise EngineError(f"can't keep {bad[0][0]} of {bad[0][1]} verified positions")
        if len(set(slots)) != len(steps.lengths):
            raise EngineError(f"{len(steps.lengths)} requests need as many slots, got {list(slots)}")
        if self.on_kernels:
            slots_B, kept_B = put(slots, states_LSNKV.device), put(kept, states_LSNKV.device)
            self.fold_rows_(states_LSNKV, windows_LSWD, slots_B, steps.packed.cu_seqlens[:-1], kept_B)
            return
        order = [b for b in sorted(range(len(kept)), key=lambda b: -kept[b]) if kept[b]]
        per_request = states_LSNKV[:, 0].numel() * states_LSNKV.element_size()
        size = max(1, FOLD_BYTES // per_request)
        cu = steps.packed.cu_seqlens.tolist()
        for start in range(0, len(order), size):
            members = order[start : start + size]
            slots_B = put([slots[b] for b in members], states_LSNKV.device)
            firsts, counts = [cu[b] for b in members], [kept[b] for b in members]
            self._fold_states(states_LSNKV.transpose(0, 1), slots_B, firsts, counts)
            self._roll_windows(windows_LSWD.transpose(0, 1), slots_B, firsts, counts)

    def fold_rows_(
        self, states_LSNKV: Tensor, windows_LSWD: Tensor, slots_B: Tensor, firsts_B: Tensor, kept_B: Tensor
    ) -> None:
        """The same by the kernels, of numbers on the device: no shape depends on them. Negative slots are padding."""
        from miles_k3.k3.kernels.kda_verify import kda_fold_  # Triton is not everywhere

        kda_fold_(states_LSNKV, windows_LSWD, slots_B, firsts_B, kept_B, self)

    def _fold_states(self, states_SLNKV: Tensor, slots_B: Tensor, firsts: list[int], counts: list[int]) -> None:
        """`counts` descend, so that who is still there at a step comes first."""
        state = states_SLNKV.index_select(0, slots_B)
        for j in range(counts[0]):
            rows = put([first + j for first, count in zip(firsts, counts, strict=True) if count > j], state.device)
            k, v, g, beta = (x.index_select(0, rows) for x in (self.k_TLNK, self.v_TLNV, self.g_TLNK, self.beta_TLN))
            kda_advance_(k, v, g, beta, state[: len(rows)])
        states_SLNKV.index_copy_(0, slots_B, state)

    def _roll_windows(self, windows_SLWD: Tensor, slots_B: Tensor, firsts: list[int], counts: list[int]) -> None:
        old_BLWD = windows_SLWD.index_select(0, slots_B)
        new_BLWD = old_BLWD.clone()
        taps = old_BLWD.shape[2]
        for i, (first, count) in enumerate(zip(firsts, counts, strict=True)):
            fresh = min(count, taps)
            new_BLWD[i, :, : taps - fresh] = old_BLWD[i, :, fresh:]
            new_BLWD[i, :, taps - fresh :] = self.raw_TLD[first + count - fresh : first + count].transpose(0, 1)
        windows_SLWD.index_copy_(0, slots_B, new_BLWD)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBytes:
    """Bytes that one request's verify of so many positions holds until it is known which are kept."""

    replay: int
    snapshots: int  # a state and a convolution window after each position

    @classmethod
    def of(cls, layout: Layout, positions: int) -> WindowBytes:
        """All KDA layers and heads of one rank; divide by `layout.kda_layers * layout.heads` for one head."""
        d, size = layout.head_dim, layout.dtype.itemsize
        step = 3 * d * size + 2 * d * size + 4 * d + 4  # convolution inputs; key and value; log decay; beta
        state = 4 * d * d + (layout.conv_width - 1) * 3 * d * size
        heads = layout.kda_layers * layout.heads * positions
        return cls(replay=heads * step, snapshots=heads * state)
