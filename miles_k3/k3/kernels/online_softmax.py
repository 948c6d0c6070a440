# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""A softmax over more keys than fit at once: what attention kernels do with each run of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def accumulate(acc, top, total, score, values):
    """(weighted values, largest score, sum of weights), with a run's scores [queries, tokens], -1e30 where nothing is
    seen, and its values [tokens, width] in: earlier sums are rescaled when a larger score comes."""
    higher = tl.maximum(top, tl.max(score, 1))
    p = tl.exp(score - higher[:, None])
    old = tl.exp(top - higher)
    total = total * old + tl.sum(p, 1)
    acc = tl.dot(p.to(values.dtype), values, acc * old[:, None], input_precision="ieee")
    return acc, higher, total
