"""Pictures are made from metrics.jsonl alone and show what it says."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from miles_k3 import plot
from miles_k3.errors import CheckpointError


def write_run(folder: Path, steps: int = 40, changes: dict[str, float] | None = None) -> Path:
    folder.mkdir(parents=True)
    rows: list[dict] = [{"step": 0, "eval/accuracy": 0.33, "time/eval_s": 4.0, "time/other_s": 0.5, "time/step_s": 4.5}]
    for step in range(1, steps + 1):
        rows.append(
            {
                "step": step,
                "rollout/reward": 0.3 + 0.6 * step / steps,
                "train/mismatch_abs": 3e-6,
                "train/mismatch_abs_max": 6e-5,
                "time/rollout_s": 0.5,
                "time/train_s": 1.5,
                "time/step_s": 2.0,
                **({"eval/accuracy": 0.9} if step == steps else {}),
                **(changes or {}),
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved, to look into."""
    saved: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (saved.append(self), save(self, *args, **kw))[1])
    return saved


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in line.get_xydata()]  # type: ignore[union-attr]


def test_a_run_gets_three_titled_and_labelled_pictures(tmp_path: Path, figures: list[Figure]) -> None:
    run = write_run(tmp_path / "tiny")
    pictures = plot.plot_run(run)
    assert pictures == [run / "plots" / f"{name}.png" for name in ("reward", "mismatch", "time")]
    for picture in pictures:
        image = imread(picture)
        assert image.shape[:2] == (585, 1040)
        assert image.std() > 0.05, "not a blank page"
    axes = [figure.axes[0] for figure in figures]
    assert [a.get_title("left") for a in axes] == [
        "tiny: reward", "tiny: trainer against engine", "tiny: where the time goes",
    ]  # fmt: skip
    assert [a.get_xlabel() for a in axes] == ["step"] * 3
    assert [a.get_ylabel() for a in axes] == [
        "mean reward", "|Δ log-probability| of a sampled token (nats)", "wall-clock time of a step (s)",
    ]  # fmt: skip


def test_the_reward_picture_shows_training_and_held_out(tmp_path: Path, figures: list[Figure]) -> None:
    plot.plot_run(write_run(tmp_path / "tiny"))
    axes = figures[0].axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    held_out = lines["held-out prompts"]
    assert [*points(held_out)] == [(0, 0.33), (40, 0.9)]
    assert [text.get_text() for text in axes.texts] == ["0.33", "0.90"]
    raw = next(line for line in axes.lines if line.get_alpha() == 0.3)
    assert len(points(raw)) == 40
    assert points(raw)[-1] == (40, pytest.approx(0.9))
    smooth = points(lines["training, sampled answers (mean of 5 steps)"])
    assert smooth[-1][1] == pytest.approx(sum(0.3 + 0.6 * step / 40 for step in range(36, 41)) / 5)
    assert axes.get_ylim() == (-0.02, 1.05)


def test_the_time_picture_stacks_the_phases(tmp_path: Path, figures: list[Figure]) -> None:
    plot.plot_run(write_run(tmp_path / "tiny"))
    axes = figures[2].axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["rollout  24%", "train  71%", "eval  5%", "other  1%"]
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
    assert tops == [pytest.approx(4.5)] + [pytest.approx(2.0)] * 40


def test_rewards_beyond_one_get_room(tmp_path: Path, figures: list[Figure]) -> None:
    plot.plot_run(write_run(tmp_path / "tiny", changes={"rollout/reward": -3.0}))
    assert figures[0].axes[0].get_ylim()[0] < -3.0


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    run = tmp_path / "eval-only"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.3}\n')
    assert [p.name for p in plot.plot_run(run)] == ["reward.png"]


def test_values_that_are_not_finite_leave_the_scale_alone(tmp_path: Path, figures: list[Figure]) -> None:
    run = write_run(tmp_path / "tiny")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 41, "rollout/reward": "nan", "train/mismatch_abs": "inf", "train/mismatch_abs_max": "inf"}\n'
        )
    plot.plot_run(run)
    assert figures[0].axes[0].get_ylim() == (-0.02, 1.05)
    drawn = [value for line in figures[0].axes[0].lines for _, value in points(line)]
    assert all(map(math.isfinite, drawn)), "one NaN would tear a hole of five steps into the smooth curve"
    assert math.isfinite(figures[1].axes[0].get_ylim()[1])


def test_runs_are_compared_in_one_picture(tmp_path: Path, figures: list[Figure]) -> None:
    runs = [write_run(tmp_path / "a" / "tiny"), write_run(tmp_path / "b" / "tiny", steps=8), write_run(tmp_path / "c")]
    out = plot.plot_runs(runs, tmp_path / "new" / "all.png")
    assert imread(out).std() > 0.05
    labels = figures[0].axes[0].get_legend_handles_labels()[1]
    assert labels == ["a/tiny (mean of 5 steps)", "b/tiny", "c (mean of 5 steps)", "held-out accuracy"]


@pytest.mark.parametrize(("content", "said"), [(None, "does not exist"), ("", "is empty"), ("{\n", "not a line")])
def test_a_folder_without_metrics_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(CheckpointError, match=said):
        plot.plot_run(tmp_path)


def test_pictures_need_no_screen_and_no_global_state(tmp_path: Path) -> None:
    run = write_run(tmp_path / "tiny")
    code = (
        f"import sys; from pathlib import Path; from miles_k3.plot import plot_run; plot_run(Path({str(run)!r}));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "MPLBACKEND": "TkAgg"})


def test_a_finished_run_outlives_a_broken_drawing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "tiny")
    assert len(plot.plot_finished_run(run)) == 3

    def broken(folder: Path) -> list[Path]:
        raise AttributeError("module 'IPython' has no attribute 'version_info'")

    monkeypatch.setattr(plot, "plot_run", broken)
    assert plot.plot_finished_run(run) == ()
    assert "AttributeError: module 'IPython'" in caplog.text
    assert f"miles-k3 plot {run}" in caplog.text
