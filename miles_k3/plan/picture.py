"""A plan as a picture: what the worst rank holds in each phase, stacked, beside what there is."""

from __future__ import annotations

from pathlib import Path

from miles_k3.plan.shapes import ITEMS, MARGIN, Phase, Plan, Verdict


def draw(plan: Plan, path: Path) -> Path:
    """One panel for each pool, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(plan.verdicts), figsize=(6.4 * len(plan.verdicts), 4.6), squeeze=False, layout="constrained"
    )
    for axis, verdict in zip(axes[0], plan.verdicts, strict=True):
        _panel(axis, plan, verdict)
    figure.suptitle(f"{plan.name}: {plan.world} ranks")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _panel(axis, plan: Plan, verdict: Verdict) -> None:  # pyright: ignore[reportMissingParameterType]
    import matplotlib

    pool, rank = verdict.pool, verdict.rank
    held = {p: rank.in_pool(pool, p, cuda=plan.cuda) for p in Phase}
    names = [name for name in ITEMS if any(name in items for items in held.values())]
    colors = [c for name in ("tab20", "tab20b") for c in matplotlib.colormaps[name].colors]  # pyright: ignore[reportAttributeAccessIssue]
    color_of = dict(zip(ITEMS, colors, strict=False))
    unit, size = ("GB", 1e9) if verdict.needed >= 1e9 else ("MB", 1e6)
    bottoms = [0.0] * len(Phase)
    for name in names:
        heights = [held[p].get(name, 0) / size for p in Phase]
        axis.bar(list(Phase), heights, bottom=bottoms, label=name, color=color_of[name], width=0.7)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    if pool.capacity is not None and pool.capacity / size < 4 * max(bottoms):
        for share, style, said in ((1.0, "-", "there is"), (MARGIN, ":", "planned for")):
            axis.axhline(share * pool.capacity / size, color="black", linewidth=1, linestyle=style)
            axis.annotate(said, (0.01, share * pool.capacity / size), (0, 2), fontsize=7,
                          xycoords=("axes fraction", "data"), textcoords="offset points")  # fmt: skip
    shared = f" of {pool.ranks} ranks" if pool.ranks > 1 else ""
    axis.set_title(f"{pool.where}{shared}, {rank.name}", fontsize=10)
    axis.set_ylabel(unit)
    axis.margins(y=0.08)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
