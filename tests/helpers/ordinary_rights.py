"""Rights of an ordinary user for tests that run as root, which no closed folder keeps out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_3 = 0x20080522  # of capget(2)
_OVERRIDE = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def ordinary_rights() -> Iterator[None]:
    """Permissions of files count, for this thread and those begun inside; not for programs that it starts."""
    if os.geteuid() != 0:
        yield
        return
    had = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    _call("capget", had)
    has = (ctypes.c_uint32 * 6)(*had)
    has[0] &= ~_OVERRIDE
    _call("capset", has)
    try:
        yield
    finally:
        _call("capset", had)


def _call(name: str, capabilities: ctypes.Array[ctypes.c_uint32]) -> None:
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)  # 0: this thread
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(header, capabilities) != 0:
        raise OSError(ctypes.get_errno(), name)
