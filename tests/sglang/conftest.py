"""The real SGLang on a CPU: its control plane, with the stubs in `stubs/`. `make test-sglang` sets all of it up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.sglang_cpu import CPU_ARGUMENTS, errors_into, small_config, write_small_k3

from miles_k3.k3.config import K3Config

if TYPE_CHECKING:
    from miles_k3.rollout.sglang.running import RunningSglang

STUBS = Path(__file__).parent / "stubs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session", autouse=True)
def _stubs_are_in() -> None:
    loaded = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    assert loaded is not None, "no sitecustomize: run these with make test-sglang"
    assert Path(loaded).parent == STUBS, f"sitecustomize is {loaded}; run these with make test-sglang"


@pytest.fixture(scope="session")
def config() -> K3Config:
    return small_config()


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What SGLang's processes say."""
    return tmp_path_factory.mktemp("log") / "sglang.txt"


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory, config: K3Config, log: Path) -> Iterator[RunningSglang]:
    """SGLang on a K3 of four layers, started once: that takes minutes on two busy cores."""
    from miles_k3.rollout.sglang.running import RunningSglang

    folder = write_small_k3(tmp_path_factory.mktemp("k3"))
    with errors_into(log):
        sglang = RunningSglang({"model_path": str(folder), "log_level": "warning", **CPU_ARGUMENTS}, config)
    yield sglang
    sglang.close()
