"""Device memory given back while the engine samples, and taken again.

A tensor keeps its identity: its storage is emptied and refilled, so parameters, views of buffers and the optimizer's
references stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_k3.k3.weights import ResidentBase
from miles_k3.trainer.mcore import DistributedDataParallel, MegatronOptimizer


class Sleeper:
    """Device memory, emptied when this is made. `kept` goes to the host and comes back; `blank` comes back as zeros.

    Tensors that share their memory count once, and what is in both is kept. `num_bytes`: what was given back.
    """

    def __init__(self, kept: Iterable[Tensor], blank: Iterable[Tensor] = ()) -> None:
        keep = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in kept if t.numel()}
        drop = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in blank if t.numel()}
        self._blank = [(s, s.nbytes()) for at, s in drop.items() if at not in keep]
        self._kept = [(s, _to_host(s)) for s in keep.values()]
        self.num_bytes = sum(n for _, n in self._blank) + sum(host.numel() for _, host in self._kept)
        self._settle()
        for storage, _ in (*self._kept, *self._blank):
            storage.resize_(0)
        if self._on_cuda:
            torch.cuda.empty_cache()  # another process may want it

    def wake(self) -> None:
        """Take the memory again and refill it. Once."""
        for storage, host in self._kept:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        for storage, size in self._blank:
            storage.resize_(size)
            _bytes(storage).zero_()
        self._settle()

    @property
    def _on_cuda(self) -> bool:
        return any(s.device.type == "cuda" for s, _ in (*self._kept, *self._blank))

    def _settle(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return host.copy_(_bytes(storage), non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


def optimizer_tensors(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> list[Tensor]:
    """Masters and moments, without masters that are the model's own parameters (in fp32 they are)."""
    parameters = {p.untyped_storage().data_ptr() for chunk in chunks for p in chunk.module.parameters()}
    chained: Any = optimizer
    found: list[Tensor] = []
    for part in (p.optimizer for p in chained.chained_optimizers if p.optimizer is not None):
        found += [p for group in part.param_groups for p in group["params"]]
        found += [t for state in part.state.values() for t in state.values() if isinstance(t, Tensor) and t.ndim]
    return [t for t in found if t.untyped_storage().data_ptr() not in parameters]


def gradient_buffers(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """Megatron's flat fp32 gradients; every mini-batch begins by clearing them."""
    return [b.grad_data for chunk in chunks for b in (*vars(chunk)["buffers"], *chunk.expert_parallel_buffers)]


def base_tensors(base: ResidentBase) -> list[Tensor]:
    """Everything that a base holds."""
    banks = (t for bank in base.experts.values() for t in bank.tensors)
    return [*base.tensors.values(), *base.gate_up.values(), *banks]
