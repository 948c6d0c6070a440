"""What the README prints works: its commands run, in short form; targets, options, links and the recipe are there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from miles_k3 import cli
from miles_k3.protocols import Engine, Task, Trainer
from miles_k3.recipe import flatten, load_recipe

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HEREDOC = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF\n", re.DOTALL | re.MULTILINE)
SHORT = (
    "rollout.prompts_per_step=4", "rollout.group_size=2", "rollout.max_running=8", "rollout.sampling.max_new_tokens=4",
)  # fmt: skip


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(page: str = README) -> list[list[str]]:
    """Each command of a page's shell blocks, the README's by default, split into words, without its comment."""
    text = HEREDOC.sub("", "".join(blocks("sh", page))).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def miles(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    code: object = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    assert not code, f"{shlex.join(words)} ended with {code}"


def test_own_data_from_the_file_to_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in HEREDOC.findall("".join(blocks("sh"))):
        Path(name).write_text(content)
    ours = [words for words in commands() if words[0] == "miles-k3"]
    assert [words[1] for words in ours] == ["check", "train", "train", "eval", "plot"]
    for words in ours:
        short = [x for value in SHORT for x in ("--set", value)] if words[1] == "train" else []
        miles([*words, *short], monkeypatch)
    lines = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {p.name for p in Path("runs/mine/plots").iterdir()} == {"reward.png", "mismatch.png", "time.png"}
    assert "accuracy: " in capfd.readouterr().out
    assert Path("runs/mine/adapter/adapter_config.json").is_file()


@pytest.mark.slow
def test_a_run_is_exported_and_imported_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "export.md").read_text()
    small = [x for value in (*SHORT, "run.steps=1", "eval.prompts=0") for x in ("--set", value)]
    miles(["miles-k3", "train", "tiny-cpu", "--set", "run.name=mine", *small], monkeypatch)
    ours = commands(page)
    assert [words[1] for words in ours] == ["export", "export", "export", "import", "train"]
    for words in ours:
        miles([*words, *(small if words[1] == "train" else [])], monkeypatch)
    assert {"mine-adapter", "mine-bf16", "mine-mxfp4", "runs"} == {p.name for p in tmp_path.iterdir()}
    assert (tmp_path / "runs" / "next" / "adapter" / "adapter_config.json").is_file()
    assert capfd.readouterr().out.count("read back and compared: ") == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_the_pages_have_the_options_that_they_name(page: Path) -> None:
    """Every `miles-k3` of a shell block, also behind torchrun, is a command with those options."""
    for words in commands(page.read_text()):
        starts = [i for i, word in enumerate(words) if Path(word).name in ("miles-k3", "miles_k3")]
        if not starts:
            continue
        command: typer.core.TyperCommand = typer.main.get_command(cli.app)  # type: ignore[assignment]
        rest = [word for word in words[starts[0] + 1 :] if word != "--debug"]
        while hasattr(command, "commands"):
            assert rest, f"{page.name}: {shlex.join(words)} names no command"
            command, rest = command.commands[rest[0]], rest[1:]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        named = {word.partition("=")[0] for word in rest if word.startswith("--") and word != "--"}
        assert named <= known, f"{page.name}: {shlex.join(words)}"


def test_make_targets_exist() -> None:
    targets = {words[1] for words in commands() if words[0] == "make"}
    targets |= set(re.findall(r"`make ([\w-]+)`", "".join(page.read_text() for page in PAGES)))
    assert {"demo", "test", "lint"} <= targets
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_the_table_names_every_command_and_only_options_that_exist() -> None:
    rows = [
        shlex.split(re.sub(r"[\[\]|\\]|\.\.\.", " ", row))
        for row in re.findall(r"^\| `miles-k3 (.*?)` \|", README, re.M)
    ]
    root = typer.main.get_command(cli.app)
    named = set()
    for row in rows:
        command, path = root, []
        while hasattr(command, "commands"):
            path.append(row[len(path)])
            command = command.commands[path[-1]]  # type: ignore[attr-defined]
        named.add(" ".join(path))
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in row if word.startswith("--")} <= options
    families = {name: c.commands for name, c in root.commands.items() if hasattr(c, "commands")}  # type: ignore[attr-defined]
    members = {f"{family} {name}" for family, commands in families.items() for name in commands}
    assert named == (set(root.commands) - set(families)) | members  # type: ignore[attr-defined]


def test_the_recipe_is_the_shipped_one(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    recipes = ROOT / "recipes"
    file = tmp_path / "readme.yaml"
    file.write_text(text.replace("base: ", f"base: {recipes}/").replace("../assets", f"{ROOT}/assets"))
    shown, shipped = load_recipe(str(file), []), load_recipe("tiny-cpu", [])
    values = dict(flatten(shipped.recipe.model_dump()))
    spelled = [key for key, source in shown.sources.items() if source.startswith(str(file))]
    assert len(spelled) > 10
    assert {k: v for k, v in flatten(shown.recipe.model_dump()) if k in spelled} == {k: values[k] for k in spelled}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    targets = {(page.parent / link).resolve().relative_to(ROOT) for link in links}
    assert not {str(t) for t in targets if not (ROOT / t).exists()}


def test_pages_name_only_keys_that_exist() -> None:
    """`section.key` in a code span of README or docs is a key of the recipe, or a verb such as `trainer.step`."""
    verbs = {name for seam in (Task, Engine, Trainer) for name in vars(seam)}
    sections = load_recipe("tiny-cpu", []).recipe.model_dump()
    for page in PAGES:
        for section, key in re.findall(r"`(?:--set )?(\w+)\.(\w+)(?=[`.:=\s])", page.read_text()):
            if section in sections and key not in verbs:
                assert key in sections[section], f"{page.name}: {section}.{key}"
