"""What a process of the product logs, and how."""

from __future__ import annotations

import logging
import os
import sys

NOISY = ("megatron", "matplotlib", "urllib3", "filelock", "asyncio", "markdown_it")


def set_up_logging(*, debug: bool, rank: int = 0) -> None:
    """Lines on stderr: all of rank 0's from INFO on, the others' warnings; with `debug` everything of everyone."""
    # transformers doesn't know K3's model type and says so each time it loads a tokenizer.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info" if debug else "error")
    level = logging.DEBUG if debug else logging.INFO if rank == 0 else logging.WARNING
    named = f"rank {rank}: " if rank else ""
    logging.basicConfig(level=level, format=f"%(levelname)s {named}%(name)s: %(message)s", stream=sys.stderr)
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
