"""Steps of the engine as CUDA graphs: decoding, verifying, drafting.

A graph belongs to a tier, a padded number of requests or rows, and to the adapter slots and drafts that its requests
use. It reads its batch from tensors that stay where they are and are filled by one copy; adapters and drafts are read
from where they are swapped in place, so that a new version needs no new graph. Padding has no state, no page and no
adapter: it writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from miles_k3.rollout.embedded.fused.graphs.decode import DecodeGraphs
from miles_k3.rollout.embedded.fused.graphs.draft import DraftGraphs
from miles_k3.rollout.embedded.fused.graphs.members import GraphParts
from miles_k3.rollout.embedded.fused.graphs.recording import Recorder
from miles_k3.rollout.embedded.fused.graphs.rounds import Rounds
from miles_k3.rollout.embedded.fused.graphs.verify import VerifyGraphs
from miles_k3.rollout.embedded.request import Request

__all__ = ["GraphParts", "Recorder", "StepGraphs"]


class StepGraphs:
    """All of one engine's."""

    def __init__(self, parts: GraphParts) -> None:
        self._recorder, speculator = parts.recorder, parts.speculator
        self.decode = DecodeGraphs(parts)
        self.verify = None if speculator is None else VerifyGraphs(parts, speculator)
        self.draft = None if speculator is None else DraftGraphs(parts)
        self.rounds = None
        if speculator is not None and self.verify is not None:
            self.rounds = Rounds(self.verify, speculator, parts.memory)

    @property
    def num_recorded(self) -> int:
        """Since the start."""
        return self._recorder.count

    def takes(self, requests: Sequence[Request], limits_R: NDArray[np.int64] | None) -> bool:
        """Whether a step of these is replayed, in which so many tokens of each may be drafted (None: nobody asks)."""
        if not self.decode.takes(requests):
            return False
        verifies = limits_R is not None and bool(limits_R.any())
        return not verifies or (self.verify is not None and self.verify.takes(requests))

    def forget(self) -> None:
        """Drop every graph: the cache's memory is about to go, and its addresses with it."""
        for graphs in (self.decode, self.verify, self.draft):
            if graphs is not None:
                graphs.forget()
        self._recorder.forget()
