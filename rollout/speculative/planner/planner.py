"""One engine's plan, round by round: for whom to draft, how much of it to verify, whom a draft should follow.

Shapes: R requests, F of them followed, G positions of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles_k3.errors import EngineError
from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.planner.calibration import Calibration
from miles_k3.rollout.speculative.planner.choice import PlanMode, choose, take
from miles_k3.rollout.speculative.planner.cost import CostProfile
from miles_k3.rollout.speculative.planner.drain import Costs, Drain, Worth
from miles_k3.rollout.speculative.planner.experience import MARGIN, Load, about, share_saved
from miles_k3.rollout.speculative.planner.history import History
from miles_k3.rollout.speculative.planner.spent import FOLLOWING, Kind, Prompts, Spent, dearer

WARM = 64  # blocks before promises are judged: at first they are too high
WAVE = 16  # of so many loads' worth of requests that come there, one is followed all the same


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Promise:
    """What a step that drafts for `members_F` should bring: accepted tokens, and its seconds beside a plain step's."""

    members_F: NDArray[np.bool_]
    accepted: float
    longer: float
    warm: bool  # whether enough was known for it
    whole: bool  # whether all of their blocks is verified, without looking at them first


class Planner:
    """Without a profile `trim` verifies everything.

    With `AcceptMode.REJECTION` how many tokens are verified is fixed before the draft's tokens are known, from past
    acceptance; only whose they are goes by confidence. A budget that looks at confidences behind a token depends on the
    token, and then what is committed is no longer the policy's distribution. Coupled acceptance commits the same tokens
    under any plan, so there the budget may look at everything.
    """

    def __init__(
        self, mode: PlanMode, accept: AcceptMode, calibration: Calibration, profile: CostProfile | None = None
    ) -> None:
        self.mode, self.accept, self.calibration, self.profile = mode, accept, calibration, profile
        self._loads: dict[tuple[int, int], Load] = {}
        self._plain_of: CostProfile | None = None
        self._plain_s: dict[int, float] = {}  # of `_plain_of`
        self._spent, self._prompts = Spent(), Prompts()
        self._drain = Drain()
        self._promised: Promise | None = None  # of the step to come
        self._unseen: dict[int, tuple[object, float]] = {}  # what is promised at loads not seen yet, and knowing what
        self._worth = 1.0  # of an accepted token of that step, beside a plain one
        self._worth_following: dict[int, bool] = {}  # by load, until more is known: hundreds may come at once
        self._unpaid = 0  # requests that came at loads where drafting clearly doesn't pay

    # --- whether at all -----------------------------------------------------------------------------------------
    def members(self, requests: int, followed: Sequence[History]) -> NDArray[np.bool_]:
        """For which of the followed requests to draft in a step of so many: [F].

        Those whose accepted tokens should save more than their blocks cost, if all of it together does. What doesn't
        pay is tried again now and then, and so is plain decoding where drafting pays.
        """
        count = len(followed)
        if self.mode is not PlanMode.TRIM or self.profile is None:
            return np.full(count, self.mode is not PlanMode.OFF)
        nobody = np.zeros(count, dtype=bool)
        self._promised = None
        if not count:
            if requests:
                self._load(requests, requests).since += 1
            return nobody
        load = self._load(requests, count)
        if load.drafted.known and not load.plain.known:
            return nobody  # as many plain steps first
        worth_FG = self._usual(followed)
        some = self._promise_to_the_worthy(requests, worth_FG, load)
        gain = self._gain(requests, some, load)
        if count == requests and load.known:
            load.saves(gain)
        pays, again = gain > MARGIN, load.again(gain, some.longer)
        if pays == again:
            return nobody
        if again and not some.members_F.all():
            some = self._promise(requests, worth_FG, np.full(count, True), load)
        self._promised = some
        self._worth = load.worth.value
        return self._promised.members_F

    def _promise_to_the_worthy(self, requests: int, worth_FG: NDArray[np.float64], load: Load) -> Promise:
        """Of drafting for those who are worth it by themselves, or for all, where that should bring more: what a block
        costs hardly depends on one request, and whole blocks may be cheaper."""
        assert self.profile is not None
        of_one = load.worth.value * self._plain(requests) / requests
        size = worth_FG.shape[1]
        seconds_M = self.profile.table(requests, requests * size)
        position = float(seconds_M[-1] - seconds_M[0]) / (requests * size)
        one, all_of_them = self.profile.draft_seconds(1), self.profile.draft_seconds(len(worth_FG))
        block = max(0.0, all_of_them - one) / max(1, len(worth_FG) - 1)
        saved_FG = of_one * np.cumsum(worth_FG, axis=1) - position * np.arange(1, size + 1)
        some = self._promise(requests, worth_FG, saved_FG.max(axis=1) > block, load)
        if some.members_F.all():
            return some
        all_of_it = self._promise(requests, worth_FG, np.full(len(worth_FG), True), load)
        return max(some, all_of_it, key=lambda promise: self._gain(requests, promise, load))

    def _promise(
        self, requests: int, worth_FG: NDArray[np.float64], members_F: NDArray[np.bool_], load: Load
    ) -> Promise:
        assert self.profile is not None
        worth_RG = np.zeros((requests, worth_FG.shape[1]))
        worth_RG[: len(worth_FG)] = load.worth.value * worth_FG * members_F[:, None]
        chosen = choose(worth_RG, self.profile)
        accepted_FG = worth_FG * (np.arange(worth_FG.shape[1]) < chosen.drafted_R[: len(worth_FG), None])
        seconds, at_once = chosen.seconds, self.profile.whole_seconds(requests)
        whole = at_once is not None and (requests + float(worth_RG.sum())) / at_once >= chosen.rate
        if at_once is not None and whole:
            accepted_FG, seconds = worth_FG * members_F[:, None], at_once
        return Promise(
            members_F=members_F, accepted=float(accepted_FG.sum()), longer=seconds / self._plain(requests),
            warm=self.calibration.blocks >= WARM, whole=whole,
        )  # fmt: skip

    def _gain(self, requests: int, promise: Promise, load: Load) -> float:
        """Seconds saved by a step's tokens, beside those that it takes."""
        hits = load.hits.value if load.drafted.known else 1.0
        tokens = requests + load.worth.value * hits * promise.accepted
        return tokens / requests / (load.slower * promise.longer)

    def should_follow(self, load: int, history: History) -> bool:
        """Whether the draft should follow a request that comes when so many run.

        Where drafting saves more of the time at the loads that its answer lives to see than following costs there and
        in the steps that compute its prompt, unless whole batches took longer for it; and a small share of the others,
        in a row, that tells when this changes.
        """
        if self.mode is not PlanMode.TRIM or self.profile is None:
            return self.mode is not PlanMode.OFF
        history.came = about(load)
        self._learn_worth(self._drain.refilled())
        if load not in self._worth_following:
            pays = self._spent.saved(history.came, self._saving, self._prompts.dearer) > 0.0
            self._worth_following[load] = pays and not self._drain.lost(load)
        if self._worth_following[load]:
            return True
        self._unpaid += 1
        return self._unpaid // load % WAVE == WAVE - 1

    def _saving(self, log_load: int) -> float:
        """Share of the time at a load that drafting saves, less what following costs: of late, or else as is promised
        for usual requests."""
        load, requests = self._loads.get((log_load, log_load)), 1 << log_load
        alone = self._loads.get((log_load, -1))
        following = dearer(load.plain, alone.plain) if load is not None and alone is not None else FOLLOWING
        if load is not None and load.seen:
            return load.saving - following
        load = load or Load.of(requests)
        known = self.calibration.rounds, load.worth.value, load.hits.value, load.slower
        if self._unseen.get(log_load, (None, 0.0))[0] != known:
            promise = self._promise_to_the_worthy(requests, self._usual([History()] * requests), load)
            self._unseen[log_load] = known, share_saved(self._gain(requests, promise, load))
        return self._unseen[log_load][1] - following

    def _alone(self, load: int) -> float:
        """Seconds of a step that follows nobody, beside the profile's."""
        followed, alone = self._loads.get((about(load), about(load))), self._loads.get((about(load), -1))
        if alone is not None and alone.plain.known:
            return alone.plain.seconds
        return 1.0 if followed is None or not followed.plain.known else followed.plain.seconds / (1 + FOLLOWING)

    # --- what came of it ----------------------------------------------------------------------------------------
    def observe(
        self, histories: Sequence[History], tokens_R: Sequence[int], followed: int, seconds: float, *, drafted: bool
    ) -> None:
        """A step that did nothing but decode: what it gave each request, of whom so many are followed, and how long it
        took."""
        if self.mode is not PlanMode.TRIM or self.profile is None:
            return
        requests = len(histories)
        self._worth_following.clear()
        plain = self._plain(requests)
        self._spent.decoded(histories, about(requests), self._alone(requests) * plain * sum(tokens_R) / requests)
        load, promised = self._load(requests, followed), self._promised
        self._drain.observe(histories, tokens_R, seconds, followed=followed > 0, known=load.plain.known)
        if promised is None or not drafted:
            load.plain.times.append(seconds / plain)
        else:
            load.drafted.times.append(seconds / plain / promised.longer)
            if promised.accepted and promised.warm:
                load.hits.observe(sum(tokens_R) - requests, promised.accepted)

    def observe_prompts(
        self, prompts: Sequence[tuple[History, int]], decodes: int, seconds: float, *, followed: bool | None
    ) -> None:
        """A step that computed so many tokens of each of these prompts, and drafted nothing; `followed` None: the draft
        follows some of all that is in it."""
        if self.mode is not PlanMode.TRIM or self.profile is None:
            return
        self._worth_following.clear()
        tokens = sum(count for _, count in prompts)
        kind = Kind.of(tokens, decodes)
        if followed is not None:
            steps = self._prompts.followed if followed else self._prompts.alone
            steps[kind].times.append(seconds / tokens)
        alone = seconds if not followed else seconds / (1.0 + self._prompts.dearer(kind))
        self._spent.read(prompts, kind, alone)
        self._drain.read(seconds, alone)

    def judged(
        self, histories: Sequence[History], confidence_RG: NDArray[np.float64], useful_R: NDArray[np.int64],
        verified_R: NDArray[np.int64], accepted_R: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """What came of the blocks of these requests: of so many tokens that each could keep, how many were verified,
        and accepted. What wasn't verified behind accepted tokens counts as is expected of it; not under rejection,
        where that would depend on tokens that are drafted anew with the same uniforms."""
        self.calibration.observe(confidence_RG, verified_R, accepted_R)
        if self.mode is not PlanMode.TRIM or self.profile is None:
            return
        if self.accept is AcceptMode.REJECTION:
            useful_R = verified_R
        at_G = np.arange(self.calibration.block_size)
        behind_RG = (at_G >= verified_R[:, None]) & (at_G < useful_R[:, None]) & (accepted_R == verified_R)[:, None]
        found_R = accepted_R.astype(np.float64)
        if behind_RG.any():
            more_RG = np.cumprod(np.where(behind_RG, self.calibration(confidence_RG), 1.0), axis=1) * behind_RG
            found_R += more_RG.sum(axis=1)
        usual_G = np.cumsum(np.cumprod(self.calibration.rates()))
        for history, useful, found in zip(histories, useful_R.tolist(), found_R.tolist(), strict=True):
            if useful:
                history.observe(found, float(usual_G[useful - 1]))

    def ended(self, requests: Sequence[tuple[History, int]], left: int, waiting: bool) -> None:
        """These ended in one step, with so many tokens each, and so many are left: what their accepted tokens have
        saved is known now, or will be when a batch that came at once has drained.

        With a token more a request would have been there for a plain step more, which costs what it adds to those that
        are left; all that a plain token costs where somebody waits for its place.
        """
        if self.mode is not PlanMode.TRIM or self.profile is None or not requests:
            return
        usual = float(self._usual([History()]).sum()) if self._drain.drafted(requests) else 0.0
        self._learn_worth(self._drain.ended(requests, left, waiting, Costs(self._plain, self._alone, usual)))

    def _learn_worth(self, found: Sequence[Worth]) -> None:
        for worth in found:
            self._load(worth.load, worth.load).worth.observe(worth.seconds * worth.weight, worth.weight)

    # --- how much -----------------------------------------------------------------------------------------------
    @property
    def verifies_all(self) -> bool:
        """Whether `plan` gives the limits, whatever was drafted."""
        return self.mode is PlanMode.VERIFY_ALL or (self.mode is PlanMode.TRIM and self.profile is None)

    @property
    def verifies_whole(self) -> bool:
        """Whether whole blocks are verified in the step to come, whatever is drafted in it: looking at them first would
        take longer than it saves."""
        return self.verifies_all or (self._promised is not None and self._promised.whole)

    def plan(self, confidence_RG: NDArray[np.float64], limits_R: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Drafted tokens of each request to verify, 0 to G, at most `limits_R` (what is left of it, say): [R].

        Raises EngineError for confidences outside of [0, 1] or of another block size.
        """
        size = self.calibration.block_size
        shape = confidence_RG.shape
        if len(shape) != 2 or shape[1] != size or not ((confidence_RG >= 0) & (confidence_RG <= 1)).all():
            raise EngineError(f"confidences have to be [requests, {size}] numbers from 0 to 1, got shape {shape}")
        requests = len(confidence_RG)
        most_R = np.full(requests, size) if limits_R is None else np.clip(limits_R, 0, size)
        if self.mode is PlanMode.OFF or not requests:
            return np.zeros(requests, dtype=np.int64)
        if self.verifies_all or self.profile is None:
            return most_R
        allowed_RG = np.arange(size) < most_R[:, None]
        worth_RG = np.cumprod(self.calibration(confidence_RG), axis=1) * allowed_RG
        if self.accept is AcceptMode.COUPLED:
            return choose(self._worth * worth_RG, self.profile).drafted_R
        usual_RG = np.cumprod(self.calibration.rates()) * allowed_RG
        budget = int(choose(self._worth * usual_RG, self.profile).drafted_R.sum())
        return take(worth_RG, budget)

    def _usual(self, histories: Sequence[History]) -> NDArray[np.float64]:
        """Chance that each position of a block is committed, by past acceptance alone: [F, G]."""
        usual_G = np.cumprod(self.calibration.rates())
        ease_F = np.array([history.ease for history in histories])
        return np.minimum(1.0, ease_F[:, None] * usual_G) * self.calibration.room()

    def _plain(self, requests: int) -> float:
        """Seconds of a step that drafts nothing, by the profile."""
        if self._plain_of is not self.profile:
            self._plain_of, self._plain_s = self.profile, {0: 0.0}
        if requests not in self._plain_s:
            assert self.profile is not None
            self._plain_s[requests] = float(self.profile.seconds(requests, requests))
        return self._plain_s[requests]

    def _load(self, requests: int, followed: int) -> Load:
        key = about(requests), about(followed) if followed else -1
        if key not in self._loads:
            self._loads[key] = Load.of(max(1, followed))
        return self._loads[key]
