"""One root for every error that a user can cause; each sentence says what came, what was expected and what to do."""

import errno


class MilesError(Exception):
    """Root of the product's errors: the CLI prints these without a traceback and exits with 2."""


class ConfigError(MilesError):
    """A recipe or a command line is wrong; holds every finding, not only the first."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CheckpointError(MilesError):
    """A model or run folder is missing, torn, or holds a tensor of another shape or dtype."""


class AdapterError(MilesError):
    """An adapter does not fit the model, the slots, or the version that was expected next."""


class TransportError(AdapterError):
    """An adapter did not reach another process whole; that one keeps the version it had."""


class SyncError(MilesError):
    """Trainer and engine disagree after a sync; the run stops rather than sample from stale weights."""


class DataError(MilesError):
    """A data set is empty, malformed, or does not fit the limits of the recipe."""


class EngineError(MilesError):
    """The rollout engine refused or failed a request."""


class LaunchError(MilesError):
    """The processes or devices that a recipe asks for can't be had."""


def remedy(error: OSError, place: str, otherwise: str) -> str:
    """What to do about a refusal of the system; `place`: what may be chosen instead, "another folder"."""
    remedies = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some of your quota",
        errno.EROFS: f"choose {place} that can be written",
        errno.EACCES: f"change its permissions or choose {place}",
        errno.EPERM: f"change its permissions or choose {place}",
        errno.ENOTDIR: f"a part of the path is a file; choose {place}",
        errno.EEXIST: f"a part of the path is a file; choose {place}",
    }
    return remedies.get(error.errno or 0, otherwise)
