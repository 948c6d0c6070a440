"""`python -m helpers.loading_memory FOLDER BASE_DTYPE`: prints [bytes of the base, peak of memory while it loads]."""

from __future__ import annotations

import json
import sys

import torch
from k3_cases import large, peak_of_anonymous_memory

from miles_k3.k3.ops import mxfp4
from miles_k3.k3.weights import load_base


def main(folder: str, base_dtype: str) -> None:
    mxfp4._CHUNK = 1 << 18  # dequantise in pieces that show
    with peak_of_anonymous_memory() as peak:
        base = load_base(folder, large(), dtype=torch.bfloat16, base_dtype=base_dtype)
    json.dump([base.num_bytes(), peak[0]], sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
