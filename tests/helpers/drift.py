"""A copy of a factor that drifts on one rank; run by a pool of ranks, which imports it by this module's name."""

from __future__ import annotations

import torch
from helpers.parity import Case, build

from miles_k3.errors import MilesError


def export_with_a_flipped_bit(rank: int, size: int, case: Case, module: str, factor: str) -> str | None:
    """On the last rank, one number of one factor gets another last bit."""
    trainer = build(case, rank)
    assert trainer.export_adapter().version == 0
    if rank == size - 1:
        name, parameter = next((n, p) for n, p in trainer.model.named_parameters() if n.endswith(f"{module}.{factor}"))
        assert parameter.requires_grad, name
        with torch.no_grad():
            first = parameter.view(-1)[:1]
            first.copy_(torch.nextafter(first, torch.tensor(torch.inf)))
    try:
        trainer.export_adapter()
    except MilesError as error:
        return str(error)
    return None
