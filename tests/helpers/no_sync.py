"""Fails on what a CUDA graph can't hold, as far as a CPU can see it: numbers read by the host, shapes that depend on
numbers, tensors made of numbers on the host."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_SHAPES = "a shape depends on numbers"
_OPERATORS = {
    "aten::equal": "the host reads whether tensors are equal", "aten::nonzero": _SHAPES,
    "aten::masked_select": _SHAPES, "aten::_unique2": _SHAPES, "aten::repeat_interleave.Tensor": _SHAPES,
    "aten::lift_fresh": "a tensor of numbers on the host",
}  # fmt: skip
_INDEXED = ("aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_MAKERS = ("tensor", "as_tensor", "from_numpy")
_CALLS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class _Operators(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is none here, and importing it to skip it takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert name not in _OPERATORS, f"{name} in a recorded step: {_OPERATORS[name]}"
        if name in _INDEXED:
            masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{name} by a mask in a recorded step: {_SHAPES}"
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """What no operator shows in inference mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in _CALLS, f"{name} in a recorded step: the host reads numbers"
        assert name not in _MAKERS, f"{name} in a recorded step: a tensor of numbers on the host"
        counted = name == "repeat_interleave" and isinstance(args[1], Tensor)
        assert not counted, f"{name} in a recorded step: {_SHAPES}"
        return func(*args, **(kwargs or {}))


class NoSync:
    """A context. Raises AssertionError inside the call that is to blame."""

    def __enter__(self) -> None:
        self._modes = ExitStack()
        self._modes.enter_context(_Operators())
        self._modes.enter_context(_Calls())

    def __exit__(self, *_: object) -> None:
        self._modes.close()


def apart(call: Any) -> Any:
    """The same call, out of sight: what runs on a CPU only."""

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return unseen
