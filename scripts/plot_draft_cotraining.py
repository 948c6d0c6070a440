#!/usr/bin/env python3
"""What the policy accepts of a draft while it is trained: a frozen draft beside one that follows it.

Pairs of runs of one recipe, a pair for each seed, which differ in rollout.speculative.train alone; their policies are
the same. Prints a table and draws docs/images/draft_cotraining.png: means over the seeds, lowest and highest.

    python scripts/plot_draft_cotraining.py --frozen runs/frozen-0 runs/frozen-1 --cotrained runs/train-0 runs/train-1
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "draft_cotraining.png"
STRETCH = 10  # steps of a line of the table
SMOOTH = 5  # steps of a point of the picture
ACCEPTED, REWARD = "speculative/mean_accepted", "rollout/reward"
FROZEN, TRAINED = "draft/frozen_expected_accepted", "draft/expected_accepted"


def read(runs: list[Path], key: str) -> np.ndarray:
    """[seeds, steps]"""
    found = []
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        found.append([row[key] for row in rows if ACCEPTED in row])
    return np.array(found)


def stretched(values: np.ndarray, steps: int) -> np.ndarray:
    """Means of so many steps each: [seeds, steps / so many]"""
    seeds, count = values.shape
    return values[:, : count // steps * steps].reshape(seeds, -1, steps).mean(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frozen", type=Path, nargs="+", required=True)
    parser.add_argument("--cotrained", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    columns = {
        "reward": read(args.frozen, REWARD),
        "frozen: accepted": read(args.frozen, ACCEPTED),
        "co-trained: accepted": read(args.cotrained, ACCEPTED),
        "frozen: expected": read(args.cotrained, FROZEN),
        "co-trained: expected": read(args.cotrained, TRAINED),
    }
    print(f"| steps | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    lines = [stretched(values, STRETCH) for values in columns.values()]
    for i in range(lines[0].shape[1]):
        cells = [f"{v[:, i].mean():.2f} ({v[:, i].min():.2f}-{v[:, i].max():.2f})" for v in lines]
        print(f"| {i * STRETCH + 1}-{(i + 1) * STRETCH} | {' | '.join(cells)} |")
    figure, axis = plt.subplots(figsize=(7, 3.6))
    styles = zip(columns.items(), (None, ("tab:gray", "-"), ("tab:blue", "-"), ("tab:gray", ":"), ("tab:blue", ":")),
                 strict=True)  # fmt: skip
    for (name, values), style in styles:
        if style is None:
            continue
        points = stretched(values, SMOOTH)
        steps = np.arange(points.shape[1]) * SMOOTH + (SMOOTH + 1) / 2
        axis.plot(steps, points.mean(0), color=style[0], linestyle=style[1], label=name)
        axis.fill_between(steps, points.min(0), points.max(0), color=style[0], alpha=0.15)
    axis.set(xlabel=f"step, means of {SMOOTH}", ylabel="drafted tokens accepted a verify")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
