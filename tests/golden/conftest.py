"""One golden checkpoint a test process."""

import pytest
from helpers.golden import Golden


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Golden:
    return Golden.make(tmp_path_factory.mktemp("golden") / "checkpoint")
