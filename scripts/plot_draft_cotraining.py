#!/usr/bin/env python3
"""What the policy accepts of a draft while it is trained: a frozen draft beside one that follows it.

Two runs of one recipe and seed, which differ in rollout.speculative.train alone; their policies are the same. Prints a
table and draws docs/images/draft_cotraining.png.

    python scripts/plot_draft_cotraining.py runs/frozen runs/cotrained
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "draft_cotraining.png"
STRETCH = 10  # steps of a line of the table


def read(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "speculative/mean_accepted" in row]


def mean(rows: list[dict[str, float]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("frozen", type=Path)
    parser.add_argument("cotrained", type=Path)
    args = parser.parse_args()
    frozen, trained = read(args.frozen), read(args.cotrained)
    accepted = "speculative/mean_accepted"
    print("| steps | reward | frozen: accepted | co-trained: accepted | frozen: expected | co-trained: expected |")
    print("|---|---|---|---|---|---|")
    for first in range(0, len(frozen), STRETCH):
        a, b = frozen[first : first + STRETCH], trained[first : first + STRETCH]
        print(
            f"| {a[0]['step']}-{a[-1]['step']} | {mean(a, 'rollout/reward'):.2f} | {mean(a, accepted):.2f} | "
            f"{mean(b, accepted):.2f} | {mean(b, 'draft/frozen_expected_accepted'):.2f} | "
            f"{mean(b, 'draft/expected_accepted'):.2f} |"
        )
    figure, axis = plt.subplots(figsize=(7, 3.6))
    for rows, name, color in ((frozen, "frozen", "tab:gray"), (trained, "co-trained", "tab:blue")):
        axis.plot([r["step"] for r in rows], [r[accepted] for r in rows], color=color, label=f"{name}, counted")
    for key, name, color in (
        ("draft/frozen_expected_accepted", "frozen, expected", "tab:gray"),
        ("draft/expected_accepted", "co-trained, expected", "tab:blue"),
    ):
        axis.plot([r["step"] for r in trained], [r[key] for r in trained], color=color, linestyle=":", label=name)
    axis.set(xlabel="step", ylabel="drafted tokens accepted a verify")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
