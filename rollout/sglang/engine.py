"""SglangEngine: the Engine protocol over a running SGLang. No more of SGLang is imported than its `Backend` does."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from miles_k3.adapters.layout import adapter_layout
from miles_k3.adapters.shard import all_experts
from miles_k3.adapters.transport.loan import Loan, collect_lent
from miles_k3.adapters.update import cut, number_findings, verify_update
from miles_k3.errors import AdapterError, EngineError
from miles_k3.k3.config import K3Config
from miles_k3.protocols import OnTokens
from miles_k3.rollout.embedded.request import judge_params, judge_tokens
from miles_k3.rollout.embedded.text import Detokenizer
from miles_k3.rollout.sglang.adapters import LiveVersions, adapter_name
from miles_k3.rollout.sglang.answers import (
    finish_reason,
    input_logprobs,
    output_logprobs,
    routed_experts,
    sampling_dict,
)
from miles_k3.rollout.sglang.backend import Backend
from miles_k3.rollout.sglang.watch import Watch, answer_text
from miles_k3.types import AdapterConfig, AdapterUpdate, Completion, FinishReason, LentAdapter, SamplingParams


class SglangEngine:
    """Implements `protocols.Engine`. Requests may come from any event loop, one call at a time from a thread each.

    SGLang draws from one generator: `SamplingParams.seed` does not fix an answer here. Priorities are not passed on,
    and what `protected` promises holds as long as the caches hold `max_running` whole requests.
    """

    def __init__(
        self,
        backend: Backend,
        config: K3Config,
        *,
        tokenizer: Detokenizer | None,
        adapter_config: AdapterConfig | None,
        max_lora_rank: int,
        max_sequence_tokens: int,
        memory_saver: bool = False,
        routed_experts: bool = False,
    ) -> None:
        """`adapter_config`: refuse any other. `memory_saver`, `routed_experts`: whether SGLang was started for them."""
        self._backend, self.config, self.tokenizer = backend, config, tokenizer
        self.adapter_config, self.max_lora_rank = adapter_config, max_lora_rank
        self.max_sequence_tokens, self._saver, self._captures = max_sequence_tokens, memory_saver, routed_experts
        self._versions = LiveVersions()
        self._running: set[str] = set()
        self._ids = itertools.count()
        self._counters: Counter[str] = Counter()
        self._asleep = self._closed = False

    @property
    def adapter_version(self) -> int:
        """The version that new requests use; -1, the bare base, before the first adapter."""
        return self._versions.current

    # --- requests -----------------------------------------------------------------------------------------------
    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        adapter_version: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Continue `token_ids`. Cancelling the call aborts the request.

        Raises EngineError on bad tokens or parameters, on what does not fit, a version that is not live, an id that is
        in use, while the engine sleeps or is closed, and SglangGoneError when SGLang's processes end.
        """
        self._refuse_unready("generate")
        prompt = self._judge(token_ids, params)
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        if request_id in self._running:
            raise EngineError(f"request id {request_id!r} is in use; choose another or leave it out")
        sampling = sampling_dict(params)
        try:
            version = self._versions.acquire(adapter_version)
        except AdapterError as e:
            raise EngineError(str(e)) from e
        self._running.add(request_id)
        watch = Watch.over(
            params, self.tokenizer, _on_this_loop(on_tokens), stop=lambda: self._backend.abort(request_id)
        )
        try:
            answer = await self._backend.generate(
                prompt, sampling, request_id=request_id, adapter=adapter_name(version),
                routed_experts=params.return_routed_experts, on_progress=watch.hear if watch else None,
            )  # fmt: skip
            return self._completion(prompt, params, version, answer, watch)
        except BaseException:
            self._backend.abort(request_id)
            raise
        finally:
            self._running.discard(request_id)
            self._versions.release(version)

    def _judge(self, token_ids: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        judge_params(params, self.tokenizer is not None)
        prompt = judge_tokens(token_ids, self.config.vocab_size, "the prompt")
        if len(prompt) + params.max_new_tokens > self.max_sequence_tokens:
            raise EngineError(
                f"the prompt has {len(prompt)} tokens and max_new_tokens is {params.max_new_tokens}: "
                f"{len(prompt) + params.max_new_tokens} together, but sequences are limited to "
                f"{self.max_sequence_tokens}; raise task.max_prompt_tokens or lower rollout.sampling.max_new_tokens"
            )
        if params.return_routed_experts and not self._captures:
            raise EngineError(
                "routed experts were asked for, but SGLang was started without them; set algorithm.routing_replay: true"
            )
        return prompt

    def _completion(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        version: int,
        answer: Mapping[str, Any],
        watch: Watch | None,
    ) -> Completion:
        meta, tokens = answer["meta_info"], tuple(map(int, answer["output_ids"]))
        logprobs, reason = output_logprobs(meta, tokens), finish_reason(meta)
        error, cut = None, watch.cut if watch else None
        if cut is not None:  # SGLang went on until it heard of the stop string
            tokens, logprobs, reason = tokens[: cut.num_tokens], logprobs[: cut.num_tokens], FinishReason.STOP
        if not all(map(math.isfinite, logprobs)):
            reason, error = FinishReason.ERROR, "SGLang gave a log-probability that is not finite"
        routes = None
        if params.return_routed_experts and reason is not FinishReason.ABORT:
            whole = len(prompt) + len(answer["output_ids"])
            routes = routed_experts(meta, whole, self.config)[: len(prompt) + len(tokens) - 1]
        self._counters[f"finished_{reason}"] += 1
        self._counters["generated_tokens"] += len(tokens)
        return Completion(
            token_ids=tokens, logprobs=logprobs, text=answer_text(self.tokenizer, tokens, params, cut),
            finish_reason=reason, adapter_version=version, routed_experts=routes, error=error,
        )  # fmt: skip

    def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what it has. Unknown ids are ignored."""
        if request_id in self._running:
            self._backend.abort(request_id)

    # --- scoring ------------------------------------------------------------------------------------------------
    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probabilities of tokens 1.. of each sequence under the newest adapter: fp32 [len - 1] each, on the host.

        Raises EngineError on bad tokens, and on temperatures other than 1: SGLang scores prompts at 1 only.
        """
        self._refuse_unready("score")
        if temperature != 1.0:
            raise EngineError(f"score got temperature {temperature}; SGLang scores prompts at temperature 1 only")
        judged = [judge_tokens(s, self.config.vocab_size, f"sequence {i}") for i, s in enumerate(sequences)]
        asked = [s for s in judged if len(s) > 1]
        metas = iter(self._backend.score(asked, adapter_name(self.adapter_version)) if asked else [])
        return [input_logprobs(next(metas), s) if len(s) > 1 else torch.zeros(0) for s in judged]

    # --- adapters and memory ------------------------------------------------------------------------------------
    def load_adapter(self, update: AdapterUpdate | LentAdapter) -> None:
        """All or nothing: verify, retire the version before the last, load, and make it the current one.

        A whole update is verified here, what was lent by who lends it, since SGLang looks at shapes when the adapter is
        first used and ends then. Never waits: raises AdapterError while the version that has to go still serves
        requests.
        """
        self._refuse_unready("load_adapter")
        expected = self.adapter_config
        if expected is not None and update.config != expected and update.config.rank <= self.max_lora_rank:
            raise AdapterError(f"adapter v{update.version} is {update.config}, this run's adapters are {expected}")
        following = None if self.adapter_version < 0 else self.adapter_version + 1
        limits = {"max_rank": self.max_lora_rank, "expected_version": following}
        if isinstance(update, LentAdapter):
            if problems := list(number_findings(update, **limits)):
                raise AdapterError("\n".join(f"adapter v{update.version} {problem}" for problem in problems))
            self._load(update)
            return
        layout = adapter_layout(self.config, update.config)
        verify_update(update, layout, **limits)
        experts = all_experts(layout)
        loan = Loan(cut(update, layout, experts), experts, readers=1, keep=False)
        self._load(LentAdapter(
            version=update.version, config=update.config, sha256=update.sha256, shards=(loan.lent,)
        ))  # fmt: skip
        loan.read()
        collect_lent()

    def _load(self, lent: LentAdapter) -> None:
        retiring = self._versions.to_retire(lent.version)
        if retiring is not None:
            self._versions.retire(retiring)
            self._backend.unload(_name(retiring))
        self._backend.load(_name(lent.version), lent)
        self._versions.adopt(lent.version)

    def pause(self, *, retract: bool = False) -> None:
        """Stop computing, requests and all; with `retract` their memory is given back and computed again later."""
        self._refuse_unready("pause")
        self._backend.pause("retract" if retract else "in_place")

    def unpause(self) -> None:
        """Go on after `pause`."""
        self._backend.unpause()

    def sleep(self) -> None:
        """Give caches and weights back. Raises EngineError while requests run, or where SGLang was not started so."""
        if self._running:
            raise EngineError(f"{len(self._running)} requests run or wait; await or abort them before sleep")
        if not self._saver:
            raise EngineError("SGLang was started without its memory saver; set rollout.sleep_while_training: true")
        if not self._asleep:
            self._backend.release(("kv_cache", "weights"))
        self._asleep = True

    def wake(self) -> None:
        """Take them again. Raises EngineError when the engine is closed."""
        if self._closed:
            raise EngineError("the engine is closed; make a new one")
        if self._asleep:
            self._backend.resume(("weights", "kv_cache"))
        self._asleep = False

    def _refuse_unready(self, verb: str) -> None:
        if self._closed:
            raise EngineError(f"{verb} on a closed engine; make a new one")
        if self._asleep:
            raise EngineError(f"{verb} while the engine sleeps; call wake() first")

    def close(self) -> None:
        """Abort everything and end SGLang's processes; a closed engine stays closed."""
        self._closed = True
        self._backend.close()

    def stats(self) -> Mapping[str, float]:
        """Gauges of now and counters since the start. Raises SglangGoneError when SGLang's processes have ended."""
        state = {} if self._closed else self._backend.state()
        numbers = {k: float(v) for k, v in state.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        accepted = numbers.get("avg_spec_accept_length")
        drafted = {} if accepted is None else {"tokens_per_verify": accepted}
        return {
            "running": len(self._running), "adapter_version": self.adapter_version,
            "generated_tokens_per_s": numbers.get("last_gen_throughput", 0.0), **drafted, **self._counters,
        }  # fmt: skip


def _on_this_loop(on_tokens: OnTokens | None) -> OnTokens | None:
    """The same, called by the running event loop: SGLang tells of tokens on a thread of its own."""
    if on_tokens is None:
        return None
    loop, told = asyncio.get_running_loop(), on_tokens
    return lambda tokens, logprobs: loop.call_soon_threadsafe(told, tokens, logprobs) and None


def _name(version: int) -> str:
    name = adapter_name(version)
    assert name is not None
    return name
