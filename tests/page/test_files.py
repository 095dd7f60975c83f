"""The page: its files, what it may load, who may see it, and what /tokenize and /stats tell it."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.fakes.scripted_app import ScriptedApp
from trencadis.server.routes.page_routes import read_page_files

FOLDER = Path(__file__).resolve().parents[2] / "server" / "page"
SCRIPTS = sorted(name for name in read_page_files() if name.endswith(".js"))
IMAGE = {"type": "image_url", "image_url": {"url": "https://a/1.png"}}
SIZE = {"width": 84, "height": 56, "grid": [1, 4, 6], "tokens": 6, "original_width": 90, "original_height": 60}


def test_the_page_and_every_file_that_it_names_are_sent(harness: ScriptedApp) -> None:
    page = harness.call("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="(page/[^"]+)"', page.text))
    named |= {
        f"page/{name}" for s in SCRIPTS for name in re.findall(r'from "\./([\w.]+)"', read_page_files()[s].decode())
    }
    assert named == {f"page/{name}" for name in read_page_files()} - {"page/index.html"}
    for path in named:
        found = harness.call(f"/{path}")
        assert found.status_code == 200 and found.content == read_page_files()[path[5:]]
        assert found.headers["x-content-type-options"] == "nosniff"
        again = harness.call(f"/{path}", headers={"if-none-match": found.headers["etag"]})
        assert again.status_code == 304 and not again.content
    assert sum(map(len, read_page_files().values())) < 120_000


def test_the_policy_allows_this_server_alone_and_no_inline_code(harness: ScriptedApp) -> None:
    policy = harness.call("/").headers["content-security-policy"]
    given = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert given["default-src"] == "'none'" and given["frame-ancestors"] == "'none'"
    assert given["script-src"] == given["style-src"] == given["connect-src"] == "'self'"
    assert given["img-src"] == "'self' data: blob:" and "unsafe" not in policy


def test_no_text_can_become_markup_and_nothing_is_loaded_from_elsewhere() -> None:
    html = read_page_files()["index.html"].decode()
    assert not re.search(r"\son\w+=|style=|<script>|<style", html)
    for name, data in read_page_files().items():
        text = data.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://", text), name
    for name in SCRIPTS:
        code = read_page_files()[name].decode()
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|localStorage", code
        )
        assert found is None, (name, found)
        assert len(code.splitlines()) <= 400


def test_the_page_needs_no_key_and_what_it_asks_for_does(harness: ScriptedApp) -> None:
    harness.app(api_key=["k"])
    assert harness.call("/").status_code == harness.call("/page/app.js").status_code == 200
    for path in ("/v1/models", "/stats", "/buckets", "/page/../stats", "/page/", "/page/index.html/", "/page//app.js"):
        assert harness.call(path).status_code == 401, path
    assert harness.call("/stats", headers={"authorization": "Bearer k"}).status_code == 200


def test_links_begin_with_the_prefix_that_a_proxy_strips(harness: ScriptedApp) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        harness.app(root_path='/a/"b')
    assert '<base href="/a/&quot;b/">' in harness.call("/").text
    app = harness.app(root_path="/models/one")
    # What uvicorn makes of --root-path, and of a path that a proxy has stripped.
    client = TestClient(app, root_path="/models/one")
    assert client.get("/models/one/v1/models").status_code == 200
    assert client.get("/models/one/openapi.json").json()["paths"].keys() >= {"/v1/models", "/v1/chat/completions"}


def test_the_page_can_be_left_out(harness: ScriptedApp) -> None:
    harness.app(disable_page=True, api_key=["k"])
    assert harness.call("/").status_code == harness.call("/page/app.js").status_code == 401
    assert harness.call("/", headers={"x-api-key": "k"}).status_code == 404


def test_tokenize_tells_how_the_model_sees_images(harness: ScriptedApp) -> None:
    body = {"messages": [{"role": "user", "content": [IMAGE, IMAGE]}]}
    reported = harness.call("/tokenize", {**body, "return_image_sizes": True})
    assert reported.json()["images"] == [SIZE, SIZE] and "x-ignored-fields" not in reported.headers
    assert "images" not in harness.call("/tokenize", body).json()
    raw = harness.call("/tokenize", {"prompt": "Hi", "return_image_sizes": True})
    assert raw.headers["x-ignored-fields"] == "return_image_sizes" and "images" not in raw.json()


@pytest.mark.parametrize("up", [True, False])
def test_stats_hold_what_the_engine_reports(harness: ScriptedApp, up: bool) -> None:
    harness.engine.stats.kv_used, harness.engine.stats.kv_total, harness.engine.stats.mm_hits = 3, 10, 7
    harness.engine.restarts = 2
    if not up:
        harness.engine.info = None
    reported = harness.call("/stats").json()
    assert reported["device"] == ("cpu" if up else None)
    assert reported["kv_blocks"]["used"] == 3 and reported["kv_blocks"]["total"] == 10
    assert reported["image_arena"]["hits"] == 7 and reported["restarts"] == 2 and reported["takes_images"] is True
