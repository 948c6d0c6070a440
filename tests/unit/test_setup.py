"""The set-up keeps its promises: complete pins, links that are links, and a command line that starts without torch."""

import os
import re
import runpy
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
CHECK_TREE = runpy.run_path(str(ROOT / "scripts" / "check_tree.py"))


def requirements(*extras: str) -> list[Requirement]:
    """The project's own, and those of its extras, which may name one another."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    asked = [Requirement(line) for line in lines]
    named = [extra for own in asked if own.name == project["name"] for extra in own.extras]
    return [r for r in asked if r.name != project["name"]] + (requirements(*named) if named else [])


def pins(name: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    pairs = [re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines]
    assert all(pairs), (
        f"{name} has lines that are no exact pin: {[x for x, y in zip(lines, pairs, strict=True) if not y]}"
    )
    return {canonicalize_name(pair[1]): Version(pair[2]) for pair in pairs if pair}


@pytest.mark.parametrize(
    ("constraints", "extras"),
    [("constraints.txt", ("dev", "gpu", "ray")), ("constraints-sglang.txt", ("sglang",))],
)
def test_every_dependency_has_a_pin_that_fits(constraints, extras):
    pinned = pins(constraints)
    for requirement in requirements(*extras):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{constraints} pins no {name}"
        assert pinned[name] in requirement.specifier, f"{constraints} pins {name} {pinned[name]}, asked: {requirement}"


@pytest.mark.parametrize(
    ("constraints", "verified"),
    [
        (
            "constraints.txt",
            {
                "torch": "2.11.0",
                "triton": "3.6.0",
                "megatron-core": "0.19.2",
                "flash-linear-attention": "0.6.0",
                "transformers": "5.17.0",
            },
        ),
        (
            "constraints-sglang.txt",
            {"sglang": "0.5.17", "transformers": "5.12.1", "tokenizers": "0.22.2", "torch": "2.11.0"},
        ),
    ],
)
def test_the_verified_stack_is_pinned(constraints, verified):
    pinned = pins(constraints)
    assert {name: str(pinned[name]) for name in verified} == verified


@pytest.mark.parametrize("folder", ["trainer", "rollout", "adapters"])
def test_code_folders_are_linked_into_the_package(folder):
    link = ROOT / "miles_k3" / folder
    assert link.is_symlink(), f"{link} must be a link; a checkout without symlink support has a text file there"
    assert str(link.readlink()) == f"../{folder}"
    mode = subprocess.run(["git", "ls-files", "-s", str(link)], cwd=ROOT, check=True, capture_output=True, text=True)
    assert mode.stdout.startswith("120000 ")


@pytest.mark.parametrize("name", ["trainer", "rollout", "adapters"])
def test_bare_names_stay_free_for_other_packages(name):
    code = f"import importlib.util; assert importlib.util.find_spec({name!r}) is None; import miles_k3.{name}"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_tracked_files_name_no_registry_and_no_home():
    leaks = [
        f"{name}:{number}: {rule}"
        for name, text in CHECK_TREE["tracked_texts"](ROOT)
        for number, rule in CHECK_TREE["find_leaks"](text, str(ROOT))
    ]
    assert leaks == []


@pytest.mark.parametrize(
    ("line", "is_leak"),
    [
        ("see https://py" + "pi.org/simple", True),
        ("pip install --extra-index" + "-url https://packages.example torch", True),
        ("model: /home" + "/ada/models/k3", True),
        ("model: /ro" + "ot/models", True),
        ("/somewhere/checkout/runs", True),
        ("model: ~/models/k3", False),
        ("https://example.org/ho" + "me/ada/", False),
        ("a/ro" + "ot/b", False),
    ],
)
def test_the_check_of_the_tree_finds_what_it_should(line, is_leak):
    leaks = CHECK_TREE["find_leaks"](f"first line\n{line}\n", "/somewhere/checkout")
    assert [number for number, _ in leaks] == ([2] if is_leak else [])


@pytest.mark.parametrize("module", ["miles_k3.config", "miles_k3.recipe", "miles_k3.cli"])
def test_reading_recipes_and_the_command_line_need_no_torch(module):
    code = f"import sys, {module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_help_starts_without_torch_in_under_a_second():
    def seconds_for_help() -> float:
        # The installed command does the same as this line; here it can also look at what was imported.
        code = (
            "import sys; from miles_k3.cli import main; sys.argv = ['miles-k3', '--help']\n"
            "try: main()\n"
            "finally: assert 'torch' not in sys.modules, 'torch was imported'"
        )
        before = os.times()
        run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
        after = os.times()
        assert run.returncode == 0, run.stderr
        assert "Usage" in run.stdout
        return after.children_user + after.children_system - before.children_user - before.children_system

    # CPU seconds, and the best of three: what the machine does besides is not the command's fault.
    assert min(seconds_for_help() for _ in range(3)) < 1.0


def test_the_command_is_installed():
    command = Path(sys.executable).with_name("miles-k3")
    run = subprocess.run([command, "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# A stand-in for an interpreter: usable, and its `-m venv` makes a folder with itself inside.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    --version) echo "Python 3.12.1" ;;
esac
"""
FAKE_UV = """#!/bin/sh
echo "$*" >> "$UV_LOG"
"""


class Bootstrap:
    """scripts/bootstrap.sh in a folder of its own, with stand-ins for Python and uv."""

    def __init__(self, root: Path):
        self.root = root
        self.log = root.parent / "uv.log"
        self.log.touch()
        (root / "scripts").mkdir(parents=True)
        for name in ("scripts/bootstrap.sh", "constraints.txt", "pyproject.toml"):
            (root / name).write_bytes((ROOT / name).read_bytes())
        self.write_command("python3.12", FAKE_PYTHON)
        self.write_command("uv", FAKE_UV)

    def write_command(self, name: str, text: str) -> None:
        folder = self.root.parent / "bin"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        home = self.root.parent
        env = {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "HOME": str(home), "UV_LOG": str(self.log), **env}
        script = self.root / "scripts" / "bootstrap.sh"
        return subprocess.run(["bash", script], cwd="/", env=env, capture_output=True, text=True)

    def installs(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def bootstrap(tmp_path):
    return Bootstrap(tmp_path / "checkout")


def test_bootstrap_installs_once_and_is_then_quiet_and_quick(bootstrap):
    first = bootstrap.run()
    assert first.returncode == 0, first.stderr
    assert bootstrap.installs() == ["pip install -q --python .venv/bin/python -c constraints.txt -e .[dev]"]

    start = time.perf_counter()
    second = bootstrap.run()
    seconds = time.perf_counter() - start
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert len(bootstrap.installs()) == 1
    assert seconds < 0.3


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_bootstrap_updates_an_environment_with_old_versions_in_place(bootstrap, name):
    bootstrap.run()
    kept = bootstrap.root / ".venv" / "kept"
    kept.touch()
    with (bootstrap.root / name).open("a") as file:
        file.write("# changed\n")
    assert bootstrap.run().returncode == 0
    assert len(bootstrap.installs()) == 2
    assert kept.exists()


def test_bootstrap_makes_the_environment_of_a_moved_checkout_anew(bootstrap):
    bootstrap.run()
    (bootstrap.root / ".venv" / "old").touch()
    bootstrap.root = bootstrap.root.rename(bootstrap.root.with_name("moved"))
    assert bootstrap.run().returncode == 0
    assert not (bootstrap.root / ".venv" / "old").exists()


def test_bootstrap_tries_again_after_a_failed_install(bootstrap):
    bootstrap.write_command("uv", "#!/bin/sh\nexit 1\n")
    bootstrap.write_command("python3.12", FAKE_PYTHON + 'case "$*" in "-m pip "*) exit 1 ;; esac\n')
    failed = bootstrap.run()
    assert failed.returncode != 0
    assert "uv could not install; trying pip" in failed.stderr
    bootstrap.write_command("uv", FAKE_UV)
    assert bootstrap.run().returncode == 0
    assert len(bootstrap.installs()) == 1


def test_bootstrap_passes_by_commands_that_only_look_like_python(bootstrap):
    bootstrap.write_command("python3.12", "#!/bin/sh\nexit 127\n")
    pyenv = bootstrap.root.parent / ".pyenv" / "versions" / "3.12.9" / "bin"
    pyenv.mkdir(parents=True)
    bootstrap.write_command("python3", FAKE_PYTHON)
    (bootstrap.root.parent / "bin" / "python3").rename(pyenv / "python3")
    run = bootstrap.run()
    assert run.returncode == 0, run.stderr
    assert (bootstrap.root / ".venv" / "bin" / "python").exists()


def test_bootstrap_without_a_usable_python_says_in_one_line_what_to_install(bootstrap):
    bootstrap.write_command("broken", "#!/bin/sh\nexit 127\n")
    run = bootstrap.run(MILES_K3_PYTHON=str(bootstrap.root.parent / "bin" / "broken"))
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert "no usable Python >= 3.12 found at" in run.stderr
    assert "install" in run.stderr
