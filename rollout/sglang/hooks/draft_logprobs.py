"""Log-probabilities of what was sampled, also where a draft proposed it.

SGLang's DSpark worker refuses batches that ask for them, and its scheduler such requests. Its other workers fill them
in after a verify, by a function that takes any chain of accepted tokens: row j of a request has the distribution of its
j-th committed token.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from miles_k3.rollout.sglang.hooks.expect import expect_parameters

_WANTED = "miles_k3_logprobs_wanted"  # on a worker while it computes a batch that asked


def install() -> None:
    from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs
    from sglang.srt.managers import scheduler
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

    judge, run, prefill = (
        scheduler.validate_dflash_request, DSparkWorkerV2.forward_batch_generation, DSparkWorkerV2._forward_prefill,
    )  # fmt: skip
    expect_parameters(judge, "req", "enable_overlap")
    expect_parameters(run, "self", "batch", "on_publish", "grammar_barrier")
    expect_parameters(prefill, "self", "batch", "on_publish")
    expect_parameters(
        compute_spec_v2_logprobs, "batch", "logits_output", "predict", "accept_index", "speculative_num_steps"
    )

    @functools.wraps(judge)
    def judge_the_rest(req: Any, enable_overlap: bool) -> str | None:
        rest = SimpleNamespace(return_logprob=False, return_hidden_states=req.return_hidden_states)
        return judge(rest, enable_overlap)

    @functools.wraps(run)
    def run_asked(self: Any, batch: Any, *rest: Any, **options: Any) -> Any:
        if not batch.return_logprob:
            return run(self, batch, *rest, **options)
        setattr(self, _WANTED, True)
        batch.return_logprob = False  # it refuses batches that ask
        try:
            result = run(self, batch, *rest, **options)
        finally:
            batch.return_logprob = True
            setattr(self, _WANTED, False)
        if result.accept_lens is not None and len(result.accept_lens):
            tokens, each = result.next_token_ids, result.speculative_num_draft_tokens
            rows = torch.arange(len(tokens), device=tokens.device)
            compute_spec_v2_logprobs(batch, result.logits_output, tokens, rows, each - 1)
        return result

    @functools.wraps(prefill)
    def prefill_asked(self: Any, batch: Any, on_publish: Any) -> Any:
        """The target's own sampling fills them in there."""
        if not getattr(self, _WANTED, False):
            return prefill(self, batch, on_publish)
        batch.return_logprob = True
        try:
            return prefill(self, batch, on_publish)
        finally:
            batch.return_logprob = False

    scheduler.validate_dflash_request = judge_the_rest
    DSparkWorkerV2.forward_batch_generation = run_asked
    DSparkWorkerV2._forward_prefill = prefill_asked
