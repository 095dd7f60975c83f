"""Bodies in chunks, early answers and refusals on a real socket: nothing is parsed that need not be, and clients read
why.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import RequestResponseCycle
from uvicorn.server import ServerState

from tests.server.http.test_connection import CHAT, HEALTH, Site, answer, ended, post
from trencadis.server.http import h11_body_bounds, h11_connection, pending_request_heads_by_tenant


@pytest.fixture
def site(harness: Any) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(**fields: Any) -> Site:
            made = Site(harness, **fields)
            stack.callback(made.end)
            return made

        yield make


CHUNKED = post()[: -len(CHAT)].split(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n"


def chunks(body: bytes, size: int, end: bytes = b"0\r\n\r\n") -> bytes:
    some = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in some) + end


def test_a_body_in_tiny_chunks_or_with_many_trailers_is_refused(site: Any) -> None:
    made = site()
    long = CHAT[:-1] + b" " * 20_000 + b"}"
    for good in (chunks(long, 80), chunks(CHAT, 1), chunks(CHAT, 40, b"0\r\na: b\r\n\r\n")):
        assert b" 200 OK" in made.ask(CHUNKED + good)
    for bad in (chunks(long, 1), chunks(long, 60), chunks(CHAT, 40, b"0\r\n" + b"a: b\r\n" * 5000 + b"\r\n")):
        with made.connect() as s:
            s.sendall(CHUNKED + bad)
            assert b" 400 " in ended(s)


@pytest.mark.parametrize("head", [CHUNKED, post(b"x" * 100_000)[:-100_000]], ids=["chunked", "by length"])
def test_after_an_early_answer_nothing_is_parsed(site: Any, monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    made = site(max_body_bytes=1 << 30)
    with made.connect() as s:
        s.sendall(head.replace(b"application/json", b"text/plain"))
        got = answer(s)
        assert b" 400 " in got
        taken: list[int] = []
        usual = h11_body_bounds.BoundedConnection.receive_data
        monkeypatch.setattr(
            h11_body_bounds.BoundedConnection, "receive_data", lambda c, d: (taken.append(len(d)), usual(c, d))
        )
        s.settimeout(5)
        assert s.recv(1) == b"", "the server has ended its side"
        for _ in range(20):
            s.sendall(b"1\r\nx\r\n" * 1000)
        time.sleep(0.05)
        assert not taken
        begun = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - begun < 20:
                s.sendall(b"x")
                time.sleep(0.02)


def test_the_short_rest_of_a_body_leaves_the_connection_in_use(site: Any) -> None:
    made = site()
    with made.connect() as s:
        s.sendall(post(b"x" * 5000).replace(b"application/json", b"text/plain")[:-4000])
        assert b" 400 " in answer(s)
        s.sendall(b"x" * 4000 + HEALTH)
        assert b" 200 OK" in answer(s)


def test_long_heads_are_a_431_that_the_client_reads(site: Any) -> None:
    made = site()
    start = HEALTH[:-2] + b"x: "
    assert b" 200 OK" in made.ask(start + b"y" * 60_000 + b"\r\n\r\n")
    for size in (65_536, 100_000, 130_000, 1_000_000):
        with made.connect() as s:
            s.sendall(start + b"y" * size + b"\r\n\r\n")
            got = ended(s)
            assert b" 431 " in got and b"RequestHeadersTooLargeError" in got, size


@pytest.mark.parametrize(
    "second", [HEALTH[:-2] + b"x: " + b"y" * 70_000 + b"\r\n\r\n", b"GET /" + b"a" * 9000, b"\x16\x03\x01 \r\n\r\n"]
)
def test_a_refusal_after_an_answer_ends_the_connection_too(
    site: Any, second: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pipelined: the first request's end must not start a timer of its own, which would write after the end."""
    monkeypatch.setattr(h11_connection, "DROP_SECONDS", 0.1)
    made = site(receive_timeout=0.3)
    with made.connect() as s:
        s.sendall(HEALTH + second)
        got = ended(s)
        assert b"200 OK" in got and re.search(rb"HTTP/1.1 4\d\d ", got) and got.endswith(b"}}"), got
        time.sleep(0.5)
        with pytest.raises(ConnectionError):
            for _ in range(20):
                s.sendall(b"x")
                time.sleep(0.01)
    assert not [r for r in caplog.records if r.exc_info]


def test_a_body_that_is_no_http_is_a_400_that_the_client_reads(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = site()
    for data in (chunks(CHAT, 9, b"x\r\n") + b"y" * 500_000, chunks(b" " * 20_000, 1), b"5;" + b"a" * 100_000):
        with made.connect() as s:
            s.sendall(CHUNKED + data)
            got = ended(s)
            assert got.startswith(b"HTTP/1.1 400 ") and b'"code":400' in got
    both = post(CHAT, extra=b"transfer-encoding: chunked\r\n")
    with made.connect() as s:
        s.sendall(both)
        assert b" 400 " in ended(s), "two lengths, of which a proxy may take the other one"
    text = made.ask(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b'http_refused_requests_total{reason="http",status="400"} 4.0' in text
    assert not [r for r in caplog.records if r.exc_info]


def test_chunked_bodies_share_a_pass_of_the_loop(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen uploads at once are parsed one read at a time; one that ends its side is answered."""
    passes = [0]
    taken: list[int] = []
    usual = h11_connection.LimitedH11Protocol._take_chunks

    def take(connection: Any, data: bytes) -> None:
        taken.append(passes[0])
        usual(connection, data)

    monkeypatch.setattr(h11_connection.LimitedH11Protocol, "_take_chunks", take)
    made = site()
    once = asyncio.base_events.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def run_once(loop: Any) -> None:
        passes[0] += 1
        once(loop)

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "_run_once", run_once)
    long = chunks(CHAT[:-1] + b" " * 60_000 + b"}", 100)
    with ExitStack() as stack:
        some = [stack.enter_context(made.connect()) for _ in range(16)]
        for one in some:
            one.sendall(CHUNKED + long)
        some[0].shutdown(socket.SHUT_WR)
        assert b" 200 OK" in ended(some[0])
        for one in some[1:]:
            assert b" 200 OK" in answer(one)
    assert len(taken) > 40 and len(set(taken)) == len(taken)


def test_an_upgrade_that_is_not_served_says_nothing(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = site()
    with caplog.at_level(logging.INFO):
        for name in (b"h2c", b"websocket"):
            asked = HEALTH[:-2] + b"connection: upgrade\r\nupgrade: " + name + b"\r\n\r\n"
            assert b" 200 OK" in made.ask(asked)
    assert not [r for r in caplog.records if "upgrade" in r.getMessage().lower()]


def test_few_bytes_of_heads_and_chunks_are_read_in_one_pass(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    usual = h11_connection.LimitedH11Protocol.data_received
    monkeypatch.setattr(
        h11_connection.LimitedH11Protocol, "data_received", lambda c, d: (sizes.append(len(d)), usual(c, d))[1]
    )
    made = site()
    long = CHAT[:-1] + b" " * 300_000 + b"}"
    assert b" 200 OK" in made.ask(CHUNKED + chunks(long, 1000)) and max(sizes) <= 16 << 10
    assert b" 200 OK" in made.ask(post(long)) and max(sizes) > 16 << 10, "a body of a known length is read faster"


def test_pipelined_requests_begin_a_few_in_a_pass(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds on each of many connections would begin one a connection in every pass; other clients wait for that."""
    passes, begun = [0], list[int]()
    once = asyncio.base_events.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def run_once(loop: Any) -> None:
        passes[0] += 1
        once(loop)

    made = site()
    usual = RequestResponseCycle.run_asgi

    async def run(cycle: Any, app: Any) -> None:
        begun.append(passes[0])
        await usual(cycle, app)

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "_run_once", run_once)
    monkeypatch.setattr(RequestResponseCycle, "run_asgi", run)
    with ExitStack() as stack:
        some = [stack.enter_context(made.connect()) for _ in range(12)]
        for one in some:
            one.sendall(HEALTH * 30)
        assert b" 200 OK" in made.ask()
        for one in some:
            got = b""
            while got.count(b"200 OK") < 30:
                got += one.recv(1 << 16)
    assert len(begun) == 361 and max(Counter(begun).values()) <= 2 * pending_request_heads_by_tenant.STARTS_PER_PASS


def test_bytes_behind_a_waiting_read_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy loop defers new requests, which other tenants' may overtake: the next read of a connection may not."""
    received: list[bytes] = []
    monkeypatch.setattr(h11_body_bounds.BoundedConnection, "receive_data", lambda c, data: received.append(data))

    async def run() -> None:
        shared = pending_request_heads_by_tenant.SharedLimits()
        config = uvicorn.Config(lambda: None, lifespan="off", ws="none")
        config.load()
        made = h11_connection.LimitedH11Protocol(shared, config, ServerState(), {})
        made.connection_made(MagicMock(spec=asyncio.Transport, is_closing=lambda: False))
        made._unread = 1
        shared.chunks.put(made.loop, lambda: made._take_chunks(b"first"))
        shared.begun = pending_request_heads_by_tenant.STARTS_PER_PASS
        made.data_received(b"second")
        assert not shared.deferred and not received
        while made._unread:
            await asyncio.sleep(0)
        made.connection_lost(None)

    asyncio.run(run())
    assert received == [b"first", b"second"]
