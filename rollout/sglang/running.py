"""A running SGLang: its Engine on an event loop of its own, on a thread of its own.

SGLang binds what it waits with to the first loop that it sees, and callers here come with a new one at each step. Its
processes report a failure by SIGQUIT, upon which it would end the whole process; a handler of ours only notes it.
"""

from __future__ import annotations

import asyncio
import atexit
import signal
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from miles_k3.adapters.layout import adapter_layout
from miles_k3.errors import AdapterError, EngineError
from miles_k3.k3.config import K3Config
from miles_k3.rollout.sglang.adapters import peft_config
from miles_k3.rollout.sglang.backend import OnProgress, SglangGoneError
from miles_k3.rollout.sglang.bucket import LOAD_FORMAT, payloads
from miles_k3.rollout.sglang.hooks import hook_names
from miles_k3.rollout.sglang.hooks.report import KEY
from miles_k3.rollout.sglang.kernels import compile_ahead
from miles_k3.rollout.sglang.versions import installed_version, version_problem
from miles_k3.rollout.sglang.visible import make_visible
from miles_k3.types import LentAdapter

LOOK_S = 1.0  # between two looks at whether SGLang's processes live
_failed = threading.Event()  # one SGLang at a time in a process: its signal says not whose it is


def note_failure(*_: object, **__: object) -> None:
    """SIGQUIT's handler, also in SGLang's own processes, which get it with the arguments and don't use it."""
    _failed.set()


class RunningSglang:
    """Implements `backend.Backend`. The first of a process is made on its main thread, for the signal's sake."""

    def __init__(self, arguments: Mapping[str, Any], config: K3Config) -> None:
        """Start SGLang with our plugin; returns when it serves.

        Raises EngineError on another SGLang than the verified one, on arguments that it refuses, when its processes
        fail to start, or come up without the plugin's hooks.
        """
        if problem := version_problem(installed_version()):
            raise EngineError(problem)
        if torch.cuda.is_available() and arguments.get("moe_runner_backend") == "marlin":
            compile_ahead(expert_parallel=int(arguments.get("ep_size", 1)) > 1)
        self._config = config
        self._folder = make_visible()
        _failed.clear()
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.managers import tokenizer_manager

        tokenizer_manager.kill_process_tree = note_failure  # a fault of its would end this process, too
        try:
            self._engine = Engine(**arguments, custom_sigquit_handler=note_failure)
        except (AssertionError, ValueError, RuntimeError, EOFError) as e:
            raise EngineError(f"SGLang did not start: {_first_line(e)}; its own log says more") from e
        if threading.current_thread() is threading.main_thread():  # a later one is started on another, and finds ours
            signal.signal(signal.SIGQUIT, note_failure)
        self._manager, self._loop = self._engine.tokenizer_manager, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="sglang", daemon=True)
        self._thread.start()
        self._pids = [int(pid) for pid in self._engine.get_all_child_pids()]
        self._refuse_unhooked()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _refuse_unhooked(self) -> None:
        expected = list(hook_names())
        for rank, state in enumerate(self._states()):
            if state.get(KEY) != expected:
                self.close()
                raise EngineError(
                    f"SGLang's scheduler {rank} has hooks {state.get(KEY)}, expected {expected}: its plugin loader "
                    "gave up on some, see its log; without them K3's numbers are wrong"
                )

    # --- between threads ----------------------------------------------------------------------------------------
    def _gone(self) -> str | None:
        """Why nothing more is to be had of it."""
        if _failed.is_set():
            return "one of SGLang's processes failed; its log says why"
        ended = [pid for pid in self._pids if not _lives(pid)]
        return f"SGLang's processes {ended} have ended" if ended else None

    async def _across(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The outcome of `work` on SGLang's loop, awaited on the caller's; its end when SGLang's processes end."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        answer = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
                if gone := self._gone():
                    raise SglangGoneError(gone)
            return answer.result()
        finally:
            answer.cancel()

    def _ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The same, waited for. Not from SGLang's own thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(timeout=LOOK_S)
            except TimeoutError:
                if future.done():  # it is the work's own
                    raise
                if gone := self._gone():
                    future.cancel()
                    raise SglangGoneError(gone) from None

    # --- requests -----------------------------------------------------------------------------------------------
    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        request_id: str,
        adapter: str | None,
        routed_experts: bool,
        on_progress: OnProgress | None,
    ) -> Mapping[str, Any]:
        request = self._request(
            tokens, sampling, rid=request_id, lora_path=adapter, return_routed_experts=routed_experts,
            stream=on_progress is not None,
        )  # fmt: skip
        return await self._across(self._run(request, on_progress))

    async def _run(self, request: Any, on_progress: OnProgress | None) -> Mapping[str, Any]:
        answer: Mapping[str, Any] | None = None
        try:
            async for answer in self._manager.generate_request(request, None):
                if on_progress is not None and answer is not None:
                    on_progress(answer["output_ids"], answer["meta_info"]["output_token_logprobs"])
        except ValueError as e:
            raise EngineError(f"SGLang refused a request: {_first_line(e)}") from e
        if answer is None:
            raise EngineError("SGLang ended a request without an answer")
        return answer

    def _request(self, tokens: Sequence[int], sampling: Mapping[str, Any], **options: Any) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        return GenerateReqInput(input_ids=list(tokens), sampling_params=dict(sampling), return_logprob=True, **options)

    def score(self, sequences: Sequence[Sequence[int]], adapter: str | None) -> list[Mapping[str, Any]]:
        once = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}

        async def all_of_them() -> list[Mapping[str, Any]]:
            requests = [self._request(s, once, logprob_start_len=0, lora_path=adapter) for s in sequences]
            return [a["meta_info"] for a in await asyncio.gather(*(self._run(r, None) for r in requests))]

        return self._ask(all_of_them())

    def abort(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self._manager.abort_request, request_id)

    # --- adapters and memory ------------------------------------------------------------------------------------
    def load(self, name: str, lent: LentAdapter) -> None:
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput

        layout, server = adapter_layout(self._config, lent.config), self._engine.server_args
        request = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=name, config_dict=peft_config(lent.config), load_format=LOAD_FORMAT,
            serialized_named_tensors=payloads(lent, layout, tp=server.tp_size, ep=server.ep_size),
        )  # fmt: skip
        answer = self._ask(self._manager.load_lora_adapter_from_tensors(request, None))
        if not answer.success:
            raise AdapterError(f"SGLang refused adapter v{lent.version} as {name}: {answer.error_message}")

    def unload(self, name: str) -> None:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        answer = self._ask(self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name), None))
        if not answer.success:
            raise EngineError(f"SGLang did not give {name} up: {answer.error_message}")

    def pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._ask(self._manager.pause_generation(PauseGenerationReqInput(mode=mode)))

    def unpause(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._ask(self._manager.continue_generation(ContinueGenerationReqInput()))

    def release(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        self._ask(self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(tags)), None))

    def resume(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self._ask(self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(tags)), None))

    def _states(self) -> list[Mapping[str, Any]]:
        return self._ask(self._manager.get_internal_state())

    def state(self) -> Mapping[str, Any]:
        return self._states()[0]

    def close(self) -> None:
        """End SGLang's processes. Not by its own `shutdown`, which ends every child of this process."""
        if self._loop.is_closed():
            return
        atexit.unregister(self._engine.shutdown)
        if self._manager._subprocess_watchdog is not None:
            self._manager._subprocess_watchdog.stop()
        _end(self._pids)
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(timeout=10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)
        if not self._thread.is_alive():
            self._loop.close()
        if self._folder is not None:
            self._folder.cleanup()


async def _cancel_others() -> None:
    """End every other task of the running loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=5.0)


def _lives(pid: int) -> bool:
    import psutil  # one of SGLang's own requirements

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(pids: Sequence[int]) -> None:
    """End processes and what they started, and wait until the memory of their GPUs is free."""
    import psutil

    ending = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            ending += [*process.children(recursive=True), process]
    for process in ending:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ending, timeout=60.0)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
