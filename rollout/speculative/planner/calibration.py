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
STALE = 0.02  # so much more may have been seen than what is believed is made of
ROOM = 2.0  # that there is room for all of a block, as so many blocks


@dataclass(slots=True, kw_only=True)
class Calibration:
    """Isotonic, per position. Without observations a confidence stands for itself; the first ones move all of a
    position's confidences up or down, and those of positions behind it half as much, since a draft that is too modest
    would else not be believed before each bin has been tried.

    `room_G` counts blocks, of `blocks` in all, of which a position could be committed at all: answers end.
    """

    block_size: int
    reached_GE: NDArray[np.float64] = field(init=False)
    accepted_GE: NDArray[np.float64] = field(init=False)
    room_G: NDArray[np.float64] = field(init=False)
    blocks: int = field(init=False, default=0)
    rounds: int = field(init=False, default=0)  # that changed what is believed
    _fits: NDArray[np.float64] | None = field(init=False, default=None)  # [G, E], once asked for
    _fitted_of: float = field(init=False, default=0.0)

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
        at_G = np.arange(self.block_size)
        reached_RG = (verified_R[:, None] > at_G) & (accepted_R[:, None] >= at_G)
        places_RG = at_G * BINS + _bins(confidence_RG)
        for counts_GE, counted_RG in (
            (self.reached_GE, reached_RG),
            (self.accepted_GE, reached_RG & (accepted_R[:, None] > at_G)),
        ):
            counts_GE += np.bincount(places_RG[counted_RG], minlength=counts_GE.size).reshape(counts_GE.shape)
        if self.reached_GE.sum() > (1 + STALE) * self._fitted_of:
            self._fits = None
        self.rounds += 1

    def __call__(self, confidence_RG: NDArray[np.float64]) -> NDArray[np.float64]:
        """Calibrated acceptance of each position given that all before it are accepted: [R, G] in [0, 1]."""
        if self._fits is None:
            self._fits = self._fitted()
        # Linear between the bins' centres, which are evenly spaced; outside of them the nearest one's.
        place_RG = np.clip(confidence_RG * BINS - 0.5, 0.0, BINS - 1.0)
        low_RG = np.minimum(place_RG.astype(np.int64), BINS - 2)
        share_RG, at_G = place_RG - low_RG, np.arange(self.block_size)
        return (1.0 - share_RG) * self._fits[at_G, low_RG] + share_RG * self._fits[at_G, low_RG + 1]

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

    def _fitted(self) -> NDArray[np.float64]:
        centres_E, self._fitted_of = _centres(), float(self.reached_GE.sum())
        reached_G, accepted_G = self.reached_GE.sum(1).tolist(), self.accepted_GE.sum(1).tolist()
        expected_G = (self.reached_GE @ centres_E).tolist()
        prior_GE = np.tile(centres_E, (self.block_size, 1))
        count = expected = accepted = 0.0  # of a position, and half of what was seen before it
        for k in range(self.block_size):
            count = count / 2 + reached_G[k]
            expected = expected / 2 + expected_G[k]
            accepted = accepted / 2 + accepted_G[k]
            if count:
                mean = expected / count
                prior_GE[k] = _moved(centres_E, mean, (accepted + PRIOR * mean) / (count + PRIOR))
        weights_GE = self.reached_GE + PRIOR
        found_GE = (self.accepted_GE + PRIOR * prior_GE) / weights_GE
        pairs = zip(found_GE.tolist(), weights_GE.tolist(), strict=True)
        return np.array([isotonic(found_E, weights_E) for found_E, weights_E in pairs])

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


def _moved(chance_E: NDArray[np.float64], mean: float, to: float) -> NDArray[np.float64]:
    """Chances of this mean scaled to another one: their failures where it is higher, so that none passes 1."""
    return chance_E * (to / mean) if to < mean else 1.0 - (1.0 - chance_E) * ((1.0 - to) / (1.0 - mean))


def _bins(confidence: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.clip((confidence * BINS).astype(np.int64), 0, BINS - 1)


def _centres() -> NDArray[np.float64]:
    return (np.arange(BINS) + 0.5) / BINS
