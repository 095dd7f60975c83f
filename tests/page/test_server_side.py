"""What the page shows when the server refuses, starts, dies or hides behind a proxy; how it looks."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.page.browser_tab import DEMO, FLAGS, Tab
from tests.page.prefix_proxy import prefix_proxy
from tests.traffic.server_process import RunningServer, server

pytestmark = pytest.mark.long


def test_errors_of_the_api_are_shown_in_its_words(tab: Tab) -> None:
    noise = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (1200, 900, 3), np.uint8)).save(noise, "PNG")
    tab.page.set_input_files("#file", {"name": "big.png", "mimeType": "image/png", "buffer": noise.getvalue()})
    tab.page.locator(".attached figcaption", has_text="exceeds 2097152 bytes").wait_for()
    assert "The request body exceeds 2097152 bytes." in tab.say("Hi")
    assert tab.page.locator(".message.failed").count() == 1
    tab.page.locator(".message.user").get_by_role("button", name="Edit").click()
    tab.page.get_by_label("Remove big.png").click()
    assert tab.say("What can you do?") and tab.page.locator(".message.failed").count() == 0


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(browser: Any, tmp_path: Path) -> None:
    with server(tmp_path, *FLAGS, "--api-key", "right") as guarded:
        tab = Tab(browser, guarded.url + "/")
        page = tab.open()
        page.locator("#key-dialog[open]").wait_for()
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.locator("#key-title", has_text="not accepted").wait_for()
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        page.locator("#served", has_text="trencadis-demo").wait_for()
        assert tab.say("What can you do?")
        kept = page.evaluate("[Object.entries(sessionStorage), Object.keys(localStorage), document.cookie]")
        assert kept == [[["trencadis-key", "right"]], [], ""]
        page.click(".options summary")
        page.click("#as-curl")
        assert "right" not in (page.locator("#snippet").text_content() or "")
        tab.close()


def test_a_killed_engine_is_shown_and_the_page_goes_on(browser: Any, tmp_path: Path) -> None:
    with server(tmp_path, *FLAGS) as fragile:
        tab = Tab(browser, fragile.url + "/")
        page = tab.open()
        assert tab.say("What can you do?")
        for pid in fragile.engine_pids():
            os.kill(pid, signal.SIGKILL)
        reported = tab.say("And now?")
        fragile.wait(seconds=60)
        if page.locator(".message.failed").count():
            assert reported and page.locator(".message.failed .fault").text_content() == reported
            page.locator(".message.failed").get_by_role("button", name="Try again").click()
        page.locator(".message.assistant:not(.failed) .foot").nth(1).wait_for()
        fragile.process.send_signal(signal.SIGTERM)
        fragile.process.wait(30)
        page.locator("#served", has_text="The server cannot be reached.").wait_for()
        assert "The server cannot be reached." in tab.say("Still there?")
        tab.close()


def test_a_warm_up_is_shown_and_buckets_are_named(browser: Any, tmp_path: Path) -> None:
    with server(tmp_path, "--device", "hpu", "--max-model-len", "1024", seconds=240, VLLM_SKIP_WARMUP="true") as card:
        tab = Tab(browser, card.url + "/")
        page = tab.open(up=False)
        page.locator("#served", has_text="hpu").wait_for()
        page.set_input_files("#file", str(DEMO))
        page.locator(".attached figcaption", has_text="bucket vision[").wait_for()
        assert "red circle" in tab.say("What is in the picture?")
        page.click("#tab-shapes")
        page.locator("#buckets td", has_text="decode").first.wait_for()
        widths = page.evaluate("[...document.querySelectorAll('#ledger span')].map((e) => Number(e.style.flexGrow))")
        assert abs(sum(widths) - 1) < 0.01 and len(widths) > 5
        tab.close()


def test_progress_of_a_start_is_shown(browser: Any, running: RunningServer) -> None:
    tab = Tab(browser, running.url + "/")
    state = {"status": "unavailable", "phase": "warm-up", "accepting": False, "ready": False, "device": "hpu"}
    progress = {"phase": "compile", "done": 3, "total": 10, "percent": 30.0, "eta_seconds": 12.3}
    body = json.dumps({**state, "progress": progress})
    tab.page.route("**/health", lambda r: r.fulfill(status=503, content_type="application/json", body=body))
    page = tab.open(up=False)
    page.locator("#banner-text", has_text="Starting: compile (3 of 10), about 13 s left").wait_for()
    assert page.locator("#dot.busy").count() == 1
    page.unroute("**/health")
    page.locator("#dot.good").wait_for()
    assert page.locator("#banner").is_hidden()
    tab.close()


def test_the_page_works_below_a_prefix(browser: Any, tmp_path: Path) -> None:
    with (
        server(tmp_path, *FLAGS, "--root-path", "/models/one") as inner,
        prefix_proxy(inner.url, "/models/one") as outer,
    ):
        tab = Tab(browser, f"{outer}/models/one/")
        tab.open()
        assert tab.say("What can you do?")
        tab.close()


def test_views_are_chosen_by_keyboard_and_gauges_are_read(tab: Tab) -> None:
    page = tab.page
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.locator("#shapes").is_visible() and page.locator("#chat").is_hidden()
    page.locator("#gauges dt", has_text="KV blocks in use").wait_for()
    speed = page.locator("#gauges div", has=page.locator("dt", has_text="Tokens a second, drafts accepted"))
    speed.locator("dd", has_text=re.compile(r"^0\.0, none$")).wait_for()  # nobody asks anything between two readings
    page.keyboard.press("ArrowLeft")
    assert page.locator("#chat").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1200])
def test_every_view_fits_and_is_accessible(tab: Tab, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="needs axe-playwright-python").AXE_FILE_PATH
    page = tab.page
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 700})
    page.set_input_files("#file", str(DEMO))
    page.locator(".attached figcaption", has_text="tokens").wait_for()
    tab.say("What is in the picture?")
    views: list[tuple[str, Callable[[], None]]] = [
        ("conversation", lambda: None),
        ("options", lambda: page.click(".options summary")),
        ("snippet", lambda: page.click("#as-curl")),
        ("shapes", lambda: (page.keyboard.press("Escape"), page.click("#tab-shapes"))[1]),
    ]
    for name, go in views:
        go()
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        page.evaluate(Path(axe).read_text())
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations)")
        assert not found, (name, [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found])
