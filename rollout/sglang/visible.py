"""Makes SGLang's processes find the plugin and this very package, also where neither is installed.

SGLang looks for distributions with an entry point on its path; a folder with little more than the entry point's line
is one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import MutableMapping
from importlib.metadata import entry_points
from pathlib import Path

from miles_k3 import __version__

GROUP, NAME, TARGET = "sglang.srt.plugins", "miles_k3", "miles_k3.rollout.sglang.plugin:install"


def write_distribution(folder: Path) -> Path:
    """Put a distribution with nothing but the plugin's entry point into `folder`, which then belongs on the path."""
    info = folder / f"miles_k3_sglang_plugin-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: miles-k3-sglang-plugin\nVersion: {__version__}\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{NAME} = {TARGET}\n")
    return folder


def make_visible(environment: MutableMapping[str, str] = os.environ) -> tempfile.TemporaryDirectory[str] | None:
    """Let processes started with `environment` find the plugin; the folder that it took, to be kept until they end.

    Also overrides SGLANG_PLUGINS where that leaves the plugin out: without it K3's numbers are wrong.
    """
    allowed = environment.get("SGLANG_PLUGINS", "")
    if allowed and NAME not in {name.strip() for name in allowed.split(",")}:
        environment["SGLANG_PLUGINS"] = f"{allowed},{NAME}"
    if any(point.name == NAME for point in entry_points(group=GROUP)):
        return None
    folder = tempfile.TemporaryDirectory(prefix="miles-k3-sglang-")
    added = [str(_root()), str(write_distribution(Path(folder.name)))]
    paths = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p not in added]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *added])
    sys.path += [path for path in added if path not in sys.path]  # processes that are spawned get this list instead
    return folder


def _root() -> Path:
    """Where `import miles_k3` finds this package; it is reached through a link in a checkout."""
    import miles_k3

    return Path(miles_k3.__file__).parents[1]
