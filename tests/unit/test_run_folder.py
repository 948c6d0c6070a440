"""Run folders: one writer, whole checkpoints or none, resuming exactly where a killed process was."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from miles_k3.checkpoints import find_damage, latest_checkpoint
from miles_k3.config import ModelSection, ParallelSection, Recipe, TaskSection
from miles_k3.errors import CheckpointError, ConfigError
from miles_k3.recipe import load_recipe
from miles_k3.run_folder import RunFolder


def make_recipe(folder: Path, **changes: dict) -> Recipe:
    recipe = Recipe(model=ModelSection(path="/m"), task=TaskSection(name="reasoning_gym:chain_sum"))
    sections = {"run": {"folder": str(folder)}} | {k: v for k, v in changes.items() if k != "run"}
    sections["run"] = {"folder": str(folder), **changes.get("run", {})}
    updated = {name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()}
    return recipe.model_copy(update=updated)


def fill(text: str):
    def write(folder: Path) -> None:
        (folder / "a.txt").write_text(text)
        (folder / "deep").mkdir()
        (folder / "deep" / "b.bin").write_bytes(os.urandom(1000))

    return write


def save(run: RunFolder, step: int, write) -> Path:
    draft = run.begin_checkpoint(step)
    if draft is not None:
        write(draft.folder)
        run.commit_checkpoint(draft)
    return run.checkpoints / f"step-{step:06d}"


def test_a_new_run_writes_its_recipe(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    with RunFolder.create(recipe) as run:
        assert run.path == tmp_path / "run"
        assert load_recipe(run.path / "recipe.yaml").recipe == recipe
        assert run.latest_checkpoint() is None


def test_a_used_folder_is_refused_and_says_how_to_go_on(tmp_path: Path) -> None:
    with RunFolder.create(make_recipe(tmp_path)) as run:
        run.metrics_path.write_text('{"step": 0}\n')
    with pytest.raises(
        ConfigError, match=r"already holds a run; go on with it by --resume, or choose another run.name"
    ):
        RunFolder.create(make_recipe(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"holds other files \(thesis.tex\)"):
        RunFolder.create(make_recipe(tmp_path, run={"name": "mine"}))
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"], "a foreign folder stays untouched"


def test_a_run_that_failed_at_its_start_can_be_started_again(tmp_path: Path) -> None:
    """Say, on a missing shard: nothing has been measured or saved, so there is nothing to lose or to go on with."""
    with RunFolder.create(make_recipe(tmp_path)) as run:
        run.metrics_path.touch()
    mended = make_recipe(tmp_path, model={"path": "/found"})
    with RunFolder.create(mended) as run:
        assert load_recipe(run.path / "recipe.yaml").recipe == mended


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to resume"):
        RunFolder.create(make_recipe(tmp_path), resume=True)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="holds no run to resume"):
        RunFolder.create(make_recipe(tmp_path), resume=True)


def test_a_run_killed_before_its_first_checkpoint_resumes_at_the_start(tmp_path: Path) -> None:
    RunFolder.create(make_recipe(tmp_path)).close()
    with RunFolder.create(make_recipe(tmp_path), resume=True) as run:
        assert run.latest_checkpoint() is None


def test_an_export_that_was_killed_leaves_nothing_for_long(tmp_path: Path) -> None:
    RunFolder.create(make_recipe(tmp_path)).close()
    for name in (".adapter.0123456789ab.tmp", ".adapter.0123456789ab.old"):
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "adapter_model.safetensors").touch()
    with RunFolder.create(make_recipe(tmp_path), resume=True) as run:
        assert sorted(p.name for p in run.path.iterdir()) == [".lock", "recipe.yaml"]


def test_a_folder_that_was_only_locked_counts_as_new(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / ".tmp-recipe.yaml").write_text("half")
    with RunFolder.create(make_recipe(tmp_path)) as run:
        assert sorted(p.name for p in run.path.iterdir()) == [".lock", "recipe.yaml"]


def test_resume_allows_length_and_logging_and_lists_every_other_difference(tmp_path: Path) -> None:
    RunFolder.create(make_recipe(tmp_path)).close()
    allowed = make_recipe(tmp_path, run={"steps": 500, "save_every": 1, "wandb": "offline"}, eval={"prompts": 8},
                          trainer={"parallel": ParallelSection(tp=2), "recompute": "full"})  # fmt: skip
    with RunFolder.create(allowed, resume=True) as run:
        assert load_recipe(run.path / "recipe.yaml").recipe == make_recipe(tmp_path), "it may yet be refused"
        run.keep_recipe()
        assert load_recipe(run.path / "recipe.yaml").recipe == allowed
    other = make_recipe(tmp_path, trainer={"lr": 0.5}, run={"seed": 3}, task={"params": {"a": 1}})
    with pytest.raises(ConfigError) as caught:
        RunFolder.create(other, resume=True)
    assert [p.split(":")[0] for p in caught.value.problems[:-1]] == [
        "run.seed", "task.params", "task.params.a", "trainer.lr",
    ]  # fmt: skip
    assert "has 1e-05, the recipe 0.5" in str(caught.value)
    with RunFolder.create(allowed, resume=True):
        pass  # the refusal released the lock


def test_the_length_stays_where_the_learning_rate_decays_towards_it(tmp_path: Path) -> None:
    decaying = {"lr_decay": "cosine"}
    RunFolder.create(make_recipe(tmp_path, trainer=decaying)).close()
    longer = make_recipe(tmp_path, trainer=decaying, run={"steps": 500})
    with pytest.raises(ConfigError, match=r"run.steps: .* has 100, the recipe 500; with trainer.lr_decay cosine"):
        RunFolder.create(longer, resume=True)
    RunFolder.create(make_recipe(tmp_path, trainer=decaying), resume=True).close()


def test_checkpoints_are_found_by_their_content(tmp_path: Path) -> None:
    with RunFolder.create(make_recipe(tmp_path)) as run:
        for step in (5, 10, 15):
            save(run, step, fill(str(step)))
        newest = run.checkpoints / "step-000015"
        assert run.latest_checkpoint() == (15, newest)
        assert (newest / "a.txt").read_text() == "15"
        run.prune(2)
        assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-000010", "step-000015"]
        before = (newest / "COMPLETE").read_bytes()
        save(run, 15, fill("again"))
        assert (newest / "COMPLETE").read_bytes() == before, "a good checkpoint is kept"


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda p: (p / "COMPLETE").unlink(), "never finished"),
        (lambda p: (p / "COMPLETE").write_text("{"), "can't be read"),
        (lambda p: (p / "deep" / "b.bin").unlink(), "deep/b.bin is missing"),
        (lambda p: (p / "deep" / "b.bin").write_bytes(b""), "0 bytes instead of 1000"),
        (lambda p: flip_a_bit(p / "deep" / "b.bin"), "other content than was written"),
        (lambda p: (p / "c").touch(), "c was not there"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, harm, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with RunFolder.create(make_recipe(tmp_path)) as run:
        save(run, 5, fill("5"))
        newest = save(run, 10, fill("10"))
        harm(newest)
        assert said in (find_damage(newest) or "")
        assert latest_checkpoint(run.path) == (5, run.checkpoints / "step-000005")
        assert run.latest_checkpoint() == (5, run.checkpoints / "step-000005")
        assert said in caplog.text
        save(run, 7, fill("7"))
        run.prune(1)
        assert run.latest_checkpoint() == (7, run.checkpoints / "step-000007"), "pruning counts good ones only"


def test_all_checkpoints_damaged_is_an_error_not_a_restart(tmp_path: Path) -> None:
    with RunFolder.create(make_recipe(tmp_path)) as run:
        flip_a_bit(save(run, 5, fill("5")) / "a.txt")
        with pytest.raises(CheckpointError, match="all 1 checkpoints are damaged"):
            run.latest_checkpoint()


def test_an_unpublished_draft_is_no_checkpoint_and_gives_way(tmp_path: Path) -> None:
    with RunFolder.create(make_recipe(tmp_path)) as run:
        save(run, 5, fill("5"))
        draft = run.begin_checkpoint(10)
        assert draft is not None
        fill("half")(draft.folder)
        assert run.latest_checkpoint() == (5, run.checkpoints / "step-000005")
        again = run.begin_checkpoint(10)
        assert again == draft
        assert list(draft.folder.iterdir()) == []
        run.drop_checkpoint(draft)
        assert [p.name for p in run.checkpoints.iterdir()] == ["step-000005"]


KILLED_AT_EVERY_CALL = """
import os, signal, sys
from pathlib import Path
from miles_k3.recipe import load_recipe
from miles_k3.run_folder import RunFolder

CHANGING = ("fsync", "rename", "unlink", "rmdir", "replace", "mkdir")

def write(path):
    for name in ("a", "b", "c"):
        (path / name).write_bytes(name.encode() * 100_000)
        tick()

def publish(run, step):
    draft = run.begin_checkpoint(step)
    write(draft.folder)
    run.commit_checkpoint(draft)

def save(recipe, at):
    global tick
    run = RunFolder.create(recipe)
    tick = lambda: None
    publish(run, 5)
    left = at

    def dying(call):
        def wrapped(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return wrapped

    tick = dying(tick)
    for name in CHANGING:
        setattr(os, name, dying(getattr(os, name)))
    publish(run, 10)
    run.prune(1)
    os._exit(0)

base = load_recipe("tiny-cpu", [f"run.folder={sys.argv[1]}"]).recipe
for at in range(1000):
    recipe = base.model_copy(update={"run": base.run.model_copy(update={"name": f"killed-{at}"})})
    child = os.fork()
    if child == 0:
        save(recipe, at)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(at, status, flush=True)
    if status == 0:
        break
"""


def test_kill_at_any_moment_of_a_checkpoint_leaves_one_whole(tmp_path: Path) -> None:
    """Kills at each system call that changes the folder, one process after another, until one comes through."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_CALL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    fates = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert all(status == -signal.SIGKILL for _, status in fates[:-1]), done.stderr
    assert fates[-1][1] == 0
    assert len(fates) > 20, "not killed often enough to prove anything"
    steps = []
    for at, _ in fates:
        recipe = load_recipe("tiny-cpu", [f"run.folder={tmp_path}", f"run.name=killed-{at}"]).recipe
        newest = latest_checkpoint(tmp_path / f"killed-{at}")
        assert newest is not None
        steps.append(newest[0])
        assert (newest[1] / "c").read_bytes() == b"c" * 100_000
        with RunFolder.create(recipe, resume=True) as run:
            assert run.latest_checkpoint() == newest
            assert not [p for p in run.path.rglob("*") if p.name.startswith(".tmp-")], "leftovers are cleaned"
    assert sorted(steps) == steps
    assert set(steps) == {5, 10}


def test_a_second_writer_is_told_who_holds_the_run(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys
        from miles_k3.recipe import load_recipe
        from miles_k3.run_folder import RunFolder
        run = RunFolder.create(load_recipe("tiny-cpu", [f"run.folder={sys.argv[1]}"]).recipe)
        print("held", flush=True)
        sys.stdin.read()
    """)
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        recipe = load_recipe("tiny-cpu", [f"run.folder={tmp_path}"]).recipe
        for resume in (True, False):
            with pytest.raises(ConfigError, match=f"is being written by process {holder.pid}"):
                RunFolder.create(recipe, resume=resume)
    finally:
        holder.kill()
        holder.wait()
    with RunFolder.create(recipe, resume=True), pytest.raises(ConfigError, match="this very process"):
        RunFolder.create(recipe, resume=True)
    RunFolder.create(recipe, resume=True).close()


def metrics(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "train/loss": step / 3}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("step", "kept", "dropped"), [(2, (0, 1, 2), 3), (9, (0, 1, 2, 3, 4), 1), (0, (0,), 5), (-1, (), 6)]
)
def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path, step: int, kept: tuple[int, ...], dropped: int) -> None:
    with RunFolder.create(make_recipe(tmp_path)) as run:
        assert run.truncate_metrics(step) == 0
        run.metrics_path.write_text(metrics(0, 1, 2, 3, 4) + '{"step": 5, "train/lo')
        assert run.truncate_metrics(step) == dropped
        assert run.metrics_path.read_text() == metrics(*kept)
        assert run.truncate_metrics(step) == 0


def test_a_foreign_line_of_metrics_is_named(tmp_path: Path) -> None:
    with RunFolder.create(make_recipe(tmp_path)) as run:
        run.metrics_path.write_text(metrics(0) + "oops\n" + metrics(1))
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2: not a line of metrics"):
            run.truncate_metrics(1)
        assert run.metrics_path.read_text() == metrics(0) + "oops\n" + metrics(1)
