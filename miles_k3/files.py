"""Files that survive being killed: write elsewhere, flush to disk, rename. And a lock that dies with its process."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Self

from miles_k3.errors import ConfigError

LOCK = ".lock"
_held: dict[Path, int] = {}  # a process doesn't conflict with its own file locks, so it keeps a list of them


class FolderLock:
    """One writer a folder. The lock belongs to the process, not to its children, and ends with it however it ends."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self._folder, self._descriptor = folder, descriptor

    @classmethod
    def take(cls, folder: Path, other: str = "another run.name") -> Self:
        """Make the folder if needed and lock it. Raises ConfigError naming the process that holds it; `other` is the
        way out."""
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        if _held.get(folder) == os.getpid():
            raise ConfigError(f"{folder} is being written by this very process ({os.getpid()}); close that run first")
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "of unknown number"
            os.close(descriptor)
            raise ConfigError(
                f"{folder} is being written by process {holder}; wait for it or end it, or choose {other}"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        _held[folder] = os.getpid()
        return cls(folder, descriptor)

    def release(self) -> None:
        """Give the folder back; a second call does nothing."""
        if self._descriptor >= 0:
            _held.pop(self._folder, None)
            os.close(self._descriptor)
            self._descriptor = -1


def write_text(path: Path, text: str) -> None:
    """Replace a file's content: at any moment the old one or the new one is there."""
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder`, and itself, to disk."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(root) / name)
        _sync(Path(root))


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to disk, so that a rename outlives a power cut."""
    _sync(folder)


def remove_tree(path: Path) -> None:
    """Remove a file or folder that may not be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onexc=_refused)
    else:
        path.unlink(missing_ok=True)


def _refused(_function: object, path: str, error: BaseException) -> None:
    if isinstance(error, OSError):
        error.filename = path  # its own has no folder
    raise error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
