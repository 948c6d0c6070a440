"""The built-in page in a browser: live numbers, versions, a chat with one of them, and a key where one is asked for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.servers import MODEL, ScriptedEngine, running_server, tiny_engine
from helpers.servers import save_tiny_adapter as save_adapter

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def browsing() -> Iterator[tuple[Any, list[str]]]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 640})
        page.set_default_timeout(60_000)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page, complaints
        browser.close()


def test_numbers_versions_and_a_chat(browsing: tuple[Any, list[str]], tmp_path: Path) -> None:
    page, complaints = browsing
    from playwright.sync_api import expect

    save_adapter(tmp_path / "a", 0)
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    with running_server(tiny_engine(), adapter_root=tmp_path) as running:
        page.goto(running.url)
        expect(page.locator("#state")).to_have_text("ready, newest adapter: none, the base", timeout=60_000)
        expect(page.locator("#adapters")).to_contain_text("the base answers")
        served, _ = running.do(
            lambda: running.server.adapters.load(tmp_path / "a", name="first", version=None, pin=True, source="a")
        )
        expect(page.locator("#adapters")).to_contain_text(served.weights_sha256[:12], timeout=60_000)
        expect(page.locator("#state")).to_have_text("ready, newest adapter: v0")
        page.select_option("#version", f"{MODEL}@base")
        page.fill("#temperature", "0")
        page.fill("#question", "State the final answer to the following arithmetic problem: 3 + 4 =")
        page.press("#question", "Enter")
        answer = page.locator(f'.message[data-role="{MODEL}@base"]')
        expect(answer).to_contain_text("the base, stop", timeout=60_000)
        assert re.search(r"\d", answer.locator("span").last.inner_text())
        page.select_option("#version", "first")
        page.fill("#question", "<img src=x onerror=alert(1)>")
        page.click("#send")
        expect(page.locator('.message[data-role="first"]')).to_contain_text(
            re.compile("v0, (stop|length)"), timeout=60_000
        )
        assert page.locator("img").count() == 0
        expect(page.locator("#total")).not_to_have_text("0", timeout=60_000)
        expect(page.locator("#line")).to_have_attribute("points", re.compile(r"\d+,\d+"), timeout=60_000)
        page.screenshot(path=str(tmp_path / "page.png"))
        print(f"screenshot: {tmp_path / 'page.png'}")
    assert all(url.startswith((running.url, "data:")) for url in fetched), fetched
    assert not complaints


def test_a_key_is_asked_for(browsing: tuple[Any, list[str]]) -> None:
    page, _ = browsing
    from playwright.sync_api import expect

    with running_server(ScriptedEngine("Hello there."), api_keys=("secret",)) as running:
        page.goto(running.url)
        expect(page.locator("#state")).to_contain_text("the API key is missing or wrong", timeout=60_000)
        page.fill("#key-text", "secret")
        page.press("#key-text", "Enter")
        expect(page.locator("#state")).to_contain_text("ready", timeout=60_000)
        expect(page.locator("#version")).to_have_value(MODEL)
        page.fill("#question", "Hi")
        page.press("#question", "Enter")
        expect(page.locator("#log")).to_contain_text("Hello there.", timeout=60_000)
