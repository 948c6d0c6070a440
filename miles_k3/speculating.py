"""From the recipe's section about speculation to what an engine is given."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from miles_k3.config_speculative import SpeculativeSection
from miles_k3.k3.config import K3Config
from miles_k3.rollout.embedded.engine import EmbeddedEngine
from miles_k3.rollout.embedded.proposal import Speculative
from miles_k3.rollout.speculative.acceptance import AcceptMode
from miles_k3.rollout.speculative.draft_io import read_draft
from miles_k3.rollout.speculative.engine_costs import in_words, measure_engine
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile

log = logging.getLogger(__name__)


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


def prepare_speculation(engine: EmbeddedEngine, section: SpeculativeSection) -> None:
    """Before a new engine serves: say what its draft wasn't made for, and measure what `trim` goes by."""
    if engine.speculator is None:
        return
    most = engine.speculator.at.config.max_position_embeddings
    if engine.max_sequence_tokens > most:
        log.warning(
            "the draft %s takes %d tokens (max_position_embeddings), sequences here have up to %d: what it drafts "
            "behind that is hardly ever accepted, which costs time and changes no answer; take or train a draft of "
            "this length, or lower the lengths",
            section.draft or "of this engine", most, engine.max_sequence_tokens,
        )  # fmt: skip
    measure_if_asked(engine, section)


def measure_if_asked(engine: EmbeddedEngine, section: SpeculativeSection) -> None:
    """Give the planner of mode `trim` the costs that the recipe doesn't name, by measuring them now; say where those
    that it names are another engine's, which makes `trim` choose badly, not wrongly."""
    if section.mode != "trim" or engine.speculator is None:
        return
    planner = engine.speculator.planner
    if section.costs is None:
        log.info("measuring what verifies and drafts cost")
        planner.profile = measure_engine(engine)
    elif planner.profile is not None and planner.profile.engine not in ("", in_words(engine)):
        log.warning(
            "%s was measured on another engine (%s) than this one (%s): trim may choose badly; measure again with "
            "miles-k3 bench speculative, or leave rollout.speculative.costs out",
            section.costs, planner.profile.engine, in_words(engine),
        )  # fmt: skip
