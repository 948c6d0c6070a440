"""K3's Triton kernels against their plain twins, on any device: a GPU, or a CPU in Triton's interpreter.

`python -m helpers.kernel_cases` (with TRITON_INTERPRET=1) runs each case on the CPU in fp32 and prints name -> error.
Fresh memory is full of NaN, so an output that nobody wrote shows.

Tolerance, of the largest value: fp32 1e-5, the rounding of sums of at most a few hundred products in another order.
bfloat16 2e-2 where the twin rounds every intermediate to 8 bits (2^-9 each, a few of them in a row).
"""

from helpers.kernel_cases import attention, delta_rule, dense, draws, experts  # noqa: F401 - they register their cases
from helpers.kernel_cases.common import CASES, Draw, nan_filled_memory
from helpers.kernel_cases.experts import expert_term, fp32_term

__all__ = ["CASES", "Draw", "expert_term", "fp32_term", "nan_filled_memory"]
