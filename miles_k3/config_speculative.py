"""The recipe's section about speculative decoding. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles_k3.config_types import PositiveInt, Section


class SpeculativeSection(Section):
    """A small draft proposes tokens, the policy verifies them: the same answers, by fewer forwards."""

    mode: Literal["off", "verify_all", "trim"] = Field(
        default="off", description="off; verify_all: everything that is drafted is verified; trim: what pays."
    )
    draft: str | None = Field(default=None, description="Folder of the DSpark draft; modes other than off need one.")
    accept: Literal["coupled", "rejection"] = Field(
        default="coupled",
        description="coupled: answers are plain sampling's, token for token; rejection: accepts more, other tokens.",
    )
    num_draft_tokens: PositiveInt | None = Field(
        default=None, description="Drafted tokens of a request verified at once, at most; null: the draft's block."
    )
    verify_tokens: int = Field(
        default=0, ge=0,
        description="Positions of one verify, over all requests; bounds the replay buffer. 0: as many as there may be.",
    )  # fmt: skip
    costs: str | None = Field(
        default=None, description="trim only: measured costs (miles-k3 bench speculative); null measures at the start."
    )
    train: bool = Field(
        default=False, description="Train the draft on each step's rollouts, so that it follows the policy."
    )
    train_steps: PositiveInt = Field(default=4, description="Optimizer steps of the draft, each step of the run.")
    train_tokens: PositiveInt = Field(
        default=8192, description="Tokens of a step's rollouts whose hidden states are kept for it."
    )
    train_lr: float = Field(default=1e-3, gt=0.0, le=1.0, description="Its learning rate.")

    def problems(self, engine: str, max_running: int) -> list[str]:
        """What doesn't go together, one sentence each."""
        found, key = [], "rollout.speculative"
        if self.mode == "off":
            if self.train and engine == "sglang":
                found.append(
                    f"{key}.train is true but rollout.engine is sglang, whose draft stays the one that it was started "
                    "with; set train: false"
                )
            elif self.train:
                found.append(f"{key}.train is true but {key}.mode is off, so nothing drafts; set train: false")
            return found
        if self.draft is None:
            found.append(f"{key}.mode is {self.mode} but {key}.draft is null; name a draft's folder, or set mode: off")
        if engine != "embedded":
            found.append(
                f"{key}.mode is {self.mode} but rollout.engine is {engine}; only the embedded one drafts by this, "
                "SGLang by rollout.sglang.draft"
            )
        if self.costs is not None and self.mode != "trim":
            found.append(f"{key}.costs is given but {key}.mode is {self.mode}; only trim looks at costs")
        if 0 < self.verify_tokens < 2 * max_running:
            found.append(
                f"{key}.verify_tokens is {self.verify_tokens}, but {max_running} requests (rollout.max_running) with "
                f"one drafted token each have {2 * max_running} positions; set that or more, or 0"
            )
        return found
