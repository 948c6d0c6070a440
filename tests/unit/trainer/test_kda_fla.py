"""fla's kernels without a GPU: how they are refused, and how their autotuning is limited and given back."""

from __future__ import annotations

import importlib

import pytest
import torch

from miles_k3.errors import LaunchError
from miles_k3.k3.kernels import fla_tuning
from miles_k3.k3.kernels.fla_tuning import HOPPER, import_fla, limit_autotuning
from miles_k3.trainer.model.kda_fla import fla_delta_rule


def test_a_model_on_the_cpu_is_refused() -> None:
    q, beta = torch.zeros(3, 2, 8), torch.zeros(3, 2)
    with pytest.raises(LaunchError, match=r"run on CUDA, but the model is on cpu; set trainer\.kda_kernel: torch"):
        fla_delta_rule(q, q, q, q, beta, torch.tensor([0, 3]))


def test_a_missing_fla_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    import_fla.cache_clear()
    with pytest.raises(LaunchError, match=r"fla\.ops\.cp failed \(No module named 'fla\.ops\.cp'\); install it with"):
        import_fla("ops.cp")


@pytest.mark.slow
def test_each_kernel_is_left_one_configuration_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the kernels whose lists are the same without a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    full = {kernel.name: kernel.tuner.configs for kernel in HOPPER}
    limit_autotuning.cache_clear()
    undo = limit_autotuning()
    limited = [kernel for kernel in HOPPER if kernel.tuner.configs is not full[kernel.name]]
    assert len(limited) >= 8
    for kernel in limited:
        assert [fla_tuning._launch(c) for c in kernel.tuner.configs] == [fla_tuning._key(c) for c in kernel.configs]
        for i, dtype in enumerate((torch.bfloat16, torch.float32) if len(kernel.configs) > 1 else ()):
            kernel.tuner.nargs = {}
            inputs = torch.zeros(1, dtype=dtype)
            for named in ({"q": None, "k": inputs}, {"q": inputs, "g": torch.zeros(1)}):
                left = kernel.tuner.prune_configs(named)
                assert [fla_tuning._launch(c) for c in left] == [fla_tuning._key(kernel.configs[i])]
    assert any(len(kernel.configs) > 1 for kernel in limited)
    undo()
    assert {kernel.name: kernel.tuner.configs for kernel in HOPPER} == full
