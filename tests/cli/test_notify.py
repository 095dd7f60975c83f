"""What systemd hears of a server."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.traffic.server_process import server
from trencadis.server.processes.server_lifecycle import Notifier


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


def messages(sock: socket.socket) -> list[str]:
    """All that has come."""
    found = []
    sock.setblocking(False)
    while True:
        try:
            found.append(sock.recv(4096).decode())
        except BlockingIOError:
            return found


def test_a_start_asks_for_time_then_the_watchdog_hears_a_server_that_lives(heard: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": str(heard.getsockname()), "WATCHDOG_USEC": "40000", "WATCHDOG_PID": str(os.getpid())}
    unit, alive = Notifier(environ), [True]

    async def life() -> None:
        task = asyncio.create_task(unit.run(lambda: alive[0], lambda: "loading weights"))
        await asyncio.sleep(0.1)
        unit.notify_ready()
        await asyncio.sleep(0.2)
        alive[0] = False
        await asyncio.sleep(0.05)
        before = len(messages(heard))
        await asyncio.sleep(0.2)
        assert before >= 4 and not messages(heard), "a server that fails again and again is silent"
        unit.notify_stopping()
        task.cancel()

    asyncio.run(life())
    assert messages(heard) == ["STOPPING=1\nSTATUS=finishing requests"]


def test_messages_are_those_of_the_protocol(heard: socket.socket) -> None:
    unit = Notifier({"NOTIFY_SOCKET": str(heard.getsockname())})

    async def life() -> None:
        task = asyncio.create_task(unit.run(lambda: True, lambda: "loading"))
        await asyncio.sleep(0.05)
        unit.notify_ready()
        task.cancel()

    asyncio.run(life())
    first, last = messages(heard)
    assert first == "EXTEND_TIMEOUT_USEC=60000000\nSTATUS=loading\nWATCHDOG=1"
    assert last == "READY=1\nSTATUS=serving"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "/nowhere/socket"}, {"NOTIFY_SOCKET": "@nobody-listens"}])
def test_without_a_listener_nothing_happens(environ: dict[str, str]) -> None:
    unit = Notifier({**environ, "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"})
    unit.notify_ready()
    unit.notify_stopping()
    assert unit.watchdog == 0.0  # another process's


@pytest.mark.long
def test_a_real_server_says_when_it_is_ready_and_when_it_stops(heard: socket.socket, tmp_path: Path) -> None:
    with server(tmp_path, "--kv-cache-memory-bytes", "64MiB", NOTIFY_SOCKET=str(heard.getsockname())):
        said = messages(heard)
        assert said[0].startswith("EXTEND_TIMEOUT_USEC=") and said[-1].startswith("READY=1")
    assert messages(heard) == ["STOPPING=1\nSTATUS=finishing requests"]
