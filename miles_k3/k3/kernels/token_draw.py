# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# Triton types neither launches nor what a kernel sees.
"""Drawing tokens from logits in two launches: one pass over the vocabulary in parts, then one part of it once more.

The plain twin is `rollout.embedded.sampler.sample` without top-k and top-p: the same uniforms, the same order of the
vocabulary, sums in another order. A row's token depends on nothing but the row, its seed and its position.

Shapes: B rows, V vocabulary, P parts of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_k3.k3.kernels.launch import dependent, power_of_two, wait_for_inputs

PART = 4096  # tokens


def draw_tokens(
    logits_BV: Tensor, temperature_B: Tensor, greedy_B: Tensor, seeds_B: Tensor, positions_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens int64 [B], their log-probabilities fp32 [B], finite bool [B]) of fp32 logits, whose rows may be strided.

    A row with a logit that isn't finite gives token 0, -inf and False. Raises ValueError for other dtypes, and for
    logits with gaps between tokens.
    """
    if logits_BV.dtype != torch.float32 or logits_BV.stride(1) != 1:
        raise ValueError(
            f"logits are {logits_BV.dtype} with strides {logits_BV.stride()}; it reads float32 rows without gaps"
        )
    rows, vocab = logits_BV.shape
    parts = triton.cdiv(vocab, PART)
    tops_2BP = torch.empty(2, rows, parts, device=logits_BV.device)
    likeliest_BP = torch.empty(rows, parts, dtype=torch.int32, device=logits_BV.device)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprobs_B, finite_B = torch.empty(rows, device=logits_BV.device), torch.empty_like(tokens_B, dtype=torch.bool)
    if not rows:
        return tokens_B, logprobs_B, finite_B
    _sum_parts[(parts, rows)](
        logits_BV, temperature_B, tops_2BP[0], tops_2BP[1], likeliest_BP, logits_BV.stride(0), temperature_B.stride(0),
        vocab, PARTS=parts, PART=PART, num_warps=8, **dependent(),
    )  # fmt: skip
    _pick[(rows,)](
        logits_BV, temperature_B, greedy_B, seeds_B, positions_B, tops_2BP[0], tops_2BP[1], likeliest_BP, tokens_B,
        logprobs_B, finite_B, logits_BV.stride(0), temperature_B.stride(0), vocab, PARTS=parts,
        PARTS_BLOCK=power_of_two(parts), PART=PART, num_warps=8, **dependent(),
    )  # fmt: skip
    return tokens_B, logprobs_B, finite_B


@triton.jit
def _sum_parts(logits_ptr, temperature_ptr, top_ptr, sum_ptr, likeliest_ptr, stride, temperature_stride, vocab,
               PARTS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """A part's largest logit, NaN where one isn't finite, the sum of exponentials below it, and where it is."""
    wait_for_inputs(PDL)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab
    x = tl.load(logits_ptr + row * stride + token, mask=inside, other=float("-inf"))
    x = x / tl.load(temperature_ptr + row * temperature_stride)
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - top), 0)
    broken = tl.sum((inside & ~(tl.abs(x) < float("inf"))).to(tl.int32), 0)
    at = row * PARTS + part
    tl.store(top_ptr + at, tl.where(broken > 0, float("nan"), top))
    tl.store(sum_ptr + at, total)
    tl.store(likeliest_ptr + at, tl.min(tl.where(x == top, token, vocab), 0))


@triton.jit
def _mixed(x):
    """SplitMix64's finalizer of uint64 numbers, as in `sampler.uniforms`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    state = _mixed(seed.to(tl.uint64, bitcast=True) + golden)
    bits = _mixed(state + (position.to(tl.uint64, bitcast=True) + 1) * golden)
    return (bits >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _pick(logits_ptr, temperature_ptr, greedy_ptr, seed_ptr, position_ptr, top_ptr, sum_ptr, likeliest_ptr, token_ptr,
          logprob_ptr, finite_ptr, stride, temperature_stride, vocab, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
          PART: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """The part in which the cumulative sum passes the uniform, then the token in it."""
    wait_for_inputs(PDL)
    row, p = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS_BLOCK)
    tops = tl.load(top_ptr + row * PARTS + p, mask=p < PARTS, other=float("-inf"))
    sums = tl.load(sum_ptr + row * PARTS + p, mask=p < PARTS, other=0.0)
    if tl.sum((tops != tops).to(tl.int32), 0) > 0:
        tl.store(token_ptr + row, tl.zeros([], tl.int64))
        tl.store(logprob_ptr + row, float("-inf"))
        tl.store(finite_ptr + row, False)
        return
    top = tl.max(tops, 0)
    weights = sums * tl.exp(tops - top)
    total = tl.sum(weights, 0)
    target = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row)) * total
    ends = tl.cumsum(weights, 0)
    # Rounding can carry the target past the last part, or token, that has any weight: those are as far as it goes.
    part = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), tl.max(tl.where(weights > 0, p, 0), 0))
    before = tl.sum(tl.where(p == part - 1, ends, 0.0), 0)
    i = tl.arange(0, PART)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    logits_ptr += row * stride
    x = tl.load(logits_ptr + part * PART + i, mask=part * PART + i < vocab, other=float("-inf")) / temperature
    share = tl.exp(x - top)
    passed = tl.sum((before + tl.cumsum(share, 0) <= target).to(tl.int32), 0)
    token = part * PART + tl.minimum(passed, tl.max(tl.where(share > 0, i, 0), 0))
    if tl.load(greedy_ptr + row) != 0:
        best = tl.min(tl.where(tops == top, p, PARTS), 0)
        token = tl.load(likeliest_ptr + row * PARTS + best)
    chosen = tl.load(logits_ptr + token) / temperature
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, chosen - top - tl.log(total))
    tl.store(finite_ptr + row, True)
