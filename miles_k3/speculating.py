"""From the recipe's section about speculation to what an engine is given."""

from __future__ import annotations

from pathlib import Path

import torch

from miles_k3.config_speculative import SpeculativeSection
from miles_k3.k3.config import K3Config
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.proposal import Speculative
from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.draft_io import read_draft
from miles_k3.rollout.speculative.engine_costs import measure_engine
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile


def speculative_of(section: SpeculativeSection, target: K3Config) -> Speculative | None:
    """None where nothing is drafted. Raises CheckpointError when the draft isn't one of `target`."""
    if section.mode == "off" or section.draft is None:
        return None
    config, weights = read_draft(section.draft, target, torch.float32)
    return Speculative(
        config=config, weights=weights, mode=PlanMode(section.mode), accept=AcceptMode(section.accept),
        num_draft_tokens=section.num_draft_tokens, verify_tokens=section.verify_tokens,
        profile=None if section.costs is None else CostProfile.load(Path(section.costs)),
    )  # fmt: skip


def measure_if_asked(engine: EmbeddedEngine, section: SpeculativeSection) -> None:
    """Give the planner of mode `trim` the costs that the recipe doesn't name, by measuring them now."""
    if section.mode == "trim" and section.costs is None and engine.speculator is not None:
        engine.speculator.planner.profile = measure_engine(engine)
