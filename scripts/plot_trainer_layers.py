"""Where a step's time goes: the picture of bench_trainer_layers.py's JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

KINDS = ("dense KDA", "MoE KDA", "MoE MLA")
PHASES = ("attention", "MLP or MoE", "norms, AttnRes, sums")
FAMILIES = {
    "matrix products": ("nvjet", "cutlass", "gemm"),
    "delta rule (fla)": ("chunk_", "recompute_w_u", "l2norm_", "kda_"),
    "softmax attention": ("sdpa", "flash", "fmha"),
}
REST = "elementwise, copies, sums"


def phases(found: dict[str, Any]) -> list[float]:
    """Milliseconds of a layer's parts; the last is what the layer takes beyond the other two."""
    whole, attention, mlp = (found[part]["ms"] for part in ("layer", "attention", "mlp"))
    return [attention, mlp, whole - attention - mlp]


def families(rows: list[list[Any]]) -> list[float]:
    """Milliseconds of the listed kernels by what they are."""
    sums = dict.fromkeys((*FAMILIES, REST), 0.0)
    for name, ms, _ in rows:
        sums[next((f for f, marks in FAMILIES.items() if any(m in name for m in marks)), REST)] += ms
    return list(sums.values())


def bars(axes: Any, labels: list[str], columns: list[list[float]], names: tuple[str, ...]) -> None:
    bottom = [0.0] * len(labels)
    for i, name in enumerate(names):
        heights = [column[i] for column in columns]
        axes.bar(labels, heights, bottom=bottom, label=name, width=0.7)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_ylim(0, 1.3 * max(bottom))  # room for the legend
    axes.set_ylabel("ms, forward and backward")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.tick_params(axis="x", labelsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    result = json.loads(args.results.read_text())
    tokens, sides = next(iter(result["runs"].items()))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(2, 1.2))
    labels = [f"{kind}\n{name.split(' (')[0].replace(' + ', '+')}" for kind in KINDS for name in sides]
    bars(left, labels, [phases(found[kind]) for kind in KINDS for found in sides.values()], PHASES)
    left.set_title(f"One layer, {tokens} tokens, {result['device']}", fontsize=10)
    bars(right, list(KINDS), [families(result["kernels"][kind]) for kind in KINDS], (*FAMILIES, REST))
    right.set_title("Ours, its 25 longest kernels", fontsize=10)
    figure.tight_layout()
    figure.savefig(args.picture, dpi=130)


if __name__ == "__main__":
    main()
