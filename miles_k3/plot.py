"""Pictures of a run, made from its metrics.jsonl alone: reward, mismatch, time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_k3.errors import CheckpointError
from miles_k3.metrics import EVAL_ACCURACY, MISMATCH, PHASES, REWARD, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, float]]
_log = logging.getLogger(__name__)

# Okabe and Ito's colours: told apart by everybody, also in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
INK, FAINT = "#333333", "#DDDDDD"
STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 12,
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 10,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
}
SMOOTHING_STEPS = 5


def plot_run(folder: Path) -> list[Path]:
    """Write reward.png, mismatch.png and time.png into `folder/plots`; what a run didn't measure is left out.

    Raises CheckpointError when the folder holds no metrics.
    """
    rows = _rows_of(folder)
    pictures: list[tuple[str, Callable[[Axes, Rows, str], bool]]] = [
        ("reward", _draw_reward), ("mismatch", _draw_mismatch), ("time", _draw_time),
    ]  # fmt: skip
    written = []
    for name, draw in pictures:
        with _axes(folder / "plots" / f"{name}.png", written) as axes:
            if not draw(axes, rows, folder.name):
                axes.set_axis_off()
    return written


def plot_finished_run(folder: Path) -> tuple[Path, ...]:
    """A complete run's pictures; none, and a warning of why, where they can't be drawn."""
    try:
        return tuple(plot_run(folder))
    except Exception as error:  # noqa: BLE001 - whatever a drawing library says must not end a run that is complete
        _log.warning(
            "%s is complete, but its pictures were not drawn (%s: %s); draw them with: miles-k3 plot %s",
            folder, type(error).__name__, error, folder,
        )  # fmt: skip
        return ()


def plot_runs(folders: Sequence[Path], out: Path) -> Path:
    """One picture that compares the rewards of several runs."""
    with _axes(out, []) as axes:
        for folder, label, colour in zip(folders, _labels(folders), _cycle(len(folders)), strict=True):
            rows = _rows_of(folder)
            _curve(axes, *_series(rows, REWARD), colour, label)
            steps, accuracy = _series(rows, EVAL_ACCURACY)
            axes.plot(steps, accuracy, "D", color=colour, markersize=6, markeredgecolor="white", zorder=4)
        axes.plot([], [], "D", color=INK, markersize=6, label="held-out accuracy")
        _label(axes, "Reward by run", "mean reward of a step")
        _fit_unit_interval(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return out


def _draw_reward(axes: Axes, rows: Rows, run: str) -> bool:
    steps, reward = _series(rows, REWARD)
    eval_steps, accuracy = _series(rows, EVAL_ACCURACY)
    _curve(axes, steps, reward, COLOURS[0], "training, sampled answers")
    if eval_steps:
        axes.plot(eval_steps, accuracy, "D-", color=COLOURS[1], linewidth=1.2, markersize=7, markeredgecolor="white",
                  label="held-out prompts", zorder=4)  # fmt: skip
        for step, value in {eval_steps[0]: accuracy[0], eval_steps[-1]: accuracy[-1]}.items():
            place = {"xytext": (0, -18), "textcoords": "offset points", "ha": "center"}
            axes.annotate(f"{value:.2f}", (step, value), color=COLOURS[1], fontweight="bold", **place)
    _label(axes, f"{run}: reward", "mean reward")
    _fit_unit_interval(axes)
    axes.legend(loc="lower right")
    return bool(steps or eval_steps)


def _draw_mismatch(axes: Axes, rows: Rows, run: str) -> bool:
    for name, label, colour in ((f"{MISMATCH}_max", "largest", COLOURS[5]), (MISMATCH, "mean", COLOURS[0])):
        steps, values = _series(rows, name)
        axes.plot(steps, values, color=colour, label=label, marker="o", markersize=3)
    _label(axes, f"{run}: trainer against engine", "|Δ log-probability| of a sampled token (nats)")
    values = [value for _, value in zip(*_series(rows, MISMATCH), strict=True)]
    if values and min(values) > 0:
        axes.set_yscale("log")
        axes.grid(which="minor", axis="y", linewidth=0.3)
    axes.legend(loc="best")
    return bool(values)


def _draw_time(axes: Axes, rows: Rows, run: str) -> bool:
    timed = [row for row in rows if "time/step_s" in row]
    names = [name for name in (*PHASES, "other") if any(row.get(f"time/{name}_s", 0.0) > 0 for row in timed)]
    steps, floor = [row["step"] for row in timed], [0.0] * len(timed)
    for name, colour in zip(names, _cycle(len(names)), strict=True):
        heights = [row.get(f"time/{name}_s", 0.0) for row in timed]
        share = sum(heights) / (sum(row["time/step_s"] for row in timed) or 1.0)
        axes.bar(steps, heights, bottom=floor, width=0.85, color=colour, label=f"{name}  {_percent(share)}")
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    _label(axes, f"{run}: where the time goes", "wall-clock time of a step (s)")
    axes.grid(visible=False, axis="x")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return bool(timed)


def _curve(axes: Axes, steps: list[float], values: list[float], colour: str, label: str) -> None:
    """The measured points, faint, and their trailing mean, which is what the eye should follow."""
    if len(steps) <= 2 * SMOOTHING_STEPS:
        axes.plot(steps, values, color=colour, label=label, marker="o", markersize=4)
        return
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1.0, marker="o", markersize=2.5)
    smooth = [sum(window := values[max(0, i + 1 - SMOOTHING_STEPS) : i + 1]) / len(window) for i in range(len(values))]
    axes.plot(steps, smooth, color=colour, label=f"{label} (mean of {SMOOTHING_STEPS} steps)")


def _label(axes: Axes, title: str, y_label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _fit_unit_interval(axes: Axes) -> None:
    """Rewards between 0 and 1 are shown on that scale, so that two pictures can be laid side by side."""
    low, high = axes.dataLim.intervaly
    if low >= 0.0 and high <= 1.0:
        axes.set_ylim(-0.02, 1.05)


def _rows_of(folder: Path) -> Rows:
    rows = read_metrics(folder / "metrics.jsonl")
    if not rows:
        raise CheckpointError(f"{folder / 'metrics.jsonl'} is empty; there is nothing to draw before the first step")
    return rows


def _percent(share: float) -> str:
    return "< 1%" if share < 0.005 else f"{share:.0%}"


def _series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Steps and finite values; one infinity would flatten everything else."""
    points = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


def _labels(folders: Sequence[Path]) -> list[str]:
    """Folder names, with their parents where two are alike."""
    names = [folder.name for folder in folders]
    return [f.name if names.count(f.name) == 1 else f"{f.parent.name}/{f.name}" for f in folders]


def _cycle(length: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(length)]


@contextmanager
def _axes(out: Path, written: list[Path]) -> Iterator[Axes]:
    """Axes whose picture is written to `out` at the end, unless they were switched off."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 4.5), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        yield axes
        if axes.axison:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out)
            written.append(out)
