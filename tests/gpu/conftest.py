"""Everything here needs a CUDA device (make test-gpu)."""

import pytest
import torch
from helpers.golden import Golden


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in (i for i in items if i.get_closest_marker("gpu")):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return Golden.make(tmp_path_factory.mktemp("golden") / "checkpoint")
