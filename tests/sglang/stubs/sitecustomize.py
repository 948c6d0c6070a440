"""Lets SGLang's control plane start without a GPU. Put this folder first on PYTHONPATH: child processes need it too.

What a CPU can't do becomes what it can: no CUDA streams, no pinned memory, MXFP4 unpacked in plain torch. Nothing else
of SGLang is touched, and nothing here is meant to compute a forward pass: K3's KDA kernels exist for GPUs only.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

import draft_stubs
import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAKERS = ("tensor", "zeros", "empty", "ones", "full", "arange", "zeros_like", "empty_like")


class _Stream:
    """Stands for a CUDA stream: everything happens at once, so there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, *_: Any) -> None: ...


def _without_pinning(make: Any) -> Any:
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        if options.get("device") == "cuda":  # as some code writes it, whatever the server's device
            options["device"] = "cpu"
        return make(*arguments, **options)

    return made


def unpack_mxfp4(codes: torch.Tensor, scales: torch.Tensor, *, target_dtype: torch.dtype, axis: int) -> torch.Tensor:
    """uint8 codes [..., n / 2], low nibble first, and E8M0 scales [..., n / 32] as values [..., n]."""
    if axis not in (-1, codes.dim() - 1):
        raise NotImplementedError(f"MXFP4 groups along axis {axis} of {codes.dim()}; only along the last one")
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)])
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    scale = torch.exp2(scales.view(torch.uint8).float() - 127).repeat_interleave(32, dim=-1)
    return (values[nibbles.long()] * scale).to(target_dtype)


def _plain_mxfp4(module: ModuleType) -> None:
    module.upcast_from_mxfp = unpack_mxfp4  # type: ignore[attr-defined]


def _plain_experts(module: ModuleType) -> None:
    """LoRA wraps experts that run on Triton too, but SGLang gives it MXFP4 ones on GPUs only."""

    def get_triton_quant_info(self: Any, layer: Any) -> Any:
        from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

        return TritonMoeQuantInfo(w13_weight=layer.w13_weight, w2_weight=layer.w2_weight)

    module.Mxfp4MoEMethod.get_triton_quant_info = get_triton_quant_info


class _NoNccl:
    """Several ranks of a CPU talk through gloo."""

    disabled = True

    def __init__(self, *_: Any, **__: Any) -> None: ...


def _without_nccl(module: ModuleType) -> None:
    module.PyNcclCommunicator = _NoNccl  # type: ignore[attr-defined]


def _tells_bytes(module: ModuleType) -> None:
    """A scheduler tells what it has allocated, so that plans can be compared with it."""
    ask = module.Scheduler.get_internal_state

    def with_bytes(self: Any, request: Any) -> Any:
        answer = ask(self, request)
        answer.internal_state["bytes"] = _held(self.tp_worker.model_runner)
        if self.draft_worker is not None:
            answer.internal_state["draft"] = draft_stubs.told(self)
        return answer

    module.Scheduler.get_internal_state = with_bytes  # type: ignore[attr-defined]


def _tells_slots(module: ModuleType) -> None:
    """Where SGLANG_CPU_SLOTS names a folder, each rank moves an adapter into its slot at once, as its first use would,
    and writes the slot's factors of routed experts there."""
    load = module.LoRAManager.load_lora_adapter_from_tensors

    def with_slot(self: Any, reference: Any, *arguments: Any) -> Any:
        answer, folder = load(self, reference, *arguments), os.environ.get("SGLANG_CPU_SLOTS")
        if folder is not None and answer.success:
            self.fetch_new_loras({None, reference.lora_id})
            pool = self.memory_pool
            slot = pool.uid_to_buffer_id[reference.lora_id]
            held = {
                f"{kind}.{target}": {layer: tensor[slot] for layer, tensor in enumerate(tensors)}
                for kind, buffer in (("A", pool.A_buffer), ("B", pool.B_buffer))
                for target, tensors in buffer.items()
                if target.endswith("_moe")
            }  # fmt: skip
            torch.save(held, f"{folder}/{pool.tp_rank}.pt")
        return answer

    module.LoRAManager.load_lora_adapter_from_tensors = with_slot  # type: ignore[attr-defined]


def _held(runner: Any) -> dict[str, int]:
    pool, cache = runner.lora_manager.memory_pool, runner.req_to_token_pool.mamba_pool.mamba_cache
    outside = [t for name, t in (*runner.model.named_parameters(), *runner.model.named_buffers())
               if ".experts." not in name or "shared" in name]  # fmt: skip
    absorbed = [getattr(module, name, None) for module in runner.model.modules() for name in ("w_kc", "w_vc")]
    weights = [t for t in (*outside, *absorbed) if isinstance(t, torch.Tensor)]
    return {
        "weights": _bytes(weights), "states": _bytes([*cache.conv, cache.temporal]),
        "adapter slots": _bytes([t for b in (pool.A_buffer, pool.B_buffer) for ts in b.values() for t in ts]),
        "kv": _bytes(runner.token_to_kv_pool.full_kv_pool.kv_buffer),
    }  # fmt: skip


def _bytes(tensors: Any) -> int:
    """Of the memory behind them, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


_PATCHES = {
    "triton_kernels.numerics_details.mxfp": _plain_mxfp4,
    "sglang.srt.layers.quantization.mxfp4": _plain_experts,
    "sglang.srt.managers.scheduler": _tells_bytes,
    "sglang.srt.lora.lora_manager": _tells_slots,
    "sglang.srt.distributed.device_communicators.pynccl": _without_nccl,
    **draft_stubs.PATCHES,
}


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes a module the moment that it has been imported."""

    def __init__(self) -> None:
        self._found: dict[str, importlib.abc.Loader] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _PATCHES or name in self._found:
            return None
        self._found[name] = self  # so that the search below passes us by
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is to be changed, but isn't there")
        self._found[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._found[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._found[module.__name__].exec_module(module)
        _PATCHES[module.__name__](module)


torch.cuda.Stream = _Stream  # type: ignore[misc, assignment]
torch.cuda.current_stream = lambda *_: _Stream()  # type: ignore[assignment]
torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
for _name in _MAKERS:
    setattr(torch, _name, _without_pinning(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment]
sys.meta_path.insert(0, _AfterImport())
