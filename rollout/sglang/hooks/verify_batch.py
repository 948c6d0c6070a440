"""The rows of each request in a batch that verifies a draft's tokens, for LoRA's segments.

SGLang counts such a batch as an extension, and its LoRA code asks extensions for the lengths of their parts, which this
one doesn't carry. They are put in for the length of that one call: elsewhere they would mean a prompt.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from miles_k3.rollout.sglang.hooks.expect import expect_parameters


def rows_per_request(rows: int, requests: int, drafted: Any) -> int:
    """How many rows each request has among `rows`; `drafted` is SGLang's description of what is verified.

    Raises RuntimeError where they differ between requests: the segments in captured graphs are all of one length.
    """
    each, left = divmod(rows, requests)
    if left or getattr(drafted, "ragged_verify_layout", None) is not None or each != drafted.draft_token_num:
        raise RuntimeError(
            f"a batch verifies {rows} tokens of {requests} requests with {drafted.draft_token_num} each at most; "
            "adapters need as many of every request: unset SGLANG_RAGGED_VERIFY_MODE"
        )
    return each


def install() -> None:
    from sglang.srt.lora.lora_manager import LoRAManager

    prepare = LoRAManager.prepare_lora_batch
    expect_parameters(prepare, "self", "forward_batch")

    @functools.wraps(prepare)
    def with_lengths(self: Any, forward_batch: Any) -> None:
        if not forward_batch.forward_mode.is_target_verify():
            prepare(self, forward_batch)
            return
        requests, tokens = forward_batch.batch_size, forward_batch.input_ids
        each = rows_per_request(len(tokens), requests, forward_batch.spec_info)
        kept = forward_batch.extend_seq_lens, forward_batch.extend_seq_lens_cpu
        forward_batch.extend_seq_lens_cpu = [each] * requests
        forward_batch.extend_seq_lens = torch.full((requests,), each, dtype=torch.int32, device=tokens.device)
        try:
            prepare(self, forward_batch)
        finally:
            forward_batch.extend_seq_lens, forward_batch.extend_seq_lens_cpu = kept

    LoRAManager.prepare_lora_batch = with_lengths
