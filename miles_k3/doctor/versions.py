"""Installed packages against what the product asks for and what was verified together."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from miles_k3 import __version__
from miles_k3.findings import Findings
from miles_k3.rollout.sglang.versions import VERIFIED

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = "miles-k3"
NEEDED_PYTHON = (3, 12)
_INSTALL = "pip install -c constraints.txt"
_INSTALL_SGLANG = "pip install -c constraints-sglang.txt -e '.[sglang]'"
_PIN = re.compile(r"([\w.-]+)==(\S+)")


def check_versions(found: Findings, constraints: Path = ROOT / "constraints.txt") -> None:
    """Python and every dependency: absent or too old fails, another than the verified one warns."""
    python = tuple(map(int, platform.python_version_tuple()[:2]))
    if python < NEEDED_PYTHON:
        found.fail("python", platform.python_version(), "make an environment with Python 3.12 or newer")
    else:
        found.add("python", True, f"{platform.python_version()}, miles-k3 {__version__}")
    pins = read_pins(constraints)
    if not pins:
        found.warn("versions", f"{constraints} isn't there, so nothing says what was verified together",
                   "install from a checkout of the repository")  # fmt: skip
    asked = [r for line in requires(DISTRIBUTION) or () if (r := _wanted(line))]
    before, other = len(found), {}
    for requirement in asked:
        name = canonicalize_name(requirement.name)
        if (installed := _installed(name)) is None:
            found.fail(name, f"is not installed, {requirement} is needed", f"{_INSTALL} '{requirement}'")
        elif not requirement.specifier.contains(installed, prereleases=True):
            found.fail(name, f"{installed} is installed, {requirement} is needed", f"{_INSTALL} '{requirement}'")
        elif name in pins and _public(installed) != _public(pins[name]):
            other[name] = f"{name} {installed} (verified: {pins[name]})"
    if other:
        text = f"{len(other)} of {len(asked)} packages are others than those verified together"
        found.warn("versions", f"{text}: {', '.join(other.values())}", f"{_INSTALL} -e . for the verified ones")
    elif len(found) == before:
        found.add("versions", True, f"{len(asked)} packages as verified together")


def check_sglang(found: Findings, *, wanted: bool) -> None:
    """SGLang: installed, and the release that was verified; it fails only where a recipe asks for it."""
    installed = _installed("sglang")
    text, fix = installed or "not installed", f"{_INSTALL_SGLANG} in an environment of its own"
    if installed == VERIFIED:
        found.add("sglang", True, f"{installed}, as verified with the plugin")
    elif wanted:
        found.fail("sglang", f"{text}; {VERIFIED} was verified", f"{fix}, or rollout.engine: embedded")
    elif installed is None:
        found.add("sglang", True, f"{text}; the embedded engine doesn't need it")
    else:
        found.warn("sglang", f"{text} is installed, {VERIFIED} was verified", fix)


def read_pins(path: Path) -> dict[str, str]:
    """Package -> exact version; empty where there is no such file."""
    if not path.is_file():
        return {}
    pairs = [_PIN.fullmatch(line.strip()) for line in path.read_text().splitlines()]
    return {canonicalize_name(pair[1]): pair[2] for pair in pairs if pair}


def _wanted(line: str) -> Requirement | None:
    """A requirement that holds here without extras."""
    requirement = Requirement(line)
    environment = {**default_environment(), "extra": ""}
    return requirement if requirement.marker is None or requirement.marker.evaluate(environment) else None


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _public(number: str) -> str:
    """Without the build's name: 2.11.0+cu130 -> 2.11.0."""
    return number.partition("+")[0]
