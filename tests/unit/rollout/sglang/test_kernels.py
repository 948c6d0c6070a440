"""Kernels that SGLang would compile at its first request."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from miles_k3.errors import EngineError
from miles_k3.rollout.sglang.kernels import compile_ahead, expert_kernels


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What was asked of stand-ins for SGLang's modules."""
    found: list[tuple[object, ...]] = []
    for name, make, _ in expert_kernels(expert_parallel=False):
        module = ModuleType(name)
        setattr(module, make, lambda *arguments, make=make: found.append((make, *arguments)))
        monkeypatch.setitem(sys.modules, name, module)
    return found


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_each_is_made_once_for_how_experts_lie(asked: list[tuple[object, ...]], expert_parallel: bool) -> None:
    assert compile_ahead(expert_parallel=expert_parallel) >= 0
    assert [(make, *arguments) for _, make, arguments in expert_kernels(expert_parallel=expert_parallel)] == asked
    assert asked[0][2:] == (expert_parallel, True)  # SGLang gives MXFP4 experts a bias on every GPU


def test_a_machine_without_a_compiler_is_told_so(
    asked: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("ninja exited with status 127\n/bin/sh: nvcc: not found")

    name, make, _ = expert_kernels(expert_parallel=False)[0]
    monkeypatch.setattr(sys.modules[name], make, fails)
    with pytest.raises(EngineError, match=r"moe_wna16_marlin was not compiled \(ninja exited.*set CUDA_HOME"):
        compile_ahead(expert_parallel=False)
    assert not asked
