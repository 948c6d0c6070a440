"""What stock megatron-core needs to run on a machine without CUDA (gloo, CPU tensors). Unused where CUDA exists.

megatron-core asks for `device="cuda"`, pinned memory, CUDA streams and CUDA random states in many places. Two means:
`install()` replaces functions of `torch.cuda` that could only fail here, and megatron's two random-state functions;
`on_cpu()` is a context, entered around calls into megatron, in which tensors asked for on "cuda" are made on the CPU.
Nothing that other libraries see, such as `torch.empty` or `Tensor.type`, changes outside that context.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_installed = False


def needed() -> bool:
    """Whether this machine has no CUDA device."""
    return not torch.cuda.is_available()


def on_cpu() -> contextlib.AbstractContextManager[Any]:
    """The context for calls into megatron; does nothing where CUDA exists."""
    return _CpuForCuda() if needed() else contextlib.nullcontext()


def install() -> None:
    """Replace what could only fail without CUDA. Once a process, before megatron-core is imported."""
    global _installed
    if _installed or not needed():
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = cuda.empty_cache = _nothing
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _NoStream()
    cuda.stream = contextlib.nullcontext
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    for module in (cuda, cuda.random):
        module.get_rng_state = _get_rng_state
        module.set_rng_state = _set_rng_state
    _installed = True


def patch_megatron_rng() -> None:
    """Point megatron's random-state tracker at the CPU generator: it would wait for CUDA for ever."""
    if needed():
        from megatron.core.tensor_parallel import random

        random._get_cuda_rng_state = _get_rng_state
        random._set_cuda_rng_state = _set_rng_state


def _get_rng_state(*_: Any, **__: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


def _nothing(*_: Any, **__: Any) -> None:
    return None


class _NoStream:
    """A CUDA stream or event on a machine where everything is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = record_event = record = wait = synchronize = _nothing


class _CpuForCuda(TorchFunctionMode):
    """Tensors asked for on CUDA are made on the CPU, unpinned, and name their type as megatron expects it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.record_stream:
            return None
        if func is Tensor.type and len(args) == 1 and not kwargs:  # gradient clipping compares this name
            return func(*args).replace("torch.", "torch.cuda.", 1)
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)
