"""Host, Origin and Sec-Fetch-Site: pages that a user visits reach nothing of a server on a loopback address."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers

from trencadis.core.errors import Forbidden, StartupError
from trencadis.server.config import command_line_parser
from trencadis.server.config.resolve_settings import resolve_settings
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.http.request_middleware import make_record
from trencadis.server.routes.api_keys_and_allowed_hosts import HostRules

OWN, FOREIGN = {"host": "127.0.0.1:8000"}, {"host": "127.0.0.1:8000", "origin": "http://evil.example"}


def allows_host(given: str, **fields: Any) -> bool:
    try:
        HostRules.from_config(ServerConfig(**fields)).check_host(Headers({"host": given} if given else {}))
    except Forbidden:
        return False
    return True


def allows_origin(method: str, headers: dict[str, str], **fields: Any) -> bool:
    try:
        HostRules.from_config(ServerConfig(**fields)).check_origin(method, Headers(headers))
    except Forbidden:
        return False
    return True


LOOPBACK = ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:8000", "127.9.9.9:1", "[::1]:8000", "localhost."]
REBOUND = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1",
           "evil.example@127.0.0.1", "127.0.0.1 evil", "[::2]", "localhost:8000:9", "0.0.0.0", "::1"]  # fmt: skip


def test_a_loopback_listener_takes_loopback_names_alone() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.7"):
        assert all(allows_host(one, host=host) for one in LOOPBACK), host
        assert [one for one in REBOUND if allows_host(one, host=host)] == [], host
    assert allows_host("", host="127.0.0.1"), "probes of HTTP/1.0 have no Host"


def test_other_listeners_take_any_host_unless_told() -> None:
    for fields in ({}, {"host": "0.0.0.0"}, {"host": "127.0.0.1", "uds": "/x"}):
        assert all(allows_host(one, **fields) for one in (*LOOPBACK, *REBOUND)), fields
    some: dict[str, Any] = {"allowed_hosts": ["api.example.com", ".lan", "10.0.0.1", "[fd00:0::1]"]}
    for good in ("api.example.com", "API.example.com:443", "a.b.lan", "10.0.0.1:80", "[fd00::1]:80"):
        assert allows_host(good, host="0.0.0.0", **some), good
    for bad in ("x.api.example.com", "lan", "xlan", "10.0.0.2", "localhost"):
        assert not allows_host(bad, host="0.0.0.0", **some), bad
    assert allows_host("localhost:1", host="127.0.0.1", **some) and allows_host("api.example.com", host="::1", **some)
    assert allows_host("evil.example", host="127.0.0.1", allowed_hosts=["*"])


def test_what_another_site_sends_changes_nothing() -> None:
    for bad in (
        FOREIGN, OWN | {"sec-fetch-site": "cross-site"}, OWN | {"origin": "null"},
        OWN | {"origin": "http://localhost:3"},
        OWN | {"origin": "http://127.0.0.1:80001"}, OWN | {"origin": "http://127.0.0.1:8000.evil.example"},
        OWN | {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "cross-site"},
        FOREIGN | {"sec-fetch-site": "same-site"},
    ):  # fmt: skip
        for method in ("POST", "PUT", "DELETE", "PATCH", "SWEEP"):
            assert not allows_origin(method, bad), (method, bad)
        assert all(allows_origin(method, bad) for method in ("GET", "HEAD", "OPTIONS"))
    for good in (
        OWN, OWN | {"origin": "http://127.0.0.1:8000"}, OWN | {"sec-fetch-site": "none"},
        {"host": "a.example", "origin": "https://a.example:443"},
        {"host": "a.example:80", "origin": "http://A.example"},
        {"host": "backend", "origin": "https://a.example", "sec-fetch-site": "same-origin"},
    ):  # fmt: skip
        assert allows_origin("POST", good), good
    named = {"allowed_origins": ["http://evil.example/"]}
    assert allows_origin("POST", FOREIGN | {"sec-fetch-site": "cross-site"}, **named)
    assert not allows_origin("POST", OWN | {"origin": "http://other.example"}, **named)
    assert allows_origin("POST", OWN | {"origin": "null"}, allowed_origins=["*"])


def test_pages_reach_no_route_and_refusals_are_counted(harness: Any) -> None:
    harness.app(host="127.0.0.1", enable_sleep_mode=True, server_dev_mode=True)
    for path in ("/sleep?mode=abort", "/reset_prefix_cache", "/v1/completions"):
        refused = harness.call(path, method="POST", headers=FOREIGN | {"content-type": "text/plain"})
        assert refused.status_code == 403 and "--allowed-origins" in refused.json()["error"]["message"]
    assert not harness.engine.resets and not harness.engine.sleep_level
    rebound = harness.call("/v1/models", headers={"host": "evil.example:8000"})
    assert rebound.status_code == 403 and "--allowed-hosts" in rebound.json()["error"]["message"]
    assert harness.call("/health", headers={"host": "evil.example"}).status_code == 403
    assert harness.call("/v1/models", headers=OWN).status_code == 200
    assert harness.complete("Hi").status_code == 403  # the client's Host is "test"
    text = harness.call("/metrics", headers=OWN).text
    assert 'http_refused_requests_total{reason="host",status="403"} 3.0' in text
    assert 'http_refused_requests_total{reason="origin",status="403"} 3.0' in text


@pytest.mark.parametrize("host", ["http://a", "a:80", "a/b", "", "a b", "..", "*.a", "::g", "ä.example"])
def test_a_host_that_is_none_ends_the_start(host: str) -> None:
    with pytest.raises(StartupError, match=r"--allowed-hosts: .* is no host; give names, \.suffix") as caught:
        resolve_settings(command_line_parser.parse(["m", "--allowed-hosts", f'["{host}"]']), {})
    assert "\n" not in str(caught.value)


def test_what_a_proxy_passes_on_is_an_address_or_nothing() -> None:
    """X-Forwarded-For of a client may hold terminal codes and forged lines."""
    for given, shown in (
        ("203.0.113.7", "203.0.113.7:0"), ("2001:db8::1", "2001:db8::1:0"), ("\x1b[2Jx", ""), ("a\nGET /", ""),
        ("fe80::1%\x1b[2J", ""), ("unknown", ""), ("", ""), ("1.2.3.4 ", ""),
    ):  # fmt: skip
        scope = {"type": "http", "method": "GET", "path": "/", "client": (given, 0), "headers": []}
        assert make_record(scope, Headers(scope=scope), "id").client == shown, given
