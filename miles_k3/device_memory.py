"""What torch's allocator holds on a GPU, for the lines of a run's metrics."""

from __future__ import annotations

import torch

from miles_k3.metrics import DeviceMemory


class CudaMemory:
    """A `metrics.DeviceMemory`. Counts tensors of this process; its peak is nobody else's to reset during a run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def held(self) -> int:
        return torch.cuda.memory_allocated(self._device)


def device_memory(device: torch.device) -> DeviceMemory | None:
    """None for a CPU, whose memory `metrics.peak_memory_bytes` looks at."""
    return CudaMemory(device) if device.type == "cuda" else None
