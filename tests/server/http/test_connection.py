"""Connections of a real server socket: slow and large heads, unread bodies, half-closed ones, and too many of them."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h11
import pytest

from trencadis.server.config.server_config import ServerConfig
from trencadis.server.http import listener, pending_request_heads_by_tenant, uvicorn_server

CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
UVICORN = "uvicorn.error", "uvicorn.access", "uvicorn.asgi"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def post(body: bytes = CHAT, version: bytes = b"1.1", extra: bytes = b"") -> bytes:
    head = b"POST /v1/chat/completions HTTP/%s\r\nhost: x\r\ncontent-type: application/json\r\n" % version
    return head + extra + b"content-length: %d\r\n\r\n" % len(body) + body


class Site:
    """A server of ours over the scripted engine; its loop's complaints are collected."""

    def __init__(self, harness: Any, **fields: Any) -> None:
        self.levels = {name: logging.getLogger(name).level for name in UVICORN}
        server = ServerConfig(host="127.0.0.1", port=0, uvicorn_log_level="error", **fields)
        self.sock = listener.open_listener(server)
        self.port = self.sock.getsockname()[1]
        app = harness.app(receive_timeout=server.receive_timeout, max_body_bytes=server.max_body_bytes)
        self.web = uvicorn_server.make_server(server, app, 1)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.web.serve([self.sock])), daemon=True)
        self.thread.start()
        while not self.web.started:
            time.sleep(0.005)

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port))
        made.settimeout(5)
        return made

    def ask(self, words: bytes = HEALTH) -> bytes:
        with self.connect() as s:
            s.sendall(words)
            return answer(s)

    def end(self) -> None:
        self.web.should_exit = True
        self.thread.join(5)
        assert not self.thread.is_alive()
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)  # uvicorn sets those of its configuration


@pytest.fixture
def site(harness: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(**fields: Any) -> Site:
            made = Site(harness, **fields)
            stack.callback(made.end)
            return made

        yield make


def length(head: bytes) -> int:
    return int(head.split(b"content-length: ")[1].split()[0])


def answer(s: socket.socket) -> bytes:
    """One answer of a known length."""
    got = b""
    while b"\r\n\r\n" not in got or len(got.partition(b"\r\n\r\n")[2]) < length(got):
        piece = s.recv(65536)
        assert piece, got
        got += piece
    return got


def ended(s: socket.socket, seconds: float = 5.0) -> bytes:
    """What comes until the server closes ``s``."""
    s.settimeout(seconds)
    got = b""
    while True:
        try:
            piece = s.recv(65536)
        except ConnectionError:
            return got
        if not piece:
            return got
        got += piece


def test_few_requests_begin_in_one_pass_and_none_is_forgotten(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that write at once do not make one long pass of the loop; the order of their bytes stays."""
    made = site()
    shared: pending_request_heads_by_tenant.SharedLimits = made.web.config.http.args[0]
    begun: list[int] = []
    loops: list[asyncio.AbstractEventLoop] = []
    usual = pending_request_heads_by_tenant.SharedLimits._run_pass

    def counted(self: pending_request_heads_by_tenant.SharedLimits, loop: asyncio.AbstractEventLoop) -> None:
        loops.append(loop)
        usual(self, loop)
        begun.append(self.begun)

    monkeypatch.setattr(pending_request_heads_by_tenant.SharedLimits, "_run_pass", counted)
    busy = threading.Event()
    with ExitStack() as stack:
        sockets = [stack.enter_context(made.connect()) for _ in range(30)]
        for one in sockets:
            one.sendall(HEALTH)
            assert b"200 OK" in answer(one)
        loops[0].call_soon_threadsafe(busy.wait, 30)
        for one in sockets[:-1]:
            one.sendall(HEALTH)
        sockets[-1].sendall(post(CHAT[:20])[:-20])  # only a head for now
        sockets[-2].close()
        busy.set()
        sockets[-1].sendall(CHAT[:20])
        for one in sockets[:-2]:
            assert b"200 OK" in answer(one)
        assert b" 400 " in answer(sockets[-1])
    assert (
        max(begun) == pending_request_heads_by_tenant.STARTS_PER_PASS
        and len([n for n in begun if n]) >= 29 // pending_request_heads_by_tenant.STARTS_PER_PASS - 1
    )
    assert not shared.deferred


@pytest.mark.parametrize("fresh", [False, True])
def test_a_request_that_comes_as_its_connection_is_given_up_is_answered(site: Any, fresh: bool) -> None:
    """The loop is held until the request is there, and the timer runs before the loop has read it."""
    made = site(timeout_keep_alive=60)
    with made.connect() as s:
        if not fresh:
            s.sendall(HEALTH)
            assert b"200 OK" in answer(s)
        while not made.web.server_state.connections:
            time.sleep(0.001)
        (one,) = made.web.server_state.connections
        sent, held = threading.Event(), threading.Event()

        def give_up() -> None:
            held.set()
            sent.wait(30)
            (one._on_timeout if fresh else one.timeout_keep_alive_handler)()

        one.loop.call_soon_threadsafe(give_up)
        assert held.wait(30)
        s.sendall(HEALTH)
        sent.set()
        assert b"200 OK" in answer(s)
        # With nothing to read it is closed.
        one.loop.call_soon_threadsafe(one.timeout_keep_alive_handler)
        assert ended(s) == b""


def test_an_idle_connection_outlives_a_client_with_the_same_limit(site: Any) -> None:
    made = site(timeout_keep_alive=5)
    with made.connect() as s:
        s.sendall(HEALTH)
        assert b"200 OK" in answer(s)
        (one,) = made.web.server_state.connections
        end = time.monotonic() + 20
        while (timer := one.timeout_keep_alive_task) is None and time.monotonic() < end:
            time.sleep(0.005)  # the server sets it behind the answer
        assert timer is not None and timer.when() - one.loop.time() > 5.5
    with site(timeout_keep_alive=0).connect() as s:
        s.sendall(HEALTH)
        assert ended(s).startswith(b"HTTP/1.1 200 OK")


def test_heads_have_a_time_limit(site: Any) -> None:
    made = site(receive_timeout=1.0, timeout_keep_alive=60)
    with made.connect() as silent, made.connect() as part, made.connect() as second, made.connect() as whole:
        part.sendall(b"GET /health HTTP/1.1\r\nhost")
        second.sendall(HEALTH)
        assert b"200 OK" in answer(second)
        second.sendall(b"GET")
        whole.sendall(HEALTH)
        assert b"200 OK" in answer(whole)
        assert ended(silent) == b""
        assert ended(part).startswith(b"HTTP/1.1 408 ")
        assert ended(second).startswith(b"HTTP/1.1 408 "), "also the head of a later request"
        whole.sendall(HEALTH)
        assert b"200 OK" in answer(whole), "an idle connection is kept as long as before"


def test_a_head_that_drips_is_no_progress(site: Any) -> None:
    made = site(receive_timeout=0.3)
    with made.connect() as s:
        begun = time.monotonic()
        got = b""
        for letter in b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 100:
            try:
                s.sendall(bytes([letter]))
            except ConnectionError:
                break
            if select.select([s], [], [], 0.02)[0]:
                got = ended(s)
                break
        assert got.startswith(b"HTTP/1.1 408 ") and time.monotonic() - begun < 1.5


def test_the_rest_of_an_answered_body_is_not_read_for_ever(site: Any) -> None:
    made = site(receive_timeout=0.3, max_body_bytes=1000)
    with made.connect() as s:
        s.sendall(post(b"x" * 5000)[:-4000])
        assert b" 413 " in answer(s)
        s.sendall(b"x" * 10)
        assert ended(s) == b""


def test_heads_are_bounded_each_and_together(
    site: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    halls, usual = [], pending_request_heads_by_tenant.SharedLimits

    def hall(seconds: float) -> pending_request_heads_by_tenant.SharedLimits:
        halls.append(usual(seconds, 150_000))
        return halls[-1]

    monkeypatch.setattr(uvicorn_server, "SharedLimits", hall)
    made = site()
    with made.connect() as s:
        s.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * 100_000)
        assert b" 431 " in ended(s), "one head is at most 64 KiB by default"
    with ExitStack() as stack:
        some = [stack.enter_context(made.connect()) for _ in range(4)]
        for one in some:
            one.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * 40_000)
        end = time.monotonic() + 5
        while len(refused := select.select(some, [], [], 0.05)[0]) < 1:
            assert time.monotonic() < end
        assert [b" 503 " in ended(one) for one in refused] == [True]
        assert b"200 OK" in made.ask(), "a head that comes whole is held by nobody"
        assert 100_000 < halls[0].held <= 150_000
    end = time.monotonic() + 5
    while halls[0].held:
        assert time.monotonic() < end
        time.sleep(0.01)
    with made.connect() as s:
        s.sendall(HEALTH * 3)
        end = time.monotonic() + 5
        got = b""
        while got.count(b"200 OK") < 3:
            assert time.monotonic() < end
            got += s.recv(65536)
    assert halls[0].held == 0


HEAVY = {
    "a long target": (b"GET /health?" + b"a=b&" * 10_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b" 414 "),
    "a target without an end": (b"GET /" + b"a" * 9000, b" 414 "),
    "many fields": (HEALTH[:-2] + b"a: b\r\n" * 5000 + b"\r\n", b" 431 "),
    "many fields without an end": (HEALTH[:-2] + b"a: b\r\n" * 5000, b" 431 "),
    "folded lines": (HEALTH[:-2] + b"a: b\r\n" + b" c\r\n" * 5000 + b"\r\n", b" 431 "),
    "bare line feeds": (b"GET /health HTTP/1.1\nhost: x\n" + b"a: b\n" * 5000 + b"\n", b" 431 "),
}


@pytest.mark.parametrize("what", HEAVY)
def test_heads_that_cost_much_are_refused_before_they_are_parsed(
    site: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    made = site()
    parsed: list[Any] = []
    monkeypatch.setattr(h11.Connection, "next_event", lambda self: parsed.append(self))
    head, status = HEAVY[what]
    with made.connect() as s:
        s.sendall(head)
        assert status in ended(s)
    assert not parsed


def test_heads_within_the_bounds_are_taken_and_refusals_counted(site: Any) -> None:
    made = site()
    usual = b"GET /health?" + b"a" * 8000 + b" HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 250 + b"\r\n"
    body = b"\n" * 3000 + CHAT
    assert b" 200 OK" in made.ask(usual) and b" 200 OK" in made.ask(post(body)), "lines of a body do not count"
    with made.connect() as s:
        s.sendall(HEAVY["a long target"][0])
        ended(s)
    text = made.ask(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b'http_refused_requests_total{reason="request line",status="414"} 1.0' in text


def test_a_client_that_ends_its_side_gets_its_answer(site: Any, harness: Any) -> None:
    made = site()
    harness.engine.delay = 0.02
    for body in (CHAT, CHAT[:-1] + b', "stream": true}'):
        with made.connect() as s:
            s.sendall(post(body))
            s.shutdown(socket.SHUT_WR)
            got = ended(s)
            assert b" 200 OK" in got and "日本".encode() in got, got
    assert not harness.engine.aborted


@pytest.mark.parametrize("how", ["close", "shutdown", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_frees_its_request(site: Any, harness: Any, how: str, stream: bool) -> None:
    made = site()
    harness.engine.delay = 0.05
    body = CHAT[:-1] + b', "ignore_eos": true, "max_tokens": 500, "stream": %s}' % str(stream).lower().encode()
    s = made.connect()
    s.sendall(post(body, b"1.0" if how == "1.0" else b"1.1"))
    end = time.monotonic() + 5
    while not harness.engine.submitted:
        assert time.monotonic() < end
        time.sleep(0.005)
    time.sleep(0.1)
    if how == "shutdown":
        s.shutdown(socket.SHUT_RDWR)
    else:
        s.close()
    end = time.monotonic() + 2.5
    while not harness.engine.aborted:
        assert time.monotonic() < end
        time.sleep(0.005)
    s.close()


def test_too_many_connections_are_turned_away_in_one_line(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = site(max_connections=5)
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        some = [stack.enter_context(made.connect()) for _ in range(5)]
        for _ in range(20):
            with made.connect() as s:
                assert ended(s).startswith(b"HTTP/1.1 503 ")
        some[0].sendall(HEALTH)
        assert b"200 OK" in answer(some[0])
        assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == [
            "5 connections are open (--max-connections, ulimit -n): the server turns more away"
        ]
        some[1].close()
        end = time.monotonic() + 5
        while b"200 OK" not in made.ask():
            assert time.monotonic() < end


@pytest.mark.skipif(not Path("/proc/sys/net/core/somaxconn").exists(), reason="TCP_INFO of a listener is Linux's")
def test_connections_of_a_burst_wait_for_a_busy_server(site: Any) -> None:
    """What does not fit the system's queue would be reset after its client has sent a request."""
    made = site()
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    info = made.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    queued, longest = struct.unpack_from("II", info, 24)  # tcpi_unacked, tcpi_sacked: of a listener
    assert queued == 0 and longest == min(listener.QUEUED, most)


def test_without_descriptors_it_neither_spins_nor_floods(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    made = site()
    some = [socket.socket() for _ in range(20)]
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        for s in some:
            stack.enter_context(s)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
            cpu = time.process_time()
            for s in some:
                s.connect(("127.0.0.1", made.port))
            time.sleep(0.3)
            spent = time.process_time() - cpu
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert spent < 0.15, "half of the time at most: it does not spin"
        lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
        said = [r.message for r in lines]
        assert said == ["no file descriptor is left (ulimit -n): the server turns connections away"]
        assert not any(r.exc_info for r in lines)
    assert b"200 OK" in made.ask()


def test_room_is_what_the_limit_of_descriptors_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(os.listdir("/proc/self/fd"))
    for limit, requested, least, most in (
        (65535, None, 4096, 4096), (65535, 50, 50, 50), (1024, None, 1024 - used - 170, 1024 - used - 150),
        (used + 30, None, 15, 25), (used + 30, 10_000, 15, 25), (resource.RLIM_INFINITY, 9000, 9000, 9000),
    ):  # fmt: skip
        monkeypatch.setattr(resource, "getrlimit", functools.partial(lambda _, given: (given, given), given=limit))
        assert least <= listener.get_max_connections(requested) <= most, limit
