"""The command line: answers at once, one sentence for a user's error, hands over what it was told."""

import errno
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from miles_k3 import cli
from miles_k3.errors import SyncError
from miles_k3.findings import Finding, Level
from miles_k3.recipe import load_recipe
from miles_k3.run_folder import RunFolder


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["miles-k3", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> list:
    """Stands for the training loop and the demo; the list holds what they were called with."""
    calls: list = []
    module = ModuleType("miles_k3.loop")

    def run_training(recipe, run, *, resume):
        calls.append((recipe, run, resume))
        return SimpleNamespace(adapter=run.adapter, plots=[], stopped_by=STOPPED.get(recipe.run.name))

    module.run_training = run_training  # type: ignore[attr-defined]
    module.run_eval = lambda recipe, adapter, world: calls.append((recipe, adapter)) or RESULT  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "miles_k3.loop", module)
    demo = ModuleType("miles_k3.demo")
    demo.run_demo = calls.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "miles_k3.demo", demo)
    return calls


STOPPED = {"by-term": signal.SIGTERM, "by-int": signal.SIGINT}


@dataclass
class Result:
    accuracy: float = 1 / 3
    num_prompts: int = 256


RESULT = Result()


def test_help_answers_within_a_second_and_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['miles-k3', '--help']\n"
        "from miles_k3.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'omegaconf', 'pydantic', 'wandb'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    seconds, shown = [], ""
    for _ in range(2):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        after, shown = os.times(), done.stdout
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    for command in ("train", "eval", "check", "plot", "demo", "recipe", "version"):
        assert command in shown
    assert min(seconds) < 1.0, "processor time, since others may use the machine"


def test_python_m_miles_k3_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "miles_k3", "version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("miles-k3 ")
    assert "torch 2" in done.stdout


def test_a_users_error_is_sentences_and_exit_code_2(run_cli) -> None:
    done = run_cli("train", "tiny-cpu", "--set", "trainer.lr=1e-5", "--set", "rollout.group_sise=3")
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: rollout.group_sise: unknown key; did you mean rollout.group_size? (--set)",
        "error: trainer.lr: text '1e-5' given, expected a number; YAML needs the dot: write 1.0e-5 (--set)",
    ]
    assert "Traceback" not in done.err
    assert done.out == ""


@pytest.mark.parametrize("place", [0, 2])
def test_debug_shows_where_it_came_from(place: int) -> None:
    arguments = ["train", "nope"]
    arguments.insert(place, "--debug")
    done = subprocess.run(
        [sys.executable, "-m", "miles_k3", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError: nope: no recipe of that name" in done.stderr


def test_train_takes_the_run_folder_and_gives_it_to_the_loop(run_cli, loop: list, tmp_path: Path) -> None:
    arguments = ["train", "tiny-cpu", "--set", f"run.folder={tmp_path}", "--set", "trainer.lr=0.25"]
    done = run_cli(*arguments)
    assert done.code == 0, done.err
    (recipe, run, resume) = loop[0]
    assert (recipe.trainer.lr, recipe.lora.rank, resume) == (0.25, 8, False)
    assert run.path == tmp_path / "tiny-cpu"
    assert str(run.path) in done.err
    run.metrics_path.write_text('{"step": 0}\n')
    again = run_cli(*arguments)
    assert again.code == 2
    assert "go on with it by --resume" in again.err
    assert run_cli(*arguments, "--resume").code == 0
    assert loop[1][2] is True
    assert run_cli("train", str(run.path), "--resume").code == 0
    assert loop[2][0] == recipe
    assert loop[2][1].path == run.path


@pytest.mark.parametrize(("name", "code"), [("by-term", 143), ("by-int", 130), ("to-its-end", 0)])
def test_a_run_that_was_stopped_says_so_by_its_exit_code(run_cli, loop: list, tmp_path: Path, name, code) -> None:
    done = run_cli("train", "tiny-cpu", "--set", f"run.folder={tmp_path}", "--set", f"run.name={name}")
    assert done.code == code


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "/r"), "/r: Permission denied; change its permissions"),
        (FileExistsError(errno.EEXIST, "File exists", "/r"), "/r: File exists; a part of the path is a file"),
        (TimeoutError(), "TimeoutError; miles-k3 --debug shows where it happened"),
    ],
)
def test_a_refusal_of_the_system_is_one_sentence(
    run_cli, loop: list, tmp_path: Path, error: OSError, said: str
) -> None:
    def fail(recipe, run, *, resume):
        raise error

    sys.modules["miles_k3.loop"].run_training = fail  # type: ignore[attr-defined]
    done = run_cli("train", "tiny-cpu", "--set", f"run.folder={tmp_path}")
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith(f"error: {said}")


def test_an_error_inside_the_run_releases_it(run_cli, loop: list, tmp_path: Path) -> None:
    def fail(recipe, run, *, resume):
        raise SyncError("the engine did not follow")

    sys.modules["miles_k3.loop"].run_training = fail  # type: ignore[attr-defined]
    done = run_cli("train", "tiny-cpu", "--set", f"run.folder={tmp_path}")
    assert (done.code, done.err.splitlines()[-1]) == (2, "error: the engine did not follow")
    RunFolder.create(load_recipe("tiny-cpu", [f"run.folder={tmp_path}"]).recipe, resume=True).close()


def test_eval_of_a_recipe_a_run_and_an_adapter(run_cli, loop: list, tmp_path: Path) -> None:
    done = run_cli("eval", "tiny-cpu")
    assert done.out == "accuracy: 0.3333\nnum_prompts: 256\n"
    assert loop[0][1] is None
    with RunFolder.create(load_recipe("tiny-cpu", [f"run.folder={tmp_path}"]).recipe) as run:
        missing = run_cli("eval", str(run.path))
        assert missing.code == 2
        assert "has exported no adapter yet" in missing.err
        run.adapter.mkdir()
        (run.adapter / "adapter_config.json").touch()
        run_cli("eval", str(run.path), "--set", "eval.prompts=7")
        assert loop[1][1] == run.adapter
        assert loop[1][0].eval.prompts == 7
        run_cli("eval", "tiny-cpu", "--adapter", str(run.adapter))
        assert loop[2][1] == run.adapter
    wrong = run_cli("eval", "tiny-cpu", "--adapter", "/nope")
    assert (wrong.code, "no such folder" in wrong.err) == (2, True)
    assert len(loop) == 3


@pytest.mark.parametrize(("level", "code", "mark"), [(Level.OK, 0, "✓"), (Level.WARN, 0, "!"), (Level.FAIL, 1, "✗")])
def test_check_fails_when_a_finding_does(
    run_cli, monkeypatch: pytest.MonkeyPatch, level: Level, code: int, mark: str
) -> None:
    import miles_k3.check

    findings = [Finding("sizes", Level.OK, "fit"), Finding("model", level, "[/m] " + "long " * 60)]
    monkeypatch.setattr(miles_k3.check, "check_recipe", lambda recipe, world: findings)
    done = run_cli("check", "tiny-cpu")
    assert done.code == code
    assert done.out.splitlines() == ["✓ sizes: fit", f"{mark} model: {findings[1].text}"]


def test_demo_passes_its_seed(run_cli, loop: list) -> None:
    assert run_cli("demo", "--seed", "3").code == 0
    assert run_cli("demo").code == 0
    assert loop == [3, 0]
    assert run_cli("demo", "--seed", "-1").code == 2


def test_plot_draws_each_run_and_the_comparison(run_cli, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "rollout/reward": 0.5}\n')
    out = tmp_path / "both.png"
    done = run_cli("plot", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out))
    expected = [tmp_path / "a/plots/reward.png", tmp_path / "b/plots/reward.png", out]
    assert done.out.splitlines() == [str(path) for path in expected]
    assert all(path.is_file() for path in expected)
    assert run_cli("plot", str(tmp_path)).code == 2


def test_recipe_show_names_every_value_and_its_place(run_cli) -> None:
    done = run_cli("recipe", "show", "tiny-cpu", "--set", "lora.rank=4")
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.out.splitlines()}
    assert lines["lora.rank"].split() == ["4", "--set", "(default", "16)"]
    assert lines["rollout.max_lora_rank"].split()[0] == "4"
    assert lines["rollout.max_lora_rank"].endswith("as ${lora.rank} (default 16)")
    assert "recipes/tiny-cpu.yaml:" in lines["task.params.min_terms"]
    changed = run_cli("recipe", "show", "tiny-cpu", "--changed").out
    assert "trainer.lr " in changed
    assert "trainer.adam_beta1" not in changed, "as the default"
    assert run_cli("recipe", "list").out.splitlines()[:1] == ["base"]


def test_recipe_diff_and_explain(run_cli) -> None:
    lines = run_cli("recipe", "diff", "k3-16xgb300", "k3-64xgb300").out.splitlines()
    assert lines[0].split() == ["k3-16xgb300", "k3-64xgb300"]
    assert ["cluster.nodes", "4", "16"] in [line.split() for line in lines]
    assert not any(line.startswith("task.") for line in lines)
    against = run_cli("recipe", "diff", "tiny-cpu", "--set", "lora.rank=4").out
    assert not any(line.split()[0] == "task.params" for line in against.splitlines()), "its keys say it"
    assert ["lora.rank", "4", "16"] in [line.split() for line in against.splitlines()]
    assert "say the same" in run_cli("recipe", "diff", "tiny-cpu", "tiny-cpu").out
    assert "  type: number" in run_cli("recipe", "explain", "trainer.lr").out
    assert "did you mean trainer.lr?" in run_cli("recipe", "explain", "trainer.lrr").err


def test_version_option(run_cli) -> None:
    assert run_cli("--version").out == run_cli("version").out
