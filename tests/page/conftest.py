"""Chromium and a server for the tests of the page; without either they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.page.browser_tab import FLAGS, Tab
from tests.traffic.server_process import RunningServer, server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with sync_api.sync_playwright() as p:
        made = p.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with server(tmp_path_factory.mktemp("page"), *FLAGS, "--max-body-bytes", "2MiB") as running:
        yield running


@pytest.fixture
def tab(browser: Any, running: RunningServer) -> Iterator[Tab]:
    made = Tab(browser, running.url + "/", viewport={"width": 1000, "height": 800})
    made.open()
    yield made
    made.close()


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small tokenizer's folder, written once per run."""
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def harness(small_checkpoint: Path) -> ScriptedApp:
    """An application over a scripted engine, for one test."""
    return scripted_app(small_checkpoint)
