"""A client that hangs up ends what a real server was doing for it: the download, and the decoding."""

import contextlib
import io
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.hostile.attacks import CHAT, GOOD, data
from tests.hostile.web import Web
from tests.traffic.server_process import ROOT, is_decode_worker, server

pytestmark = pytest.mark.long
SOON = 0.5
"""Seconds: the pool's grace of 0.1, its slices of 0.05, and what a machine needs to notice."""


@pytest.fixture(scope="module")
def web():
    made = Web(GOOD)
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(vl_checkpoint, tmp_path_factory):
    flags = [
        str(vl_checkpoint), "--app", "tests.hostile.app:build", "--dtype", "float32",
        "--kv-cache-memory-bytes", "32MiB",
        "--image-fetch-timeout", "60", "--served-model-name", "m",
    ]  # fmt: skip
    path = str(ROOT)
    with server(tmp_path_factory.mktemp("server"), *flags, PYTHONPATH=path) as running:
        yield running


def chat(part):
    return {"model": "m", "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}


def hang_up_after(running, part, began):
    """Sends a request and closes its connection once ``began`` says so; seconds at which it did."""

    def send():
        with httpx.Client(base_url=running.url, trust_env=False, timeout=120) as http:
            clients.append(http)
            with contextlib.suppress(httpx.HTTPError):
                http.post(CHAT, json=chat(part))

    clients = []
    thread = threading.Thread(target=send)
    thread.start()
    assert until(began, 60)
    # close() alone leaves a connection in use open.
    for connection in clients[0]._transport._pool.connections:
        connection._connection._network_stream.get_extra_info("socket").shutdown(2)
    gone = time.monotonic()
    thread.join(10)
    return gone


def until(true, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.005)
    return False


def workers(running):
    children = Path(f"/proc/{running.process.pid}/task").glob("*/children")
    pids = [int(p) for c in children for p in c.read_text().split()]
    return {p for p in pids if is_decode_worker(p)}


def test_during_a_download(running, web):
    gone = hang_up_after(running, {"type": "image_url", "image_url": {"url": web.url("slow-body")}}, lambda: web.open)
    assert until(lambda: not web.open, 10)
    took = time.monotonic() - gone
    print(f"the connection to the image's host closed {took * 1e3:.0f} ms after the client's")
    assert took < SOON


def test_during_decoding(running):
    noise = np.random.default_rng(0).integers(0, 4, (11000, 11000), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise * 80).save(out, "PNG", compress_level=1)
    assert running.http.post(CHAT, json=chat(data(GOOD))).status_code == 200
    (worker,) = workers(running)
    size = Path(f"/proc/{worker}/statm")

    def large():
        return int(size.read_text().split()[1]) * 4096 > 150 << 20

    gone = hang_up_after(running, data(out.getvalue()), large)
    assert until(lambda: worker not in workers(running), 10)
    took = time.monotonic() - gone
    print(f"the worker and its memory were gone {took * 1e3:.0f} ms after the client")
    assert took < SOON
    assert running.http.post(CHAT, json=chat(data(GOOD))).status_code == 200
