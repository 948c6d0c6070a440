"""What every case of a kernel uses: its register, tolerances, random tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CASES: dict[str, Callable[[torch.device, torch.dtype], None]] = {}


def case(check: Callable[[torch.device, torch.dtype], None]) -> Callable[[torch.device, torch.dtype], None]:
    CASES[check.__name__] = check
    return check


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Fresh tensors hold NaN (integers: their largest value)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    scale = max(expected.abs().max().item(), 1e-6) if expected.numel() else 1.0
    limit = factor * TOLERANCE[dtype] * scale
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=limit)


class Draw:
    """Random tensors of one seed on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def packed(self, *shape: int, scales: tuple[int, int] = (120, 125)) -> tuple[Tensor, Tensor]:
        *rows, width = shape
        codes = self.integers(0, 256, *rows, width // 2, dtype=torch.uint8)
        return codes, self.integers(*scales, *rows, width // 32, dtype=torch.uint8)

    def chosen(self, tokens: int, top_k: int, experts: int) -> Tensor:
        order = torch.rand(tokens, experts, generator=self.generator).argsort(1)
        return order[:, :top_k].to(self.device)
