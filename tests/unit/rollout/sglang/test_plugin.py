"""The plugin's own part: what is visible to SGLang, and that nothing of it fails without a word."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from miles_k3.rollout.sglang import plugin
from miles_k3.rollout.sglang.versions import VERIFIED, version_problem
from miles_k3.rollout.sglang.visible import GROUP, NAME, TARGET, make_visible

ROOT = Path(__file__).parents[4]


def test_the_entry_point_is_the_packages_own() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert declared == {GROUP: {NAME: TARGET}}
    module, _, function = TARGET.partition(":")
    assert callable(getattr(import_module(module), function))


def test_a_process_finds_the_plugin_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("miles_k3.rollout.sglang.visible.entry_points", lambda **_: ())
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "/first", "SGLANG_PLUGINS": "other"}
    folder = make_visible(environment)
    assert folder is not None
    assert environment["PYTHONPATH"].startswith("/first" + os.pathsep)
    assert environment["SGLANG_PLUGINS"] == "other,miles_k3"
    ask = f"from importlib.metadata import entry_points; print([p.value for p in entry_points(group={GROUP!r})])"
    found = subprocess.run(
        [sys.executable, "-S", "-c", ask], env=environment, capture_output=True, text=True, check=True
    )
    assert TARGET in found.stdout
    folder.cleanup()


@pytest.mark.parametrize(
    ("found", "said"), [(None, "not installed"), ("0.5.23", "0.5.23 is installed"), (VERIFIED, "")]
)
def test_versions(found: str | None, said: str) -> None:
    problem = version_problem(found)
    assert (problem is None) == (not said)
    assert said in (problem or "")


class K3Model:
    """Stands for SGLang's."""

    def __init__(self) -> None:
        self.built = True


def _with_fake_model(monkeypatch: pytest.MonkeyPatch) -> type[K3Model]:
    model = type("KimiK3ForConditionalGeneration", (K3Model,), {})
    for name in ("sglang", "sglang.srt", "sglang.srt.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("sglang.srt.models.kimi_k3")
    module.KimiK3ForConditionalGeneration = model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return model


def test_another_version_refuses_k3_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _with_fake_model(monkeypatch)
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.5.99")
    plugin.install()
    with pytest.raises(RuntimeError, match=rf"SGLang 0.5.99 is installed.*verified with {VERIFIED}"):
        model()


def test_a_hook_that_fails_refuses_k3(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _with_fake_model(monkeypatch)
    hook = ModuleType("some_hook")

    def install() -> None:
        raise AttributeError("no such method")

    hook.install = install  # type: ignore[attr-defined]
    monkeypatch.setattr(plugin, "installed_version", lambda: VERIFIED)
    monkeypatch.setattr(plugin, "HOOKS", (hook,))
    plugin.install()
    with pytest.raises(RuntimeError, match=r"hook some_hook could not be put into SGLang.*no such method"):
        model()
