"""Tokens in and out, and adapters that come and go."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.ordinary_rights import ordinary_rights
from helpers.servers import MODEL, Running, running_server, save_tiny_adapter, tiny_engine

from miles_k3.types import SamplingParams

IDS = [1, 4, 50, 60, 70, 2, 5]
DRAWN = {"max_new_tokens": 12, "seed": 9, "temperature": 3.0, "stop_token_ids": []}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed in range(4):
        save_tiny_adapter(root / f"a{seed}", seed)
    save_tiny_adapter(root / "wide", 1, rank=16)
    return root


@pytest.fixture
def served(root: Path) -> Iterator[Running]:
    with running_server(tiny_engine(), adapter_root=root) as running:
        yield running


@pytest.fixture
def client(served: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def generate(client: httpx.Client, **changes: Any) -> dict[str, Any]:
    answer = client.post("/generate", json={"input_ids": IDS, "sampling_params": DRAWN, **changes})
    assert answer.status_code == 200, answer.text
    return answer.json()


def load(client: httpx.Client, path: str, **options: Any) -> dict[str, Any]:
    answer = client.post("/v1/adapters", json={"path": path, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def tar_of(folder: Path, *names: str) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            if not names or path.name in names:
                tar.add(path, arcname=path.name)
    return archive.getvalue()


def upload(client: httpx.Client, body: bytes, **query: Any) -> httpx.Response:
    return client.post("/v1/adapters/upload", content=body, params=query, headers={"content-type": "application/x-tar"})


def test_generate_says_what_the_engine_says(client: httpx.Client) -> None:
    params = SamplingParams(max_new_tokens=12, seed=9, temperature=3.0)
    own = asyncio.run(tiny_engine().generate(IDS, params))
    answer = generate(client)
    assert answer["output_ids"] == list(own.token_ids)
    assert answer["logprobs"] == pytest.approx(own.logprobs, abs=1e-4)
    assert (answer["finish_reason"], answer["adapter_version"]) == ("length", -1)


def test_generate_at_temperature_0_is_greedy_whatever_the_seed(client: httpx.Client) -> None:
    odd = [250, 3, 97, 181, 44, 201]  # no prompt that the model knows, so that draws differ
    answers: dict[float, set[tuple[int, ...]]] = {0.0: set(), 1.0: set()}
    for temperature, found in answers.items():
        for seed in range(4):
            drawn = {"max_new_tokens": 12, "seed": seed, "temperature": temperature, "stop_token_ids": []}
            found.add(tuple(generate(client, input_ids=odd, sampling_params=drawn)["output_ids"]))
    own = asyncio.run(tiny_engine().generate(odd, SamplingParams(max_new_tokens=12, temperature=0.0)))
    assert answers[0.0] == {tuple(own.token_ids)}
    assert len(answers[1.0]) > 1


def test_generate_streams_the_same_tokens(client: httpx.Client) -> None:
    whole = generate(client)
    body = {"input_ids": IDS, "sampling_params": DRAWN, "stream": True}
    with client.stream("POST", "/generate", json=body) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert [t for e in events for t in e["output_ids"]] == whole["output_ids"]
    assert [e["finish_reason"] for e in events][-1] == "length"
    assert {e["finish_reason"] for e in events[:-1]} <= {None}


def test_generate_stops_at_the_tokens_it_is_given(client: httpx.Client) -> None:
    free = generate(client)["output_ids"]
    at = next(i for i in range(3, len(free)) if free[i] not in free[:i])
    cut = generate(client, sampling_params={**DRAWN, "stop_token_ids": [511, free[at]]})
    assert cut["output_ids"] == free[: at + 1]
    assert cut["finish_reason"] == "stop"


def test_every_endpoint_uses_the_newest_adapter_and_pins_others(client: httpx.Client) -> None:
    base = generate(client)
    assert load(client, "a0", name="first")["version"] == 0
    assert load(client, "a1", name="second")["version"] == 1
    names = [m["id"] for m in client.get("/v1/models").json()["data"]]
    assert names == [MODEL, f"{MODEL}@base", f"{MODEL}@0", f"{MODEL}@1", "first", "second"]
    newest, pinned = generate(client), generate(client, adapter_version=0)
    assert (newest["adapter_version"], pinned["adapter_version"]) == (1, 0)
    assert generate(client, model="first") == pinned
    assert generate(client, model=f"{MODEL}@base") == generate(client, adapter_version=-1) == base
    assert len({str(a["logprobs"]) for a in (base, newest, pinned)}) == 3
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    ):
        for model, version in ((MODEL, 1), ("first", 0), (f"{MODEL}@0", 0), (f"{MODEL}@-1", -1)):
            assert client.post(path, json={"model": model, **body}).json()["adapter_version"] == version


def test_old_versions_give_way_but_pinned_ones_stay(client: httpx.Client) -> None:
    """Three slots: the pinned first one outlives the others."""
    load(client, "a0", name="policy", pin=True)
    load(client, "a1")
    load(client, "a2")
    assert load(client, "a3", name="policy")["replaced"] == [1]
    shown = client.get("/v1/adapters").json()
    assert shown["newest"] == 3
    assert [(a["version"], a["name"], a["pinned"]) for a in shown["data"]] == [
        (0, None, True),
        (2, None, False),
        (3, "policy", False),
    ]
    assert generate(client, adapter_version=0)["adapter_version"] == 0
    assert client.post("/generate", json={"input_ids": IDS, "adapter_version": 1}).status_code == 404
    assert client.put("/v1/adapters/2/pin").json()["pinned"]
    full = client.post("/v1/adapters", json={"path": "a0"})
    assert full.status_code == 409
    assert "Retry-After" in full.headers
    assert "no slot is idle" in full.json()["error"]["message"]
    client.delete("/v1/adapters/0/pin")
    assert load(client, "a0")["replaced"] == [0]


def test_an_unloaded_version_is_gone_for_new_requests(client: httpx.Client) -> None:
    load(client, "a0", pin=True)
    load(client, "a1")
    assert client.delete("/v1/adapters/1").json()["version"] == 1
    assert generate(client)["adapter_version"] == 0
    assert client.delete("/v1/adapters/0").status_code == 200
    assert generate(client)["adapter_version"] == -1
    for answer in (client.delete("/v1/adapters/0"), client.get("/v1/adapters/0"), client.put("/v1/adapters/0/pin")):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "adapter_not_found"
    assert load(client, "a2")["version"] == 2
    assert load(client, "a3")["replaced"] == load(client, "a0")["replaced"] == [], (
        "both slots are free, the pinned one too"
    )


def test_an_upload_is_the_same_adapter(
    client: httpx.Client, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = load(client, "a0")
    answer = upload(client, tar_of(root / "a0"), name="sent", version=1)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["version"], answer.json()["name"]) == (1, "sent")
    assert answer.json()["weights_sha256"] == first["weights_sha256"] != load(client, "a1")["weights_sha256"]
    assert answer.json()["sha256"] != first["sha256"], "that of the update counts its version"
    old, new = generate(client, adapter_version=first["version"]), generate(client, model="sent")
    assert old["output_ids"] == new["output_ids"]
    assert upload(client, b"nonsense").status_code == 400
    assert list(tmp_path.iterdir()) == [], "what was uploaded is not kept"


def test_bad_adapters_are_refused_and_nothing_changes(client: httpx.Client, root: Path, tmp_path: Path) -> None:
    load(client, "a0")
    half = root / "half"
    half.mkdir()
    (half / "adapter_config.json").write_bytes((root / "a0" / "adapter_config.json").read_bytes())
    torn = (root / "a0" / "adapter_model.safetensors").read_bytes()
    (half / "adapter_model.safetensors").write_bytes(torn[: len(torn) // 2])
    (root / "way_out").symlink_to(tmp_path)
    cases: list[tuple[httpx.Response, int, str]] = [
        (client.post("/v1/adapters", json={"path": "half"}), 400, "not a whole safetensors file"),
        (client.post("/v1/adapters", json={"path": "wide"}), 400, "has rank 16, this server's slots hold 8"),
        (client.post("/v1/adapters", json={"path": "."}), 400, "adapter_config.json does not exist"),
        (client.post("/v1/adapters", json={"path": "nowhere"}), 404, "no such folder"),
        (client.post("/v1/adapters", json={"path": "../"}), 403, "not below"),
        (client.post("/v1/adapters", json={"path": "/etc"}), 403, "not below"),
        (client.post("/v1/adapters", json={"path": "way_out"}), 403, "not below"),
        (client.post("/v1/adapters", json={"path": "a1", "version": 5}), 409, "was expected to be v1"),
        (client.post("/v1/adapters", json={"path": "a1", "name": "a/b"}), 400, "adapter name 'a/b'"),
        (client.post("/v1/adapters", json={"path": "a1", "name": MODEL}), 400, "not the model's own name"),
        (client.post("/v1/adapters", json={}), 400, "path is missing"),
        (upload(client, b"nonsense"), 400, "not a whole, uncompressed tar archive"),
        (upload(client, tar_of(root / "a0")[:5000]), 400, "not a whole"),
        (upload(client, tar_of(root / "a0", "adapter_config.json")), 400, "upload/adapter_model.safetensors does not"),
        (upload(client, tar_of(root)), 400, "the archive holds 'a0'"),
        (client.post("/v1/adapters/upload", content=b"x"), 415, "application/x-tar"),
    ]
    for answer, status, message in cases:
        assert answer.status_code == status, answer.text
        assert message in answer.json()["error"]["message"]
        assert str(root) not in answer.text or "--adapter-root" in answer.text
    assert [a["version"] for a in client.get("/v1/adapters").json()["data"]] == [0]
    assert load(client, "a1")["version"] == 1


def test_what_the_server_may_not_read_or_write(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told with its reason, on a connection that goes on; nothing is kept, and the server serves on."""
    temporary, closed = tmp_path / "tmp", root / "closed"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    shutil.copytree(root / "a0", closed)
    weights, body = closed / "adapter_model.safetensors", tar_of(root / "a0")

    def refused(answer: httpx.Response, status: int, *parts: str) -> None:
        assert answer.status_code == status, answer.text
        assert all(part in answer.json()["error"]["message"] for part in parts), answer.text
        assert str(tmp_path) not in answer.text

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        ordinary_rights(),
        running_server(tiny_engine(), adapter_root=root) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        for place, mode in ((closed, 0o755), (weights, 0o644), (root, 0o755)):
            place.chmod(0)
            answer = client.post("/v1/adapters", json={"path": "closed"})
            place.chmod(mode)
            refused(answer, 403, "closed can't be read (Permission denied); change its permissions")
        temporary.chmod(0o555)
        refused(upload(client, body), 500, "in its temporary folder (Permission denied)", "choose another TMPDIR")
        temporary.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr("shutil.copyfileobj", full)
            refused(upload(client, body), 507, "(No space left on device)", "free some space")
        assert list(temporary.iterdir()) == []
        assert client.get("/v1/adapters").json()["data"] == []
        assert upload(client, body).json()["version"] == load(client, "closed")["version"] - 1 == 0


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"{bad", "application/json", "the body is not JSON at character 1: "),
        (b"\xff\xfe{}", "application/json", "the body is not JSON at character 0: "),
        (
            b'{"input_ids": [1]}',
            "text/plain",
            "the body was not read as JSON; send it with content-type: application/json",
        ),
    ],
)
def test_a_body_that_is_not_json(client: httpx.Client, body: bytes, kind: str, message: str) -> None:
    answer = client.post("/generate", content=body, headers={"content-type": kind})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert answer.json()["error"]["param"] is None


def test_a_tampered_upload_is_refused(client: httpx.Client, root: Path, tmp_path: Path) -> None:
    """A link in the archive would make the server read its own files."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        link = tarfile.TarInfo("adapter_config.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    more = root / "more"
    shutil.copytree(root / "a0", more)
    (more / "README.md").touch()
    for body in (archive.getvalue(), tar_of(more)):
        answer = upload(client, body)
        assert answer.status_code == 400
        assert "expected the files adapter_config.json and adapter_model.safetensors" in answer.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": []}, "input_ids is []"),
        ({"input_ids": [-1]}, "input_ids.0 is -1"),
        ({"input_ids": [512]}, "input_ids has token 512; the model's vocabulary is 0..511"),
        ({"input_ids": IDS, "text": "x"}, "text is not a supported parameter; supported are input_ids"),
        ({"input_ids": IDS, "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens is not a supported"),
        ({"input_ids": IDS, "sampling_params": {"temperature": -1}}, "sampling_params.temperature is -1"),
        ({"input_ids": IDS, "model": MODEL, "adapter_version": 0}, "give model or adapter_version, not both"),
        ({"input_ids": [5] * 600}, "sequences are limited to 512 tokens"),
    ],
)
def test_refusals_of_generate(client: httpx.Client, body: dict[str, Any], message: str) -> None:
    answer = client.post("/generate", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
