"""Requests in forms that no client writes, on a real socket: each is answered or refused, and breaks nothing."""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections.abc import Iterator

import pytest

from tests.fakes.scripted_app import scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.hostile.doors import DOORS
from tests.hostile.wire_requests import KEY, Door
from tests.traffic.live_app import live

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
PATIENCE = 10.0
"""Seconds, against hangs."""
KINDS = {"open": False, "keyed": True}


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, int]]:
    """Servers without and with keys, on loopback addresses."""
    folder = tmp_path_factory.mktemp("doors")
    keys = folder / "keys.yaml"
    keys.write_text(f"keys:\n- name: one\n  sha256: {hashlib.sha256(KEY).hexdigest()}\n")
    keys.chmod(0o600)
    checkpoint = write_text_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    first, second = scripted_app(checkpoint), scripted_app(checkpoint)
    how = {"host": "127.0.0.1", "receive_timeout": 0.3}
    first.app(**how, enable_sleep_mode=True, disable_page=True)
    second.app(**how, api_key_file=str(keys), enable_sleep_mode=True, server_dev_mode=True)
    with live(first, receive_timeout=0.3) as one, live(second, receive_timeout=0.3) as two:
        yield {keyed: int(url.rpartition(":")[2]) for keyed, url in ((False, one), (True, two))}


def read_answers(s: socket.socket, count: int) -> tuple[list[int], bytes]:
    """The statuses of ``count`` answers, or of those that came before the end, and all bytes."""
    got, end = b"", time.monotonic() + PATIENCE
    while time.monotonic() < end:
        statuses = [int(one) for one in STATUS.findall(got)]
        whole = [one for one in statuses if one >= 200]
        if len(whole) >= count and _is_whole(got):
            return statuses, got
        try:
            piece = s.recv(1 << 16)
        except ConnectionError:
            piece = b""
        if not piece:
            return statuses, got
        got += piece
    raise AssertionError(f"no answer within {PATIENCE} s: {got[:200]!r}")


def _is_whole(got: bytes) -> bool:
    """True if the last answer has its whole body."""
    head, found, body = got[got.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return bool(found) and (length is None or len(body) >= int(length[1]))


def knock(port: int, door: Door) -> list[int]:
    """Sends a case; returns the statuses of its answers, 0 for none."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as s:
        try:
            for piece in door.data:
                s.sendall(piece.replace(b"{port}", b"%d" % port))
                if len(door.data) > 1:
                    time.sleep(0.0005)
        except ConnectionError:
            pass  # refused before the end; the answer may be there
        statuses, got = read_answers(s, door.count)
    assert door.absent not in got.lower(), got[:300]
    assert b"Traceback" not in got
    return statuses or [0]


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_answered_as_it_should_be(ports: dict[bool, int], kind: str, caplog: pytest.LogCaptureFixture) -> None:
    wrong, late = [], []
    port = ports[KINDS[kind]]
    for name, door in DOORS.items():
        if door.keyed is not KINDS[kind]:
            continue
        begun = time.monotonic()
        statuses = knock(port, door)
        if statuses[0] not in door.statuses or len(statuses) < door.count:
            wrong.append((name, statuses))
        if time.monotonic() - begun > PATIENCE / 2:
            late.append(name)
    assert knock(port, DOORS["HTTP/1.0"]) == [200]
    assert not wrong and not late
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
