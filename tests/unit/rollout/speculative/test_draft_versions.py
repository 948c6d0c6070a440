"""Drafts that come to where others were: graphs read there."""

from __future__ import annotations

import pytest
import torch
from helpers.drafts import small_config, small_draft, small_weights
from helpers.engines import weights as target_weights

from miles_k3.errors import CheckpointError
from miles_k3.k3.params import LM_HEAD, TEXT
from miles_k3.rollout.speculative.draft_versions import DraftVersions

CONFIG = small_config()


def versions(*, keeps: bool) -> DraftVersions:
    embed, head = (target_weights()[name].float() for name in (TEXT + "embed_tokens.weight", LM_HEAD))
    drafts = DraftVersions(CONFIG, small_weights(CONFIG), embed, head, torch.float32)
    drafts.keeps_memory = keeps
    return drafts


@pytest.mark.parametrize("keeps", [False, True])
def test_a_new_draft_takes_the_place_of_one_that_is_gone(keeps: bool) -> None:
    """As good as a new one, in every tensor that it computes with."""
    drafts, seen = versions(keeps=keeps), []
    for version in range(4):
        drafts.load(version, small_weights(CONFIG, version + 1))
        drafts.forget_all_but([version])
        seen.append(drafts.of(version))
    assert len(set(seen)) == (2 if keeps else 4)
    fresh = small_draft()
    fresh.weights = small_weights(CONFIG, 4)
    taps, positions = torch.randn(5, CONFIG.tap_width), torch.arange(5)
    context = fresh.context(taps.unsqueeze(0))
    rows = seen[-1].context_rows(taps, positions)
    for ours, wanted in zip(seen[-1].context_of(rows.unsqueeze(0)).keys, context.keys, strict=True):
        torch.testing.assert_close(ours, wanted)
    anchor = torch.tensor([3]), torch.tensor([5])
    assert torch.equal(seen[-1].draft(*anchor, context).tokens_SG, fresh.draft(*anchor, context).tokens_SG)


def test_one_that_does_not_fit_leaves_all_as_it_was() -> None:
    drafts = versions(keeps=True)
    drafts.load(0, small_weights(CONFIG, 1))
    drafts.forget_all_but([0])
    with pytest.raises(CheckpointError):
        drafts.load(1, small_weights(small_config(markov_rank=5)))
    assert drafts.newest == 0
    drafts.load(1, small_weights(CONFIG, 2))
    assert len({drafts.of(version) for version in (0, 1)}) == 2


def test_whose_is_which_the_older_first() -> None:
    drafts = versions(keeps=False)
    for version in (2, 4):
        drafts.load(version, small_weights(CONFIG, version))
    models, own = drafts.used_by([5, -1, 4, 0])
    assert models == (drafts.of(-1), drafts.of(4))
    assert own == [1, 0, 1, 0]
    assert drafts.used_by([]) == ((), [])
