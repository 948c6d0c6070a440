"""EmbeddedEngine: the rollout engine inside the trainer's process, on the same base tensors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from miles_k3.adapters.store import AdapterStore
from miles_k3.errors import AdapterError, EngineError
from miles_k3.k3.config import K3Config
from miles_k3.k3.weights import ResidentBase
from miles_k3.protocols import OnTokens
from miles_k3.rollout.cache.blocks import Kind
from miles_k3.rollout.cache.layout import Layout
from miles_k3.rollout.embedded.model_choice import choose_model, records_steps
from miles_k3.rollout.embedded.proposal import Speculative
from miles_k3.rollout.embedded.request import Request, Stage, judge_params, judge_tokens
from miles_k3.rollout.embedded.scoring import score_together
from miles_k3.rollout.embedded.serving_parts import Serving
from miles_k3.rollout.embedded.speculation import Speculator
from miles_k3.rollout.embedded.text import Detokenizer, StopText
from miles_k3.rollout.speculative.blocks import Example
from miles_k3.rollout.speculative.state_keeper import StateKeeper, on_host
from miles_k3.types import AdapterConfig, AdapterUpdate, Completion, FinishReason, SamplingParams


class EmbeddedEngine:
    """Implements `protocols.Engine`. One event loop at a time drives it; several `asyncio.run` in turn are fine.

    Steps run on the loop's own thread, with a turn for the loop's other tasks after each. All methods must be called
    from that thread. Every request uses the newest adapter unless it pins a live version; before the first adapter
    that is version -1, the bare base.

    Options: `num_pages` 0 holds `max_running` requests of `max_sequence_tokens`. `adapter_config`: refuse any other.
    `cache_slots`: state checkpoints that the prefix cache may hold beside those that find room among the requests'; 0
    takes a quarter of `max_running`. `cache_min_tokens`: shorter prefixes are not kept. `reserve_tokens`: answer tokens
    that a request gets memory for at first; None for all it may have. `cache_pool`: one memory for states and pages, or
    one of each kind. `track_interval`: tokens between snapshots of long prompts and growing answers; 0 takes none.
    `adapter_slots`: versions that can be live at once beside the base. `overlap`: plan and queue a step while the one
    before runs; None does so on CUDA. `speculative`: draft tokens, and verify them. `kernels`: the forward in plain
    torch or on Triton kernels; auto takes those on CUDA where the widths fit. `cuda_graphs`: record steps without
    prompts; None does so with the kernels.
    """

    def __init__(
        self,
        base: ResidentBase,
        config: K3Config,
        *,
        tokenizer: Detokenizer | None = None,
        adapter_config: AdapterConfig | None = None,
        max_lora_rank: int = 16,
        adapter_slots: int = 2,
        max_running: int = 256,
        page_size: int = 16,
        num_pages: int = 0,
        prefill_chunk_tokens: int = 4096,
        max_sequence_tokens: int,
        dtype: torch.dtype | None = None,
        share_prompts: bool = True,
        prefix_cache: Literal["off", "radix", "paged"] = "off",
        cache_slots: int = 0,
        cache_pool: Literal["unified", "split"] = "unified",
        cache_min_tokens: int = 64,
        track_interval: int = 1024,
        reserve_tokens: int | None = None,
        overlap: bool | None = None,
        speculative: Speculative | None = None,
        kernels: Literal["auto", "plain", "fused"] = "auto",
        cuda_graphs: bool | None = None,
    ) -> None:
        """Raises EngineError when `config` or `dtype` are not the base's own, and for what the device can't."""
        _judge_base(base, config, dtype)
        self.config, self.max_sequence_tokens, self.max_running = config, max_sequence_tokens, max_running
        self.tokenizer, self.adapter_config = tokenizer, adapter_config
        per_request = -(-max_sequence_tokens // page_size)
        num_slots = max_running + (0 if prefix_cache == "off" else cache_slots or -(-max_running // 4))
        self.store = AdapterStore(
            config, max_rank=max_lora_rank, dtype=base.dtype, device=base.device, num_slots=adapter_slots
        )
        self._model = choose_model(base, kernels)
        self._options = Serving(
            layout=Layout.for_model(
                config, page_size=page_size, dtype=base.dtype,
                draft_width=0 if speculative is None else speculative.config.context_width,
            ), device=base.device, num_slots=num_slots,
            num_pages=num_pages or max_running * per_request, max_running=max_running, pages_per_request=per_request,
            cache_pool=cache_pool, prefix_cache=prefix_cache, min_tokens=cache_min_tokens,
            track_interval=track_interval, prefill_chunk_tokens=prefill_chunk_tokens, share_prompts=share_prompts,
            reserve_tokens=reserve_tokens, overlap=base.device.type == "cuda" if overlap is None else overlap,
            cuda_graphs=records_steps(self._model, cuda_graphs),
        )  # fmt: skip
        self.speculator = None
        if speculative is not None:
            self.speculator = Speculator(speculative, self._model, self._options.layout, max_running)
        self._build()
        self._requests: dict[str, tuple[Request, asyncio.Future[Completion]]] = {}
        self._ids = itertools.count()
        self._driver: asyncio.Task[None] | None = None
        self._asleep = self._closed = False

    def _build(self) -> None:
        """Memory, books and runner, empty."""
        parts = self._options.build(self._model, self.store, self.speculator)
        self.pool, self.memory, self.prefixes = parts.pool, parts.memory, parts.prefixes
        self.scheduler, self.runner = parts.scheduler, parts.runner

    @property
    def adapter_version(self) -> int:
        """The version that new requests use; -1, the bare base, before the first adapter."""
        return self.store.current_version

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
        """Continue `token_ids`; ends on exactly the stop tokens and strings of `params`, or its token limit.

        Cancelling the call aborts the request. Raises EngineError on bad tokens or parameters, on a request that can
        never fit, a version that is not live, an id that is in use, and while the engine sleeps or is closed.
        """
        loop = asyncio.get_running_loop()
        self._refuse_foreign(loop)
        request = self._make_request(token_ids, params, request_id, adapter_version)
        request.on_tokens = on_tokens
        self.scheduler.submit(request)
        future: asyncio.Future[Completion] = loop.create_future()
        self._requests[request.id] = request, future
        self._ensure_driver(loop)
        try:
            return await future
        finally:
            if request.stage is not Stage.DONE:  # cancelled; the id may have a new owner otherwise
                self.abort(request.id)

    def _make_request(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str | None, version: int | None
    ) -> Request:
        self._refuse_unready("generate")
        judge_params(params, self.tokenizer is not None)
        prompt = judge_tokens(token_ids, self.config.vocab_size, "the prompt")
        self._judge_size(len(prompt), params.max_new_tokens)
        if request_id is None:
            request_id = f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise EngineError(f"request id {request_id!r} is in use; choose another or leave it out")
        stop_text = StopText(self.tokenizer, params.stop) if params.stop and self.tokenizer else None
        try:
            version = self.store.acquire(version)
        except AdapterError as e:
            raise EngineError(str(e)) from e
        return Request(id=request_id, prompt=prompt, params=params, version=version, stop_text=stop_text)

    def _judge_size(self, prompt: int, new: int) -> None:
        if prompt + new > self.max_sequence_tokens:
            raise EngineError(
                f"the prompt has {prompt} tokens and max_new_tokens is {new}: {prompt + new} together, but sequences "
                f"are limited to {self.max_sequence_tokens}; raise task.max_prompt_tokens or lower "
                "rollout.sampling.max_new_tokens"
            )
        needed = self.pool.pages_for(prompt + new - 1)
        if not self.pool.could_fit(slots=1, pages=needed):
            raise EngineError(
                f"the request needs {needed} cache pages and a state, more than the pool of {self.pool.num_bytes} "
                f"bytes has; set rollout.num_pages: {needed} or more, or 0"
            )

    def abort(self, request_id: str) -> None:
        """End a request and free its memory at once; its `generate` returns what it has. Unknown ids are ignored."""
        if request_id in self._requests:
            self._abort(self._requests[request_id][0])

    def _abort(self, request: Request) -> None:
        if request.stage is Stage.DONE:
            return  # called by an `on_tokens`: the step in which it ended goes on, and answers it
        self.scheduler.finish(request, FinishReason.ABORT)
        self._settle(request)

    def _settle(self, request: Request, failure: BaseException | None = None) -> None:
        """Release what an ended request holds and answer its caller."""
        assert request.stage is Stage.DONE
        _, future = self._requests.pop(request.id)
        self.store.release(request.version)
        self.runner.counters[f"finished_{request.finish_reason}"] += 1
        if self.speculator is not None and self.speculator.keeper is not None:
            self.speculator.keeper.finish(request)
        if future.done() or future.get_loop().is_closed():
            return
        if failure is not None:
            error = EngineError(f"the engine's step failed: {failure!r}")
            error.__cause__ = failure
            future.set_exception(error)
        else:
            future.set_result(request.completion(self.tokenizer))

    # --- driver -------------------------------------------------------------------------------------------------
    def _refuse_foreign(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._driver is not None and not self._driver.done() and self._driver.get_loop() is not loop:
            if self._driver.get_loop().is_running():
                raise EngineError("another event loop is using this engine; one loop at a time may")
            self._drop_all(None)  # that loop was closed with requests in flight: nobody waits for them

    def _ensure_driver(self, loop: asyncio.AbstractEventLoop) -> None:
        alive = self._driver is not None and not self._driver.done() and self._driver.get_loop() is loop
        if not alive:
            self._driver = loop.create_task(self._drive())
            self._driver.add_done_callback(self._driver_ended)

    async def _drive(self) -> None:
        """Step while there is work; callers get their turn after every step."""
        try:
            while self.scheduler.has_work:
                for request in self.runner.step():
                    self._settle(request)
                await asyncio.sleep(0)
        except BaseException as failure:
            self._drop_all(failure)  # here: a request that came before the task's callbacks would start a new driver
            if not isinstance(failure, Exception):
                raise

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        if driver is not self._driver:
            return
        if driver.cancelled() and self._requests:  # before its first turn
            self._drop_all(asyncio.CancelledError("the driver was cancelled"))
        elif self.scheduler.has_work:  # a request came while the driver was on its way out
            self._driver = None
            self._ensure_driver(driver.get_loop())

    def _drop_all(self, failure: BaseException | None) -> None:
        """End every request. After a failure no book is believed any more: memory and prefix cache begin anew."""
        for request, _ in list(self._requests.values()):
            if failure is None:
                self._abort(request)
            else:
                request.stage, request.finish_reason = Stage.DONE, FinishReason.ERROR
                self._settle(request, failure)
        if failure is not None:
            counters, seconds = self.runner.counters, self.runner.seconds
            self.pool.abandon()  # the failure's traceback goes on holding it; there may be no room for two
            self._build()
            self.runner.counters, self.runner.seconds = counters, seconds

    # --- scoring ------------------------------------------------------------------------------------------------
    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probabilities of tokens 1.. of each sequence under the newest adapter: fp32 [len - 1] each, on the host.

        Uses no cache, so it works while the engine sleeps. Raises EngineError on bad tokens or temperature <= 0.
        """
        if not 0 < temperature < float("inf"):
            raise EngineError(f"score got temperature {temperature}; expected a finite number above 0")
        judged = [judge_tokens(s, self.config.vocab_size, f"sequence {i}") for i, s in enumerate(sequences)]
        scores = [torch.zeros(0) for _ in judged]
        batch: list[int] = []
        for i in [i for i, s in enumerate(judged) if len(s) > 1]:
            if sum(len(judged[j]) for j in (*batch, i)) > self.scheduler.prefill_chunk_tokens and batch:
                self._score_into(scores, judged, batch, temperature)
                batch = []
            batch.append(i)
        if batch:
            self._score_into(scores, judged, batch, temperature)
        return scores

    def _score_into(
        self, scores: list[torch.Tensor], judged: Sequence[tuple[int, ...]], batch: list[int], temperature: float
    ) -> None:
        sequences = [judged[i] for i in batch]
        rows = score_together(self._model, self.store, sequences, self.adapter_version, temperature)
        for i, row in zip(batch, rows, strict=True):
            scores[i] = row.clone()  # an ordinary tensor: one made in inference mode can't enter autograd

    # --- adapters and memory ------------------------------------------------------------------------------------
    def load_adapter(self, update: AdapterUpdate) -> None:
        """All or nothing: verify, fill the idle slot, flip. Requests in flight finish on, and carry, their version.

        Never waits: while the idle slot still serves requests it raises AdapterError, and may be called again once
        they have ended. Raises EngineError while the engine sleeps or is closed.
        """
        self._refuse_unready("load_adapter")
        expected = self.adapter_config
        if expected is not None and update.config != expected and update.config.rank <= self.store.max_rank:
            raise AdapterError(f"adapter v{update.version} is {update.config}, this run's adapters are {expected}")
        self.store.load(update)
        self._forget_dead()

    def load_draft(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Draft with these weights for the requests of adapter `version` and of those after it.

        Answers don't depend on it. Raises EngineError without speculation, AdapterError when a newer draft is there.
        """
        if self.speculator is None:
            raise EngineError("load_draft on an engine that doesn't speculate; set rollout.speculative.mode")
        self.speculator.drafts.load(version, weights)
        self._forget_dead()

    def listen(self, num_tokens: int) -> None:
        """Keep the hidden states of requests that begin from now on, of at most so many tokens, until `heard`.

        Raises EngineError without speculation.
        """
        if self.speculator is None:
            raise EngineError("listen on an engine that doesn't speculate; set rollout.speculative.mode")
        self.speculator.keeper = StateKeeper(num_tokens)

    def heard(self) -> list[Example]:
        """The end of `listen`: whole answers that a draft can learn from, on the host."""
        if self.speculator is None or self.speculator.keeper is None:
            return []
        keeper, self.speculator.keeper = self.speculator.keeper, None
        return [on_host(example) for example in keeper.examples]

    def _forget_dead(self, *, all_of_them: bool = False) -> None:
        """Nobody can ask for the prefixes, nor the draft, of a version that has gone."""
        running = {request.version for request, _ in self._requests.values()}
        if self.speculator is not None:
            self.speculator.drafts.forget_all_but(running | {self.adapter_version})
        if self.prefixes is not None:
            self.prefixes.forget_all_but(set() if all_of_them else running | {self.adapter_version})

    def sleep(self) -> None:
        """Give the caches' memory back. Raises EngineError while requests run or wait."""
        if self._requests:
            raise EngineError(f"{len(self._requests)} requests run or wait; await or abort them before sleep")
        self._give_back()
        self._asleep = True

    def _give_back(self) -> None:
        """The memory of caches, graphs and verifies."""
        self._forget_dead(all_of_them=True)
        if self.runner.graphs is not None:
            self.runner.graphs.forget()
        self.pool.sleep()
        if self.speculator is not None:
            self.speculator.sleep()

    def wake(self) -> None:
        """Take the caches' memory again. Raises EngineError when the engine is closed."""
        if self._closed:
            raise EngineError("the engine is closed; make a new one")
        self.pool.wake()
        if self.speculator is not None:
            self.speculator.wake()
        self._asleep = False

    def _refuse_unready(self, verb: str) -> None:
        if self._closed:
            raise EngineError(f"{verb} on a closed engine; make a new one")
        if self._asleep:
            raise EngineError(f"{verb} while the engine sleeps; call wake() first")

    def close(self) -> None:
        """Abort everything and give the memory back; a closed engine stays closed."""
        self._drop_all(None)
        self._closed = True
        self._give_back()

    def stats(self) -> Mapping[str, float]:
        """Gauges of now, and counters and seconds since the start."""
        return {
            "running": self.scheduler.num_running,
            "waiting": len(self.scheduler.waiting),
            "retracted": self.scheduler.num_retracted,
            "free_pages": self.pool.num_free(Kind.PAGE),
            "free_slots": self.pool.num_free(Kind.SLOT),
            "cache_bytes": 0 if self._asleep or self._closed else self.pool.num_bytes,
            "adapter_version": self.adapter_version,
            **self.runner.seconds,
            **self.runner.counters,
            **({} if self.prefixes is None else self.prefixes.stats()),
            **({} if self.speculator is None else self.speculator.stats()),
        }


def _judge_base(base: ResidentBase, config: K3Config, dtype: torch.dtype | None) -> None:
    if config != base.config:
        raise EngineError("the engine was given another config than its base was loaded with; pass the base's")
    if dtype is not None and dtype != base.dtype:
        raise EngineError(f"the engine was asked for {dtype}, the base it shares is {base.dtype}; load it as {dtype}")
