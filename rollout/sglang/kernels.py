"""SGLang's kernels that its loader compiles with nvcc at their first use, made before it starts.

Marlin's product of routed experts takes minutes of one core. Left to the first request, or to the recording of CUDA
graphs, it looks like a hang, and every process that needs it waits. What is made is kept in tvm-ffi's cache on disk
(`TVM_FFI_CACHE_DIR`), by source, GPU generation and ABI, where SGLang's processes find it.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from miles_k3.errors import EngineError

_log = logging.getLogger(__name__)
_OPS = "sglang.kernels.ops.moe."


def expert_kernels(*, expert_parallel: bool) -> Sequence[tuple[str, str, tuple[Any, ...]]]:
    """(module, what makes its kernel, arguments): those of a batch whose routed experts carry LoRA.

    Marlin's is the one with a bias: SGLang gives every MXFP4 expert one, zeros where a checkpoint has none.
    """
    return (
        (_OPS + "moe_wna16_marlin", "_jit_moe_wna16_marlin_module", (torch.bfloat16, expert_parallel, True)),
        (_OPS + "moe_align_single_token", "_jit_align_single_token_module", ()),
        (_OPS + "moe_align", "_jit_moe_align_module", (torch.int32,)),
        (_OPS + "moe_topk_sum", "_jit_topk_sum_module", ()),
    )


def compile_ahead(*, expert_parallel: bool) -> float:
    """Make them, or find them made; the seconds that it took. Raises EngineError where nvcc is missing or fails."""
    start = time.perf_counter()
    _log.info("SGLang's expert kernels: where none are kept nvcc makes them, once a machine, in 4 to 7 minutes")
    for module, make, arguments in expert_kernels(expert_parallel=expert_parallel):
        try:
            getattr(importlib.import_module(module), make)(*arguments)
        except (RuntimeError, OSError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise EngineError(
                f"SGLang's kernel {module.removeprefix(_OPS)} was not compiled ({why}); that takes a CUDA toolkit's "
                "nvcc: set CUDA_HOME, or bring what scripts/compile_sglang_kernels.py made (TVM_FFI_CACHE_DIR)"
            ) from error
    return time.perf_counter() - start
