"""The cases of ``wire_requests``, and those of hosts, of pages that a user visits, and of keys."""

from __future__ import annotations

from collections.abc import Iterator

from tests.hostile import wire_requests
from tests.hostile.wire_requests import BODY, FINE, KEY, Door, chunked, get, in_chunks, post

HOSTS = {
    b"127.0.0.1": 200, b"127.0.0.1:1": 200, b"LOCALHOST": 200, b"localhost.": 200, b"localhost.:{port}": 200,
    b"[::1]:{port}": 200, b"[0:0:0:0:0:0:0:1]": 200, b"127.255.1.2:80": 200,
    b"evil.example": 403, b"EVIL.example:{port}": 403, b"localhost.evil.example": 403, b"127.0.0.1.evil.example": 403,
    b"evil-localhost": 403, b"localhost:{port}.evil.example": 403, b"127.0.0.1@evil.example": 403, b"a@localhost": 403,
    b"localhost:abc": 403, b"localhost:1234567": 403, b"[::1": 403, b"::1": 403, b"[::ffff:8.8.8.8]": 403, b"[::]": 403,
    b"0.0.0.0:{port}": 403, b"0": 403, b"127.1": 403, b"2130706433": 403, b"0x7f000001": 403, b"[fe80::1%25lo]": 403,
    b"localhost/": 403, b"localhost, evil.example": 403, b"localhost evil.example": 403, b"http://localhost": 403,
    b"[::ffff:127.0.0.1]": 403, b"127.0.0.1:80:80": 403, b"[::1]evil.example": 403, b"[::1]:": 403, b"[::1%251]": 403,
    b"127.0.0.1\xe3\x80\x82": 403, b"\xef\xbd\x8cocalhost": 403, b"localhost%00.evil.example": 403, b"[localhost]": 403,
    b"[127.0.0.1]": 200, b"127.0.0.1:{port}\tevil.example": 403, b"127.0.0.1\\@evil.example": 403, b"0177.0.0.1": 403,
    b"evil.example#localhost": 403, b"xn--lcalhost-54a": 403, b".localhost": 403, b"a.localhost": 403, b"10.0.0.1": 403,
}  # fmt: skip
OWN = b"Origin: http://127.0.0.1:{port}"
PAGES: dict[str, tuple[int, tuple[bytes, ...]]] = {
    "a page of ours": (200, (OWN,)), "a page of ours by TLS": (200, (b"Origin: https://127.0.0.1:{port}",)),
    "a page of ours in capitals": (200, (OWN.replace(b"http", b"HTTP"),)),
    "the same origin": (200, (b"Sec-Fetch-Site: same-origin",)),
    "typed by the user": (200, (b"Sec-Fetch-Site: none",)), "no page": (200, ()),
    "null": (403, (b"Origin: null",)), "NULL": (403, (b"Origin: NULL",)),
    "an empty scheme": (403, (b"Origin: ://127.0.0.1:{port}",)),
    "a file": (403, (b"Origin: file://",)), "an extension": (403, (b"Origin: chrome-extension://abc",)),
    "evil": (403, (b"Origin: http://evil.example",)), "evil with our port": (403, (b"Origin: http://evil.example:{port}",)),
    "evil in a path": (403, (b"Origin: http://evil.example/127.0.0.1:{port}",)),
    "a user's name": (403, (b"Origin: http://127.0.0.1:{port}@evil.example",)),
    "another port": (403, (b"Origin: http://127.0.0.1:1",)), "no port": (403, (b"Origin: http://127.0.0.1",)),
    "another name of this machine": (403, (b"Origin: http://localhost:{port}",)), "a slash": (403, (OWN + b"/",)),
    "a dot": (403, (b"Origin: http://127.0.0.1.:{port}",)),
    "a second one": (403, (b"Origin: http://evil.example", OWN,)),
    "one after ours": (403, (OWN, b"Origin: http://evil.example",)), "a list": (403, (OWN + b" http://evil.example",)),
    "an escape": (403, (OWN + b"%00.evil.example",)), "a backslash": (403, (OWN + b"\\@evil.example",)),
    "a query": (403, (OWN + b"?",)), "a tab": (403, (OWN + b"\thttp://evil.example",)), "a port of 0": (403, (b"Origin: http://127.0.0.1:0{port}",)),
    "letters beyond ASCII": (403, (b"Origin: http://\xef\xbc\x91\xef\xbc\x92\xef\xbc\x97.0.0.1:{port}",)),
    "an address of IPv6": (403, (b"Origin: http://[::1]:{port}",)), "a blob": (403, (b"Origin: blob:http://127.0.0.1:{port}",)),
    "an inline frame": (403, (b"Origin: about:srcdoc",)), "a web socket's": (403, (b"Origin: ws://127.0.0.1:{port}",)),
    "cross-site": (403, (b"Sec-Fetch-Site: cross-site",)), "CROSS-SITE": (403, (b"Sec-Fetch-Site: CROSS-SITE",)),
    "cross-site with our origin": (403, (OWN, b"Sec-Fetch-Site: cross-site",)),
    "same-site with another origin": (403, (b"Origin: http://a.evil.example", b"Sec-Fetch-Site: same-site",)),
    "a second site": (403, (b"Sec-Fetch-Site: same-origin", b"Sec-Fetch-Site: cross-site", b"Origin: http://evil.example",)),
}  # fmt: skip
"""What a browser sends with a POST -> the status, and its fields."""

WRONG_KEYS = (
    b"api-key: key-a", b"Authorization: Token key-a", b"Authorization: key-a", b"Authorization: Bearerkey-a",
    b"Authorization: Basic a2V5LWE=", b"Proxy-Authorization: Bearer key-a", b"Cookie: x-api-key=key-a",
    b"x-api-key: KEY-A",
    b"x-api-key: key-a\x80", b'x-api-key: "key-a"', b"x-api-key:", b"Authorization: Bearer",
    b"Authorization: Bearer key-a key-a",
    b"Authorization: Bearer, key-a", b"X-Forwarded-Authorization: Bearer key-a", b"x-goog-api-key: key-a",
    b"x_api_key: key-a", b"x-api-key: 4" + b"4" * 4000,
)  # fmt: skip
OPEN_PATHS = (b"/health", b"/live", b"/ready", b"/ping", b"/version")
SHUT_PATHS = (
    b"/metrics", b"/stats", b"/buckets", b"/v1/models", b"/docs", b"/openapi.json", b"/redoc", b"/health/",
    b"/health/x",
    b"//health", b"/health%2f", b"/healthx", b"/HEALTH", b"/./health", b"/metrics?/health", b"/version/../v1/models",
    b"/tokenize", b"/server_info", b"/is_sleeping", b"/load", b"/v1", b"/.",
)  # fmt: skip


def _keys() -> Iterator[Door]:
    for line in WRONG_KEYS:
        yield Door(f"the key as {line[:40]!r}", (get(b"/v1/models", line),), frozenset({400, 401}), keyed=True)
        yield Door(f"the key of a POST as {line[:40]!r}", (post(BODY, line),), frozenset({400, 401}), keyed=True)
    for path in OPEN_PATHS:
        yield Door(f"{path.decode()} without a key", (get(path),), FINE, keyed=True)
        yield Door(f"a POST to {path.decode()}", (post(BODY, target=path),), frozenset({200, 405}), keyed=True)
    for path in SHUT_PATHS:
        yield Door(f"{path.decode()} without a key", (get(path),), frozenset({401}), keyed=True)
    for method in (b"HEAD", b"PUT", b"DELETE", b"PATCH", b"POST", b"X"):
        yield Door(
            f"{method.decode()} without a key",
            (get(b"/v1/models", b"Connection: close").replace(b"GET", method),),
            frozenset({401}),
            keyed=True,
        )
    for target in (b"http://127.0.0.1/health/../v1/models", b"http://x/v1/models", b"/health;/../v1/models",
                   b"/health%3f/v1/models", b"/health?/../v1/models#", b"//x/health", b"*"):  # fmt: skip
        open_one = target.startswith(b"/health?")
        yield Door(
            f"{target.decode()} without a key", (get(target),), FINE if open_one else frozenset({400, 401}), keyed=True
        )
    for name, line in {"a word": b"Expect: 100-continue", "two words": b"Expect: 100-continue, 100-continue"}.items():
        head = post(b"", line, b"Content-Length: 9999999", length=False)
        yield Door(
            f"a body that waits for {name} without a key", (head,), frozenset({401}), keyed=True, absent=b"100 continue"
        )
        head = post(b"", line, b"Transfer-Encoding: chunked", length=False)
        yield Door(
            f"chunks that wait for {name} without a key", (head,), frozenset({401}), keyed=True, absent=b"100 continue"
        )
    yield Door("300 requests without a key", (get(b"/v1/models") * 300,), frozenset({401}), 300, True)
    yield Door("300 bodies without a key", (post(BODY) * 300,), frozenset({401}), 300, True)
    yield Door(
        "chunks without a key, and a request", (chunked(in_chunks(BODY, 9)) + get(),), frozenset({401}), keyed=True
    )
    keys = [b"x-api-key: %032d" % i for i in range(240)]
    yield Door("240 keys", (get(b"/v1/models", *keys),), frozenset({401}), keyed=True)
    yield Door("1,200 keys", (get(b"/v1/models", *keys * 5),), frozenset({431}), keyed=True)
    for name, data in {
        "one-byte chunks": chunked(in_chunks(b" " * 50_000, 1)),
        "half a megabyte": post(b" " * 500_000),
        "chunks of 64 KiB": chunked(in_chunks(b" " * 500_000, 1 << 16)),
        "a body with HTTP/1.0": post(b" " * 90_000).replace(b"1.1", b"1.0"),
        "a body and an end": post(b" " * 90_000, b"Connection: close"),
    }.items():
        yield Door(f"{name} without a key", (data,), frozenset({400, 401}), keyed=True)
    good = b"x-api-key: " + KEY
    yield Door("the key", (get(b"/v1/models", good),), FINE, keyed=True)
    yield Door(
        "the key, a wrong one besides", (get(b"/v1/models", good, b"Authorization: Bearer x"),), FINE, keyed=True
    )
    yield Door("requests with and without", (get(b"/v1/models", good) + get(b"/v1/models"),), FINE, 2, True)
    yield Door("requests without and with", (get(b"/v1/models") + get(b"/v1/models", good),), frozenset({401}), 2, True)


def make_doors() -> Iterator[Door]:
    """All cases."""
    for some in wire_requests.make_requests():
        name, data, statuses = some
        yield Door(name, (data,), statuses)
    for host, status in HOSTS.items():
        yield Door(
            f"the host {host.decode()}",
            (get(b"/v1/models", host=host),),
            frozenset({status, 400} if status > 400 else {status}),
        )
    for name, (status, lines) in PAGES.items():
        yield Door(f"a page: {name}", (post(BODY, *lines),), frozenset({status}))
        yield Door(
            f"a page that sleeps: {name}", (post(b"", *lines, target=b"/sleep?mode=abort"),), frozenset({status})
        )
    yield from (Door(name, data, statuses, count) for name, data, statuses, count in wire_requests.make_pipelines())
    yield from _keys()


DOORS = {door.name: door for door in make_doors()}
