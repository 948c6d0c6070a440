"""Holds every commit of an engine against decode, one step at a time: states and windows, bit for bit.

Before a verify the states and windows of its requests are copied. After its commit the tokens that were kept are
decoded from the copies by decode's own operations, one by one and each request alone, with the inputs that verify
recorded of the layer. What these inputs are worth, a whole forward, is not judged here: its products round by their
number of rows, and are held against plain decoding by tokens and log-probabilities. On kernels, whose decode takes
inputs that verify doesn't keep, a step is a fold of one position; that this is decode is a test of the kernels' own.

Shapes: L KDA layers, B requests, N heads, K and V channels, W convolution width, D three times the KDA width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_k3.k3.ops.decode import kda_step_, short_conv_step_
from miles_k3.rollout.cache.device import put
from miles_k3.rollout.cache.memory import BlockPool
from miles_k3.rollout.speculative.replay import ReplayBuffer


@dataclass(slots=True, eq=False)
class CommitAudit:
    """`weights[l]`: convolution weights of KDA layer l. Counts commits, requests that kept so many positions, and those
    whose state or window isn't decode's."""

    weights: Sequence[Tensor]
    commits: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    wrong: int = 0
    _before: tuple[Tensor, Tensor] | None = None

    def before(self, pool: BlockPool, rows: Sequence[int]) -> None:
        """Of the requests whose slots are at `rows`, ahead of the verify's forward."""
        at = list(rows)
        self._before = pool.states[:, at].clone(), pool.windows[:, at].clone()

    def after(
        self, pool: BlockPool, rows: Sequence[int], kept: Sequence[int], firsts: Sequence[int], replay: ReplayBuffer
    ) -> None:
        """The same requests, committed; `firsts` are their first positions in `replay`."""
        assert self._before is not None
        states_LBNKV, windows_LBWD = self._before
        self.commits += 1
        for b, (row, count) in enumerate(zip(rows, kept, strict=True)):
            state, window = states_LBNKV[:, b : b + 1], windows_LBWD[:, b : b + 1]
            for t in range(firsts[b], firsts[b] + count):
                if replay.on_kernels:
                    replay.fold_rows_(state, window, *(put([n], pool.device) for n in (0, t, 1)))
                    continue
                for layer, weight in enumerate(self.weights):
                    self._decode(replay, layer, t, weight, state[layer], window[layer])
            same = _same(pool.states[:, row], state[:, 0]) and _same(pool.windows[:, row], window[:, 0])
            self.kept[count] = self.kept.get(count, 0) + 1
            self.wrong += not same
        self._before = None

    def _decode(
        self, replay: ReplayBuffer, layer: int, t: int, weight_D1W: Tensor, state: Tensor, window: Tensor
    ) -> None:
        one = slice(t, t + 1)
        heads = replay.k_TLNK.shape[2]
        y = short_conv_step_(replay.raw_TLD[one, layer], weight_D1W, window)
        q, k, v = y.view(1, 3, heads, -1).unbind(1)
        kda_step_(q, k, v, replay.g_TLNK[one, layer], replay.beta_TLN[one, layer], state)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
