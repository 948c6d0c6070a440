"""schemathesis reads the OpenAPI page and tries what it allows, and what it doesn't."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from helpers.servers import MODEL, Running, running_server, save_tiny_adapter, tiny_engine
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

pytestmark = pytest.mark.slow

SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example)
EXAMPLES = 40  # of each operation and mode
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


@schemathesis.serializer("application/x-tar")
def as_archive(ctx: Any, value: Any) -> bytes:
    """No archive at all, whatever it is: uploads are refused here, and only how is judged."""
    return value if isinstance(value, bytes) else repr(value).encode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("adapters")
    save_tiny_adapter(root / "a0", 0)
    with running_server(tiny_engine(max_sequence_tokens=128), adapter_root=root) as running:
        yield running
        stats = running.engine_stats()
        assert stats["running"] == stats["waiting"] == running.server.gate.in_flight == 0


@pytest.fixture(scope="module")
def api(served: Running) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


def _make_servable(body: dict[str, Any]) -> None:
    """Models, versions and tokens that the page allows exist here too, or little would ever be generated."""
    if "model" in body:
        body["model"] = MODEL
        body.pop("adapter_version", None)
    if body.get("adapter_version") is not None:
        body["adapter_version"] = -1
    if "input_ids" in body:
        body["input_ids"] = [token % 512 for token in body["input_ids"]][:32]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        body["prompt"] = [token % 512 for token in prompt][:32]
    for limit in [k for k in ("max_tokens", "max_completion_tokens") if body.get(k)]:
        body[limit] = 1 + body[limit] % 31
    sampling = body.get("sampling_params", {})
    if "max_new_tokens" in sampling:
        sampling["max_new_tokens"] = 1 + sampling["max_new_tokens"] % 31


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_the_page_and_the_server_agree(served: Running, api: Any, mode: GenerationMode) -> None:
    """`mode` positive: what the page allows; negative: what it doesn't."""
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) > 12
    tried = 0
    for operation in operations:
        try:
            cases = operation.as_strategy(generation_mode=mode)

            @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=SLOW)
            @given(case=cases)
            def agree(case: schemathesis.Case) -> None:
                if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                    _make_servable(case.body)
                case.call_and_validate(checks=CHECKS, timeout=60)

            agree()
            tried += 1
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, operation.label  # nothing can be wrong with it
    assert tried > 5
    if mode is GenerationMode.POSITIVE:
        page = httpx.get(f"{served.url}/metrics").text
        for route in ("/v1/completions", "/v1/chat/completions", "/generate"):
            assert f'miles_k3_http_requests_total{{route="{route}",status="200"}}' in page, page


def test_the_page_is_written_to_the_end(api: Any) -> None:
    """Every route that the server has is on it, but for the HTML page."""
    paths = set(api.raw_schema["paths"])
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/generate", "/metrics", "/health"} <= paths
    assert {"/v1/adapters", "/v1/adapters/upload", "/v1/adapters/{version}", "/v1/adapters/{version}/pin"} <= paths
    assert Path("/") not in map(Path, paths)
