"""Refuse tracked files that name a package registry or a path of one machine.

Where packages come from is each machine's own setting (pip's and uv's configuration), and a path below somebody's home
folder works for nobody else. Run by `make lint`; prints file:line for each find.
"""

import re
import subprocess
import sys
from pathlib import Path

# Written in parts so that this file passes its own check.
REGISTRY_HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("pypi", "nvidia", "com"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("conda", "anaconda", "org"),
        ("deb", "debian", "org"),
    )
]
REGISTRY_OPTIONS = ["-".join(parts) for parts in (("index", "url"), ("find", "links"), ("trusted", "host"))]

RULES = {
    "names a package registry": re.compile("|".join(map(re.escape, REGISTRY_HOSTS)), re.IGNORECASE),
    "sets where packages come from": re.compile(f"--(?:extra-)?(?:{'|'.join(REGISTRY_OPTIONS)})"),
    "holds a path below a home folder": re.compile(r"(?<![\w.~-])/(?:root|home/[\w.-]+|Users/[\w.-]+)/"),
}


def find_leaks(text: str, checkout: str) -> list[tuple[int, str]]:
    """Return (line number, what is wrong) for each line of `text` that breaks a rule."""
    leaks = []
    for number, line in enumerate(text.splitlines(), start=1):
        leaks += [(number, rule) for rule, pattern in RULES.items() if pattern.search(line)]
        if f"{checkout}/" in line:
            leaks.append((number, "holds the path of this checkout"))
    return leaks


def tracked_texts(root: Path) -> list[tuple[str, str]]:
    """Return (name, text) of each tracked text file that is there; links and binaries are left out."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    texts = []
    for name in filter(None, listing.split("\0")):
        path = root / name
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" not in content[:8192]:
            texts.append((name, content.decode(errors="replace")))
    return texts


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    complaints = [
        f"{name}:{number}: {rule}"
        for name, text in tracked_texts(root)
        for number, rule in find_leaks(text, checkout=str(root))
    ]
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
