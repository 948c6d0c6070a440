"""Every case on the CPU, as Triton's interpreter runs it: prints name -> error as JSON."""

from __future__ import annotations

import json
import sys
import traceback

import torch
from helpers.kernel_cases import CASES, nan_filled_memory


def main() -> None:
    """Every case on the CPU, as Triton's interpreter runs it."""
    results: dict[str, str] = {}
    for name, check in CASES.items():
        try:
            with nan_filled_memory():
                check(torch.device("cpu"), torch.float32)
            results[name] = ""
        except Exception:  # noqa: BLE001 - each case is reported by itself
            results[name] = traceback.format_exc()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
