"""Tokens a second of `trim` beside the better of verify-all and no speculation, on made-up and measured cost curves.

Measured are the tiny K3's forward on this machine, without caches, which is what there is before an engine verifies,
and K3's first four layers on an H200 (docs/data/speculative_h200_costs.json).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

from miles_k3.assemble import load_engine
from miles_k3.recipe import load_recipe
from miles_k3.rollout.speculative.planner.choice import PlanMode
from miles_k3.rollout.speculative.planner.cost import CostProfile, measure_costs
from miles_k3.rollout.speculative.planner.simulation import BLOCK, CURVES, LOADS, rates, synthetic_profile
from miles_k3.world import ALONE

QUALITIES = (0.2, 0.5, 0.8)


def measured() -> CostProfile:
    engine = load_engine(load_recipe("tiny-cpu").recipe, ALONE)

    def verify(requests: int, each: int) -> None:
        engine.score([list(range(5, 6 + each))] * requests)

    try:
        return measure_costs(verify, None, LOADS, BLOCK)
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images/verify_planner.png"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--h200", type=Path, default=Path("docs/data/speculative_h200_costs.json"))
    args = parser.parse_args()
    profiles = {name: synthetic_profile(curve) for name, curve in CURVES.items()}
    profiles["tiny K3, 2 CPU cores"] = measured()
    profiles["K3's first four layers, one H200"] = CostProfile.load(args.h200)
    figure, axes = plt.subplots(2, 4, figsize=(16, 7), sharex=True, sharey=True, layout="constrained")
    for axis, (name, profile) in zip(axes.flat, profiles.items(), strict=False):
        for quality, color in zip(QUALITIES, ("tab:red", "tab:blue", "tab:green"), strict=True):
            found = [rates(profile, r, quality, count=args.rounds) for r in LOADS]
            better = [max(f[PlanMode.OFF], f[PlanMode.VERIFY_ALL]) for f in found]
            for mode, style in ((PlanMode.TRIM, "-"), (PlanMode.VERIFY_ALL, ":"), (PlanMode.OFF, "--")):
                ratios = [f[mode] / b for f, b in zip(found, better, strict=True)]
                axis.plot(LOADS, ratios, style, color=color, label=f"{mode.replace('_', ' ')}, draft {quality:g}")
                if mode is PlanMode.TRIM:
                    print(f"{name:26} draft {quality:g}: " + " ".join(f"{x:.3f}" for x in ratios))
        axis.set_title(name, fontsize=10)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("requests")
    for axis in axes[:, 0]:
        axis.set_ylabel("tokens a second / better of the other two")
    axes[1, 3].set_axis_off()
    axes[1, 3].legend(*axes[0, 0].get_legend_handles_labels(), fontsize=9, loc="center")
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
