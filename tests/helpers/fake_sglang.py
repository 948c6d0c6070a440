"""A package `sglang` that starts nothing on a GPU: it notes with what it was started, and answers every request.

`write_package` makes it importable under SGLang's names; `notes` reads what its processes have written.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = "FAKE_SGLANG_NOTES"
KEPT = ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK")
MODULES = {
    "sglang": "", "sglang.srt": "", "sglang.srt.entrypoints": "", "sglang.srt.managers": "",
    "sglang.srt.weight_sync": "", "sglang.srt.entrypoints.engine": "Engine",
    "sglang.srt.managers.tokenizer_manager": "kill_process_tree",
    "sglang.srt.managers.io_struct": "GenerateReqInput, LoadLoRAAdapterFromTensorsReqInput, UnloadLoRAAdapterReqInput",
    "sglang.srt.weight_sync.tensor_bucket": "FlattenedTensorMetadata",
    "sglang.launch_server": "serve_node",
}  # fmt: skip
PACKAGES = {name.rpartition(".")[0] for name in MODULES} | {"sglang.srt.entrypoints", "sglang.srt.managers"}


def write_package(folder: Path) -> Path:
    """Modules that hand out what is here, under the release's name and number; `folder` belongs on the path."""
    for name, exported in MODULES.items():
        place = folder / name.replace(".", "/")
        file = place / "__init__.py" if name in PACKAGES else place.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"from helpers.fake_sglang import {exported}\n" if exported else "")
    with (folder / "sglang" / "launch_server.py").open("a") as file:
        file.write("serve_node()\n")
    info = folder / "sglang-0.5.17.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17\n")
    return folder


def note(kind: str, **told: Any) -> None:
    folder, environment = Path(os.environ[FOLDER]), {name: os.environ.get(name) for name in KEPT}
    whole = {"kind": kind, "pid": os.getpid(), "environment": environment, **told}
    path = folder / f"{time.monotonic_ns()}-{os.getpid()}"
    path.with_suffix(".new").write_text(json.dumps(whole))
    path.with_suffix(".new").rename(path.with_suffix(".json"))


def notes(folder: Path, kind: str) -> list[dict[str, Any]]:
    """In the order in which they were written."""
    read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [told for told in read if told["kind"] == kind]


def _sleep(kind: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    note(kind, child=child.pid)
    return child


def serve_node() -> None:
    """`python -m sglang.launch_server`: until it is ended."""
    note("node", argv=sys.argv[1:])
    time.sleep(600)


class Engine:
    def __init__(self, *, custom_sigquit_handler: Any, **arguments: Any) -> None:
        note("engine", arguments=arguments)
        self.server_args = SimpleNamespace(tp_size=arguments["tp_size"], ep_size=arguments["ep_size"])
        self._scheduler = _sleep("scheduler")
        self.tokenizer_manager = _Manager(self._scheduler)

    def get_all_child_pids(self) -> list[int]:
        return [self._scheduler.pid]

    def shutdown(self) -> None: ...


class _Manager:
    _subprocess_watchdog = None

    def __init__(self, scheduler: subprocess.Popen[bytes]) -> None:
        self._scheduler = scheduler

    async def generate_request(self, request: Any, _: object) -> AsyncIterator[dict[str, Any]]:
        tokens = list(range(request.sampling_params["max_new_tokens"]))
        rows = [(-0.5, token, None) for token in tokens]
        note("request", adapter=request.lora_path)
        if self._scheduler.poll() is not None:
            await asyncio.Event().wait()  # nobody is there to answer
        yield {"output_ids": tokens, "meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": rows}}

    def abort_request(self, _: str) -> None: ...

    async def load_lora_adapter_from_tensors(self, request: Any, _: object) -> SimpleNamespace:
        sent = [pickle.loads(each) for each in request.serialized_named_tensors]
        sums = [int(each["flattened_tensor"].long().sum()) for each in sent]
        longest = max(map(len, request.serialized_named_tensors))
        shapes = [{m.name: list(m.shape) for m in each["metadata"] if ".experts.w2.lora_A" in m.name} for each in sent]
        note("load", name=request.lora_name, sums=sums, longest=longest, shapes=shapes)
        return SimpleNamespace(success=True)

    async def unload_lora_adapter(self, request: Any, _: object) -> SimpleNamespace:
        return SimpleNamespace(success=True)

    async def get_internal_state(self) -> list[dict[str, Any]]:
        from miles_k3.rollout.sglang.hooks import hook_names
        from miles_k3.rollout.sglang.hooks.report import KEY

        return [{KEY: list(hook_names())}]


class GenerateReqInput(SimpleNamespace):
    lora_path: str | None = None


class LoadLoRAAdapterFromTensorsReqInput(SimpleNamespace): ...


class UnloadLoRAAdapterReqInput(SimpleNamespace): ...


@dataclass
class FlattenedTensorMetadata:
    name: str
    shape: Any
    dtype: Any
    start_idx: int
    end_idx: int
    numel: int


def kill_process_tree(*_: Any, **__: Any) -> None: ...
