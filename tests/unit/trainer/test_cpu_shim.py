"""The CPU shim: it changes what megatron asks for, and only there."""

from __future__ import annotations

import pytest
import torch
from helpers.trainers import tiny_trainer

from miles_k3.errors import LaunchError
from miles_k3.trainer import cpu_shim
from miles_k3.trainer.mcore import get_cuda_rng_tracker

pytestmark = pytest.mark.skipif(not cpu_shim.needed(), reason="the shim is not used where CUDA exists")


def test_cuda_tensors_are_cpu_tensors_inside_the_context_only() -> None:
    with cpu_shim.on_cpu():
        made = torch.zeros(3, device="cuda")
        assert made.device.type == "cpu"
        assert not torch.empty(3, pin_memory=True).is_pinned()
        assert made.cuda() is made
        assert made.type() == "torch.cuda.FloatTensor"
        assert made.to(torch.int64).dtype == torch.int64
        with pytest.raises(TypeError):
            torch.zeros("three", device="cuda")  # type: ignore[call-overload]
    assert made.type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(3, device="cuda")


def test_the_random_tracker_forks_the_cpu_generator() -> None:
    tiny_trainer(seed=5)
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with tracker.fork():
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(inside, expected)


def test_a_cpu_model_on_a_cuda_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_shim, "needed", lambda: False)
    with pytest.raises(LaunchError, match="hide the devices"):
        tiny_trainer()
