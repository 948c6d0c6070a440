"""What happens at the edges: keys, sizes, full queues, clients that leave, an end that waits for who is still there."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from helpers.engines import assert_idle
from helpers.servers import MODEL, PATIENCE_S, Running, ScriptedEngine, running_server, tiny_engine

from miles_k3.rollout.server.names import Served

LONG = {"model": MODEL, "prompt": "x", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def pause() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread brings about."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.005)


def refusal(answer: httpx.Response, status: int, code: str | None = None) -> str:
    """The message of a refusal in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if code is not None:
        assert error["code"] == code
    return error["message"]


def test_keys() -> None:
    with running_server(ScriptedEngine("hi"), api_keys=("right", "other")) as running:
        for key in ("right", "other"):
            with openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) as client:
                assert client.completions.create(model=MODEL, prompt="x").choices[0].text == "hi"
        for key in ("wrong", "righ", "right2", "x"):
            answer = httpx.get(f"{running.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            refusal(answer, 401, "invalid_api_key")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        with (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        open_paths = ("/", "/health", "/health/live", "/health/ready", "/openapi.json")
        for path in open_paths:
            assert httpx.get(running.url + path).status_code == 200
        routes = httpx.get(f"{running.url}/openapi.json").json()["paths"]
        assert {"/generate", "/v1/adapters/upload", "/metrics", "/v1/adapters/{version}/pin"} < set(routes)
        for path, verbs in {**routes, "/nowhere": ["get"]}.items():
            for verb in verbs if path not in open_paths else ():
                url = running.url + path.replace("{version}", "0").replace("{model}", MODEL)
                refusal(httpx.request(verb, url), 401, "invalid_api_key")
                refusal(httpx.request(verb, url, headers={"Authorization": "Basic right"}), 401, "invalid_api_key")


def test_bodies() -> None:
    with (
        running_server(ScriptedEngine("hi"), max_body_bytes=2000, max_upload_bytes=3000) as running,
        httpx.Client(base_url=running.url) as client,
    ):
        path, kind = "/v1/completions", {"content-type": "application/json"}
        big = json.dumps({"model": MODEL, "prompt": "x" * 3000}).encode()
        assert "2000 bytes" in refusal(client.post(path, content=big, headers=kind), 413, "body_too_large")
        pieces = (big[i : i + 500] for i in range(0, len(big), 500))
        refusal(client.post(path, content=pieces, headers=kind), 413)  # chunked: no length announced
        tar = {"content-type": "application/x-tar"}
        refusal(client.post("/v1/adapters/upload", content=b"x" * 3001, headers=tar), 413)
        refusal(client.post("/v1/adapters/upload", content=b"x" * 2500, headers=tar), 400, "bad_adapter")
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as announcing:
            announcing.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2001\r\n\r\n")
            announcing.settimeout(PATIENCE_S)
            assert announcing.recv(100).startswith(b"HTTP/1.1 413"), "before any of it was sent"
        for body in (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 1900, b'{"model": NaN}'):
            refusal(client.post(path, content=body, headers=kind), 400)
        for body in (b"\xff{", b"[" * 1900):
            assert "can't be read as JSON" in refusal(client.post(path, content=body, headers=kind), 400)
        refusal(
            client.post(path, content=b'{"model": "tiny-k3", "prompt": "x"}', headers={"content-type": "text/plain"}),
            400,
        )
        refusal(client.get("/nowhere"), 404)
        assert client.get(path).headers["Allow"] == "POST"
        refusal(client.get(path), 405)
        assert client.post(path, json={"model": MODEL, "prompt": "x"}).status_code == 200


def test_a_full_queue(pause: threading.Event) -> None:
    engine = ScriptedEngine("hi", max_running=2, pause=pause)
    with (
        running_server(engine, max_queue=3) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        body = {"model": MODEL, "prompt": "x"}
        waiting = [pool.submit(client.post, "/v1/completions", json={**body, "n": n}) for n in (1, 4)]
        until(lambda: len(engine.running) == 5)
        full = client.post("/v1/completions", json=body)
        assert "5 answers run or wait and 5 may" in refusal(full, 429, "queue_full")
        assert 1 <= int(full.headers["Retry-After"]) <= 60
        refusal(client.post("/v1/completions", json={**body, "n": 6}), 400, "too_many_answers")
        assert client.get("/health").status_code == 200
        with (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as official,
            pytest.raises(openai.RateLimitError),
        ):
            official.completions.create(model=MODEL, prompt="x")
        pause.set()
        assert [w.result().status_code for w in waiting] == [200, 200]
        until(lambda: running.server.gate.in_flight == 0)
        assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_slot_at_once(stream: bool) -> None:
    engine = tiny_engine(max_sequence_tokens=8000, max_running=4, prefix_cache="off")
    with running_server(engine) as running:
        body = json.dumps({**LONG, "max_tokens": 7000, "stream": stream, "n": 3}).encode()
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            until(lambda: running.engine_stats()["running"] == 3)
        until(lambda: running.engine_stats()["running"] == 0)
        assert running.engine_stats()["finished_abort"] == 3
        assert running.engine_stats()["generated_tokens"] < 3 * 7000
        until(lambda: running.server.gate.in_flight == 0 and not running.server.flights)
        assert running.server.backend.num_streams == 0
        running.do(running.server.backend.call, assert_idle, engine)


def test_who_leaves_before_the_engine_has_begun(pause: threading.Event) -> None:
    engine = ScriptedEngine("hi", pause=pause)
    with running_server(engine) as running:
        with httpx.Client(base_url=running.url) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, timeout=0.2)
        until(lambda: not engine.running and running.server.gate.in_flight == 0)


def drained(running: Running) -> None:
    running.loop.call_soon_threadsafe(running.process.drain, "SIGTERM")
    until(lambda: running.server.gate.draining)


def test_a_drain_finishes_what_runs_and_refuses_the_rest(pause: threading.Event) -> None:
    with running_server(ScriptedEngine("done", pause=pause)) as running, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(
            httpx.post, f"{running.url}/v1/completions", json={"model": MODEL, "prompt": "x"}, timeout=PATIENCE_S
        )
        stream = pool.submit(
            httpx.post, f"{running.url}/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True},
            timeout=PATIENCE_S,
        )  # fmt: skip
        until(lambda: running.server.gate.in_flight == 2)
        drained(running)
        late = httpx.post(f"{running.url}/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert "shutting down" in refusal(late, 503, "draining")
        assert "Retry-After" in late.headers
        assert httpx.get(f"{running.url}/health/ready").status_code == 503
        assert httpx.get(f"{running.url}/health/live").status_code == 200
        pause.set()
        assert whole.result().json()["choices"][0]["text"] == "done"
        assert stream.result().text.endswith("data: [DONE]\n\n")
        assert running.ended.wait(PATIENCE_S)


@pytest.mark.parametrize("again", [False, True])
def test_a_drain_ends_what_does_not_finish(pause: threading.Event, again: bool) -> None:
    """At its limit, or at a second signal: an error in OpenAI's shape for chat, what there is for /generate."""
    engine = ScriptedEngine("never", pause=pause)
    with running_server(engine, drain_s=60.0 if again else 0.2) as running, ThreadPoolExecutor(3) as pool:

        def ask(path: str, **body: Any) -> Any:
            return pool.submit(httpx.post, running.url + path, json=body, timeout=PATIENCE_S)

        whole = ask("/v1/completions", model=MODEL, prompt="x")
        stream = ask("/v1/completions", model=MODEL, prompt="x", stream=True)
        tokens = ask("/generate", input_ids=[1])
        until(lambda: len(engine.running) == 3)
        drained(running)
        if again:
            running.loop.call_soon_threadsafe(running.process.drain, "SIGTERM")
        refusal(whole.result(), 503, "aborted")
        last = stream.result().text.strip().removeprefix("data: ")
        assert json.loads(last)["error"]["code"] == "aborted"
        assert tokens.result().json() == {
            "output_ids": [], "logprobs": [], "finish_reason": "abort", "adapter_version": -1
        }  # fmt: skip
        assert running.ended.wait(PATIENCE_S)


def test_a_long_step_does_not_keep_health_waiting() -> None:
    engine = ScriptedEngine("hi")
    with running_server(engine) as running, ThreadPoolExecutor(1) as pool:
        entered, leave = threading.Event(), threading.Event()

        def step() -> None:
            entered.set()
            leave.wait(PATIENCE_S)

        stuck = pool.submit(running.do, running.server.backend.call, step)
        assert entered.wait(PATIENCE_S)
        try:
            until(lambda: running.server.backend.turn_age_s > 0.1)
            began = time.monotonic()
            answer = httpx.get(f"{running.url}/health", timeout=5)
            assert time.monotonic() - began < 2
            assert answer.status_code == 200
            assert answer.json()["engine_step_s"] > 0.05
        finally:
            leave.set()
        stuck.result(PATIENCE_S)


def test_an_engine_that_fails_is_an_error_of_the_server_and_the_server_goes_on() -> None:
    engine = tiny_engine()
    step = engine.runner.step

    def failing() -> Any:
        engine.runner.step = step  # type: ignore[method-assign]
        raise RuntimeError("no such luck")

    engine.runner.step = failing  # type: ignore[method-assign]
    with running_server(engine) as running:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3}
        message = refusal(httpx.post(f"{running.url}/v1/completions", json=body), 500, "engine_failed")
        assert "no such luck" in message
        assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200


def test_what_nobody_foresaw_tells_no_details(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("secret")

    with running_server(ScriptedEngine("hi")) as running, httpx.Client(base_url=running.url) as client:
        monkeypatch.setattr(running.server.adapters.names, "served", fail)
        for _ in range(20):  # the connection stays
            message = refusal(client.get("/v1/adapters"), 500)
            assert message == "the server failed on this request; its log says why"
            assert client.get("/health").status_code == 200


def test_a_version_that_the_engine_has_replaced_meanwhile_is_not_found() -> None:
    with running_server(ScriptedEngine("hi")) as running:
        gone = Served(version=5, name=None, rank=4, alpha=8.0, sha256="", weights_sha256="", source="")
        running.do(running.server.adapters.names.add, gone)
        answer = httpx.post(f"{running.url}/generate", json={"input_ids": [1], "adapter_version": 5})
        assert "version 5 was unloaded" in refusal(answer, 404, "adapter_not_found")
        until(lambda: running.server.gate.in_flight == 0)


def test_metrics_count() -> None:
    with running_server(tiny_engine()) as running, httpx.Client(base_url=running.url) as client:
        client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 5, "ignore_eos": True})
        client.post("/v1/completions", json={"model": "other", "prompt": "x"})
        client.get("/nowhere")
        until(lambda: running.server.gate.in_flight == 0)
        running.server._stats_at = float("-inf")
        page = client.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = set(page.text.splitlines())
    for line in (
        'miles_k3_http_requests_total{route="/v1/completions",status="200"} 1.0',
        'miles_k3_http_requests_total{route="/v1/completions",status="404"} 1.0',
        'miles_k3_http_requests_total{route="other",status="404"} 1.0',
        "miles_k3_engine_generated_tokens_total 5.0",
        "miles_k3_engine_running 0.0",
        "miles_k3_time_to_first_token_seconds_count 1.0",
        "miles_k3_inter_token_seconds_count 4.0",
        "miles_k3_adapter_version -1.0",
        "miles_k3_answers_in_flight 0.0",
        "miles_k3_draining 0.0",
    ):
        assert line in lines, line
