"""Which activations are kept for the backward and which are computed again.

The base is frozen, so the first layer's input needs no gradient; torch's non-reentrant checkpoint doesn't mind. It runs
the whole forward again, not just up to the last tensor it needs: a rank that stopped early would miss collectives that
its peers wait in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

Bank = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Recompute:
    """`layers`: keep only each layer's inputs; `sublayers`: do so for these parts of a layer."""

    layers: bool = False
    sublayers: tuple[str, ...] = ()

    @classmethod
    def of(cls, mode: str, sublayers: tuple[str, ...]) -> Recompute:
        """From the recipe's `trainer.recompute` and `trainer.recompute_sublayers`."""
        return cls(layers=mode == "full", sublayers=sublayers if mode == "selective" else ())

    def layer(self, run: Callable[..., tuple[Tensor, Bank]], prefix: Tensor, bank: Bank, stream: Any) -> Any:
        return _again(run, prefix, bank, stream) if self.layers else run(prefix, bank, stream)

    def sublayer(self, name: str, run: Callable[..., Tensor], prefix: Tensor, bank: Bank, stream: Any) -> Tensor:
        return _again(run, prefix, bank, stream) if name in self.sublayers else run(prefix, bank, stream)


def _again(run: Callable[..., Any], *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return run(*inputs)
    with set_checkpoint_early_stop(False):
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing here is random
