"""Heads that wait to be read: whose key they show, and the turns of those names."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.scripted_app import ScriptedApp
from tests.server.http.test_connection import Site, answer
from trencadis.core.engine_config import EngineConfig
from trencadis.server.http.h11_connection import LimitedH11Protocol
from trencadis.server.http.pending_request_heads_by_tenant import PendingHeads, find_keys, find_tenant_name
from trencadis.server.tenants.tenant_registry import TenantRegistry

CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}).encode()


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        (b"x-api-key: one", [b"one"]),
        (b"X-Api-Key:one  \r\nhost: x", [b"one"]),
        (b"host: x\r\nAUTHORIZATION:  bearer \t two", [b"two"]),
        (b"authorization: Basic two", []),
        (b"x-api-keys: one\r\nnot-authorization: Bearer two", []),
        (b"x-api-key: one\r\nauthorization: Bearer two", [b"one", b"two"]),
        (b"x-api-key: a\r\n" * 1200, [b"a", b"a"]),
        (b"authorization: bearer b\r\nx-api-key: one\r\nx-api-key: two", [b"b", b"one"]),
        (b"a: " + b"b" * (17 << 10) + b"\r\nx-api-key: one", []),
    ],
)
def test_keys_are_found_in_bytes(fields: bytes, keys: list[bytes]) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + fields
    for rest in (b"", b"\r\n", b"\r\n\r\n", b'\r\n\r\n{"a":\r\nx-api-key: body}'):
        assert find_keys(head + rest) == keys


def test_names_take_turns_and_within_one_the_oldest_and_the_newest() -> None:
    heads = PendingHeads[str]()
    heads.get_tenant = lambda data: data.decode()
    for i in range(6):
        heads.put(f"a{i}", b"a")
    heads.put("b0", b"b")
    assert [heads.take(), heads.take()] == ["a0", "b0"]
    heads.put("b1", b"b")
    assert [heads.take() for _ in range(len(heads))] == ["a5", "b1", "a1", "a4", "a2", "a3"]
    assert not heads


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "keys.yaml"
    made = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("flood", "mine")]
    made.append({"name": "gone", "sha256": hashlib.sha256(b"gone").hexdigest(), "expires": "2020-01-01"})
    file.write_text(json.dumps({"keys": made}))
    file.chmod(0o600)
    return str(file)


def test_only_keys_that_count_have_a_name(keys: str) -> None:
    tenants = TenantRegistry(Path(keys))
    head = b"GET / HTTP/1.1\r\nx-api-key: "
    assert [find_tenant_name(tenants, head + key) for key in (b"flood", b"gone", b"other", b"")] == [
        "flood",
        "",
        "",
        "",
    ]


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_request_beside_a_flood_of_heads_is_read_next(
    harness: ScriptedApp, keys: str, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The flood's come before and behind it, while the loop is held."""
    engine = EngineConfig(model="m", scheduling_policy=policy)
    usual = harness.app
    monkeypatch.setattr(harness, "app", lambda **given: usual(api_key_file=keys, engine=engine, **given))
    made, order, busy = Site(harness), list[int](), threading.Event()
    begin = LimitedH11Protocol.handle_events

    def counted(self: LimitedH11Protocol) -> None:
        before = self.cycle
        begin(self)
        if self.cycle is not before and self.client is not None:
            order.append(self.client[1])

    with ExitStack() as stack:
        stack.callback(made.end)
        stack.callback(busy.set)
        sockets = [stack.enter_context(made.connect()) for _ in range(41)]
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-api-key: %s\r\n"
        for one in sockets:
            one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200 OK" in answer(one)
        monkeypatch.setattr(LimitedH11Protocol, "handle_events", counted)
        next(iter(made.web.server_state.connections)).loop.call_soon_threadsafe(busy.wait, 30)  # type: ignore[union-attr]
        for i, one in enumerate(sockets):
            one.sendall(head % (b"mine" if i == 20 else b"flood") + b"content-length: %d\r\n\r\n" % len(CHAT) + CHAT)
        busy.set()
        for one in sockets:
            assert b" 200 OK" in answer(one)
        port = sockets[20].getsockname()[1]
    assert Counter(order).total() == 41
    assert (order.index(port) < 6) == (policy == "fair"), order.index(port)
