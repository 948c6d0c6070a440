"""What a confidence is worth: how often drafted tokens of about that confidence were accepted, by position.

Only positions that were reached count: all before them accepted, they themselves verified. Which positions are verified
depends on confidences alone, so trimming doesn't bend the rates within a bin.
Shapes: R requests, G positions of a block, E bins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_k3.errors import EngineError
from miles_k3.rollout.speculative.planner.isotonic import isotonic

BINS = 20
GOOD = 0.9  # acceptance of a position that is hardly known
PRIOR = 8.0  # what is believed of a bin, or a position, before any observation counts as so many
ROOM = 2.0  # that there is room for all of a block, as so many blocks


@dataclass(slots=True, kw_only=True)
class Calibration:
    """Isotonic, per position. Without observations a confidence stands for itself.

    `room_G` counts blocks, of `blocks` in all, of which a position could be committed at all: answers end.
    """

    block_size: int
    reached_GE: NDArray[np.float64] = field(init=False)
    accepted_GE: NDArray[np.float64] = field(init=False)
    room_G: NDArray[np.float64] = field(init=False)
    blocks: int = field(init=False, default=0)
    rounds: int = field(init=False, default=0)  # that changed what is believed
    _fits: dict[int, NDArray[np.float64]] = field(init=False, default_factory=dict)  # by position

    def __post_init__(self) -> None:
        self.reached_GE = np.zeros((self.block_size, BINS))
        self.accepted_GE = np.zeros((self.block_size, BINS))
        self.room_G = np.zeros(self.block_size)

    def observe(
        self, confidence_RG: NDArray[np.float64], verified_R: NDArray[np.int64], accepted_R: NDArray[np.int64]
    ) -> None:
        """One round: how many drafted tokens of each request were verified, and how many of those accepted."""
        if confidence_RG.shape[1] != self.block_size or (accepted_R > verified_R).any():
            raise EngineError(
                f"a round of blocks of {confidence_RG.shape[1]} (expected {self.block_size}), with up to "
                f"{int((accepted_R - verified_R).max(initial=0))} tokens more accepted than verified"
            )
        bins_RG = _bins(confidence_RG)
        for k in range(self.block_size):
            reached = (verified_R > k) & (accepted_R >= k)
            if not reached.any():
                break  # nor any position behind it
            np.add.at(self.reached_GE[k], bins_RG[reached, k], 1.0)
            np.add.at(self.accepted_GE[k], bins_RG[reached & (accepted_R > k), k], 1.0)
            self._fits.pop(k, None)
        self.rounds += 1

    def __call__(self, confidence_RG: NDArray[np.float64]) -> NDArray[np.float64]:
        """Calibrated acceptance of each position given that all before it are accepted: [R, G] in [0, 1]."""
        for k in set(range(self.block_size)) - self._fits.keys():
            self._fits[k] = self._fit(k)
        centres = _centres()
        columns = [np.interp(confidence_RG[:, k], centres, self._fits[k]) for k in range(self.block_size)]
        return np.stack(columns, axis=1)

    def rates(self) -> NDArray[np.float64]:
        """Mean acceptance by position where it was reached, whatever the confidence: [G].

        What is hardly known counts as good: taken for bad, it would never be tried.
        """
        reached, accepted = self.reached_GE.sum(1), self.accepted_GE.sum(1)
        return (accepted + GOOD * PRIOR) / (reached + PRIOR)

    def observe_room(self, limits_R: NDArray[np.int64]) -> None:
        """Of drafted blocks, how many of their first tokens could be committed."""
        self.room_G += (limits_R[:, None] > np.arange(self.block_size)).sum(0)
        self.blocks += len(limits_R)
        self.rounds += 1

    def room(self) -> NDArray[np.float64]:
        """Share of blocks of which each position could be committed: [G]. Unknown counts as all."""
        return (self.room_G + ROOM) / (self.blocks + ROOM)

    def _fit(self, k: int) -> NDArray[np.float64]:
        weights = self.reached_GE[k] + PRIOR
        means = (self.accepted_GE[k] + PRIOR * _centres()) / weights
        return np.array(isotonic(means.tolist(), weights.tolist()))

    def to_json(self) -> dict[str, Any]:
        return {"reached": self.reached_GE.tolist(), "accepted": self.accepted_GE.tolist()}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Calibration:
        """Raises EngineError where the counts aren't those of a calibration."""
        reached, accepted = (np.array(saved.get(name, []), dtype=np.float64) for name in ("reached", "accepted"))
        if reached.ndim != 2 or reached.shape != accepted.shape or reached.shape[1] != BINS:
            raise EngineError(f"no calibration: counts {reached.shape}, {accepted.shape}; expected [G, {BINS}] twice")
        out = cls(block_size=len(reached))
        out.reached_GE, out.accepted_GE = reached, accepted
        return out


def _bins(confidence: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.clip((confidence * BINS).astype(np.int64), 0, BINS - 1)


def _centres() -> NDArray[np.float64]:
    return (np.arange(BINS) + 0.5) / BINS
