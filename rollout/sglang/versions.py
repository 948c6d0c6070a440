"""Which SGLang the plugin was verified with. Its hooks reach into internals, so any other release is refused."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

VERIFIED = "0.5.17"
INSTALL = "pip install -c constraints-sglang.txt -e '.[sglang]' in an environment of its own"


def installed_version() -> str | None:
    """The installed SGLang's version, or None."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def version_problem(found: str | None) -> str | None:
    """Why K3 can't be served with this SGLang, in one sentence; None when it can."""
    if found is None:
        return f"SGLang is not installed, but rollout.engine is sglang; {INSTALL}, or set rollout.engine: embedded"
    if found != VERIFIED:
        return (
            f"SGLang {found} is installed, miles-k3's plugin was verified with {VERIFIED} and reaches into its "
            f"internals; {INSTALL}, or set rollout.engine: embedded"
        )
    return None
