"""SGLang's own acceptance of a drafted token, in Triton's interpreter, over a grid of its random numbers."""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton

TARGET, DRAFT = (0.5, 0.2, 0.3), (0.25, 0.5, 0.25)
COINS, REDRAWS = 5, 6  # midpoints of both uniforms; no threshold of these distributions lies on one


def committed(target: tuple[float, ...], draft: tuple[float, ...]) -> list[float]:
    """Probability of each token to follow an anchor, all drafted tokens and random numbers weighed."""
    grid = [
        (token, (coin + 0.5) / COINS, (redraw + 0.5) / REDRAWS)
        for token in range(len(target)) for coin in range(COINS) for redraw in range(REDRAWS)
    ]  # fmt: skip
    rows = len(grid)
    places = torch.arange(2 * rows).view(rows, 2)  # an anchor and one drafted token each
    predicts, accepted = torch.zeros(2 * rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    chain_speculative_sampling_triton(
        predicts, torch.full((rows, 2), -1, dtype=torch.int32), accepted,
        torch.tensor([[0, token] for token, *_ in grid]), places, None, None,
        torch.tensor([[coin] for _, coin, _ in grid]), torch.tensor([redraw for *_, redraw in grid]),
        torch.tensor(target).expand(rows, 2, -1).contiguous(), torch.tensor(draft).expand(rows, 1, -1).contiguous(),
        threshold_single=1.0, threshold_acc=1.0, deterministic=True,
    )  # fmt: skip
    found = torch.zeros(len(target), dtype=torch.float64)
    for row, (token, *_) in enumerate(grid):
        found[predicts[2 * row]] += draft[token] / (COINS * REDRAWS)
    return found.tolist()


if __name__ == "__main__":
    print("FOUND " + json.dumps([committed(TARGET, DRAFT), committed(TARGET, TARGET)]))
