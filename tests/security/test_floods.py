"""Floods against a running server: whatever one request holds, others have their answers at once."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.hostile import floods
from tests.traffic import server_process

BAR = 0.05
"""Seconds that the event loop may be held up on a quiet machine; five times as many are asserted."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server_process.RunningServer]:
    with server_process.server(tmp_path_factory.mktemp("floods"), "--device", "cpu", OMP_NUM_THREADS="1") as server:
        yield server


def send(server: server_process.RunningServer, path: str, body: bytes) -> int:
    """The status of one request. Sent and read without the interpreter's lock, for the prober beside it."""
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=300) as s:
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
        s.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        s.sendall(body)
        line = s.makefile("rb").readline()
    return int(line.split()[1])


def longest_probe(server: server_process.RunningServer, during: threading.Thread) -> float:
    """Seconds of the slowest answer of ``/live`` while ``during`` runs, and a little longer."""
    url = urlsplit(server.url)
    probe = http.client.HTTPConnection(url.hostname or "", url.port, timeout=300)
    longest, end = 0.0, 0.0
    during.start()
    while during.is_alive() or time.monotonic() < end:
        if during.is_alive():
            end = time.monotonic() + 0.2
        start = time.monotonic()
        probe.request("GET", "/live")
        assert probe.getresponse().read() is not None
        longest = max(longest, time.monotonic() - start)
        time.sleep(0.002)
    probe.close()
    return longest


@pytest.mark.long
@pytest.mark.parametrize("flood", [*floods.BEYOND, *floods.WITHIN], ids=lambda f: f.name)
def test_a_flood_holds_up_nobody(served: server_process.RunningServer, flood: floods.Flood) -> None:
    body, found = flood.make(), list[int]()
    thread = threading.Thread(target=lambda: found.append(send(served, flood.path, body)))
    begun = time.monotonic()
    longest = longest_probe(served, thread)
    print(f"{flood.name}: {len(body) / 1e6:.1f} MB, {found}, {time.monotonic() - begun:.1f} s, "
          f"slowest probe {longest * 1e3:.0f} ms")  # fmt: skip
    assert found == [flood.status]
    assert longest <= 5 * BAR
