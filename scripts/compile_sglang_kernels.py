#!/usr/bin/env python3
"""Compile the kernels that SGLang leaves to its first request, for a GPU that needn't be there.

Needs SGLang's environment and a CUDA toolkit (CUDA_HOME); takes 4 to 7 minutes, nearly all of it for Marlin's product.

    TVM_FFI_CACHE_DIR=FOLDER CUDA_HOME=/usr/local/cuda python scripts/compile_sglang_kernels.py [--capability 90]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from miles_k3.rollout.sglang.kernels import compile_ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="90 is Hopper, 100 and 103 are Blackwell")
    parser.add_argument("--expert-parallel", action="store_true", help="for engines whose experts lie on several GPUs")
    options = parser.parse_args()
    generation = divmod(options.capability, 10)
    named = SimpleNamespace(
        major=generation[0], minor=generation[1], name="a GPU", total_memory=1 << 37, multi_processor_count=132,
        warp_size=32, gcnArchName="",
    )  # fmt: skip
    stands_in = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_capability": lambda *_: generation, "get_device_properties": lambda *_: named,
        "get_device_name": lambda *_: named.name, "is_initialized": lambda: False,
        "get_arch_list": lambda: [f"sm_{options.capability}"],
    }  # fmt: skip
    with patch.multiple(torch.cuda, **stands_in):
        print(f"{compile_ahead(expert_parallel=options.expert_parallel):.0f} s")


if __name__ == "__main__":
    main()
