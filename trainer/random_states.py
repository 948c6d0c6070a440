"""A process's random states, out as tensors and texts, and in."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_k3.trainer.mcore import get_cuda_rng_tracker

_TRACKER = "megatron/"


def _tracker() -> Any:
    """Megatron's states, made when the groups came up."""
    return get_cuda_rng_tracker()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RandomStates:
    """torch's, CUDA's and megatron's states as uint8 tensors by name; Python's and numpy's as JSON by name."""

    tensors: Mapping[str, Tensor]
    texts: Mapping[str, str]

    @classmethod
    def now(cls) -> RandomStates:
        tensors = {"torch": torch.get_rng_state()}
        tensors |= {_TRACKER + name: state for name, state in _tracker().get_states().items()}
        if torch.cuda.is_available():
            tensors["cuda"] = torch.cuda.get_rng_state()
        drawn: Any = np.random.get_state(legacy=False)
        drawn = {**drawn, "state": {**drawn["state"], "key": drawn["state"]["key"].tolist()}}
        texts = {"python": json.dumps(random.getstate()), "numpy": json.dumps(drawn)}
        return cls(tensors={name: state.cpu().clone() for name, state in tensors.items()}, texts=texts)

    def restore(self, *, tracker: bool) -> None:
        """Draw on from here. `tracker`: megatron's states too, which differ from rank to rank of one layout."""
        version, internal, gauss = json.loads(self.texts["python"])
        random.setstate((version, tuple(internal), gauss))
        drawn = json.loads(self.texts["numpy"])
        key = np.array(drawn["state"]["key"], dtype=np.uint32)
        np.random.set_state({**drawn, "state": {**drawn["state"], "key": key}})
        if tracker:
            _tracker().set_states(
                {name.removeprefix(_TRACKER): t for name, t in self.tensors.items() if name.startswith(_TRACKER)}
            )
        if torch.cuda.is_available() and "cuda" in self.tensors:
            torch.cuda.set_rng_state(self.tensors["cuda"])
        torch.set_rng_state(self.tensors["torch"])
