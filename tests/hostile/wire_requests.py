"""Requests as no client writes them: heads, bodies, hosts, origins and keys in forms that a server may trip over.

Each is bytes, with the statuses that its first answer may have; ``{port}`` is the server's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

REFUSED = frozenset({400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 417, 422, 431, 501, 505})
FINE = frozenset({200})
CLOSED = frozenset({0})
"""No answer: the connection was closed."""
BODY = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
KEY = b"key-a"


@dataclass(frozen=True)
class Door:
    """One case.

    Args:
        data: what is sent, in one piece each.
        statuses: those that the first answer may have.
        count: answers that come at least.
        keyed: sent to a server with a key file, not to an open one on a loopback address.
        absent: bytes that no answer may have.
    """

    name: str
    data: tuple[bytes, ...]
    statuses: frozenset[int]
    count: int = 1
    keyed: bool = False
    absent: bytes = b"\r\nset-cookie"


def get(target: bytes = b"/health", *lines: bytes, host: bytes = b"127.0.0.1:{port}", version: bytes = b"1.1") -> bytes:
    head = [b"GET " + target + b" HTTP/" + version, b"Host: " + host, *lines]
    return b"\r\n".join(head) + b"\r\n\r\n"


def post(body: bytes = BODY, *lines: bytes, target: bytes = b"/v1/chat/completions", length: bool = True) -> bytes:
    head = [b"POST " + target + b" HTTP/1.1", b"Host: 127.0.0.1:{port}"]
    head += (
        [] if any(line.lower().startswith(b"content-type") for line in lines) else [b"Content-Type: application/json"]
    )
    head += [b"Content-Length: %d" % len(body)] if length else []
    return b"\r\n".join([*head, *lines]) + b"\r\n\r\n" + body


def chunked(body: bytes, *lines: bytes, target: bytes = b"/v1/chat/completions") -> bytes:
    return post(body, b"Transfer-Encoding: chunked", *lines, target=target, length=False)


def in_chunks(body: bytes, size: int, end: bytes = b"0\r\n\r\n") -> bytes:
    some = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in some) + end


def _lines() -> Iterator[tuple[str, bytes, frozenset[int]]]:
    """First lines of a request."""
    ok, bad = FINE, REFUSED
    yield "HTTP/1.0", b"GET /health HTTP/1.0\r\n\r\n", ok
    yield "HTTP/1.0 that stays", b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", ok
    yield "HTTP/1.1 without a host", b"GET /health HTTP/1.1\r\n\r\n", bad
    yield "two hosts", get(b"/health", b"Host: evil.example"), bad
    yield "HTTP/2.0 in words", get(version=b"2.0"), bad | ok
    yield "HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", bad
    yield "HTTP/0.9", b"GET /health\r\n\r\n", bad
    yield "an absolute target", get(b"http://127.0.0.1/health"), bad | ok
    yield "a target of all", b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", bad | ok
    yield "a tunnel", b"CONNECT evil.example:443 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", bad
    yield "a trace", b"TRACE /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", bad
    yield "a method in lower case", b"get /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", bad
    yield "a method of 5,000 letters", b"A" * 5000 + b" /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", bad
    yield "no method", b" /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", bad
    yield "two blanks", b"GET  /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", bad
    yield "tabs", b"GET\t/health\tHTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", bad
    yield "one word more", b"GET /health HTTP/1.1 x\r\nHost: 127.0.0.1\r\n\r\n", bad
    yield "a zero byte", get(b"/hea\0lth"), bad
    yield "a zero byte in an escape", get(b"/health%00"), bad
    yield "letters beyond ASCII", get("/hälth".encode()), bad
    yield "escapes of no UTF-8", get(b"/%ff%fe%c0%80"), bad
    yield "a header in an escape", get(b"/x%0d%0aSet-Cookie:%20a=b"), bad
    yield "a header in a query", get(b"/health?a=%0d%0aSet-Cookie:%20a=b"), ok
    yield "a path of 8,000 letters", get(b"/" + b"a" * 8000), bad
    yield "a path of 9,000 letters", get(b"/" + b"a" * 9000), frozenset({414})
    yield "a query of 8,000 letters", get(b"/health?" + b"a" * 8000), ok
    yield "4,000 parameters", get(b"/health?" + b"&" * 4000), ok
    yield "a path upwards", get(b"/health/../../etc/passwd"), bad
    yield "a path upwards in escapes", get(b"/%2e%2e/%2e%2e/etc/passwd"), bad
    yield "a path of slashes", get(b"/" * 4000), bad
    yield "a fragment", get(b"/health#x"), bad | ok
    yield "empty lines before", b"\r\n\r\n" + get(), bad | ok
    yield "a megabyte of empty lines", b"\r\n" * 500_000, bad
    yield "TLS on a plain port", bytes.fromhex("16030100") + b"\x05\x01\0\0\1\3\3" + b"\x11" * 300, bad | CLOSED
    yield "SSH", b"SSH-2.0-x\r\n\r\n", bad
    yield "bare line feeds", get().replace(b"\r\n", b"\n"), bad | ok
    yield "bare carriage returns", get().replace(b"\r\n", b"\r"), bad | CLOSED


def _fields() -> Iterator[tuple[str, bytes, frozenset[int]]]:
    """Header fields."""
    ok, bad = FINE, REFUSED
    yield "250 fields", get(b"/health", *(b"a%d: b" % i for i in range(250))), ok
    yield "300 fields", get(b"/health", *(b"a%d: b" % i for i in range(300))), frozenset({431})
    yield "300 fields of one name", get(b"/health", *[b"a: b"] * 300), frozenset({431})
    yield "12,000 fields", get(b"/health", *[b"a:"] * 12_000), frozenset({431})
    yield "200 folded lines", get(b"/health", b"a: b", *[b" c"] * 200), ok | bad
    yield "20,000 folded lines", get(b"/health", b"a: b", *[b"\tc"] * 20_000), frozenset({431})
    yield "a field of 60 KB", get(b"/health", b"a: " + b"b" * 60_000), ok
    yield "a field of 64 KiB", get(b"/health", b"a: " + b"b" * 65_536), frozenset({431})
    yield "a name of 60 KB", get(b"/health", b"b" * 60_000 + b": a"), ok
    yield "a name with a blank", get(b"/health", b"a b: c"), bad
    yield "a blank before the colon", get(b"/health", b"a : c"), bad
    yield "no name", get(b"/health", b": c"), bad
    yield "no colon", get(b"/health", b"abc"), bad
    yield "a zero byte in a field", get(b"/health", b"a: b\0c"), bad
    yield "a carriage return in a field", get(b"/health", b"a: b\rc: d"), bad
    yield "bytes beyond ASCII in a field", get(b"/health", b"a: \xff\xfe"), ok
    yield "a name beyond ASCII", get(b"/health", b"\xc3\xa4: b"), bad
    yield "3,000 connection options", get(b"/health", b"Connection: " + b"a, " * 3000), ok
    yield "20,000 commas", get(b"/health", b"Accept: " + b"," * 20_000), ok
    yield "a request id of terminal codes", get(b"/health", b"x-request-id: \x1b[2J\xff"), ok | bad
    yield "a request id of 60 KB", get(b"/health", b"x-request-id: " + b"a" * 60_000), ok
    yield "a trace parent of 60 KB", get(b"/health", b"traceparent: " + b"a" * 60_000), ok
    yield "a forwarded address of terminal codes", get(b"/health", b"X-Forwarded-For: \x1b[2J, x"), ok | bad
    yield "a thousand forwarded addresses", get(b"/health", b"X-Forwarded-For: " + b"10.0.0.1, " * 5000), ok
    yield "a forwarded scheme", get(b"/health", b"X-Forwarded-Proto: javascript"), ok
    yield "a forwarded host", get(b"/health", b"X-Forwarded-Host: evil.example"), ok
    yield "another method by a header", get(b"/v1/models", b"X-HTTP-Method-Override: POST"), ok
    yield "a key of 60 KB", get(b"/v1/models", b"Authorization: Bearer " + b"k" * 60_000), ok
    yield "a form of load metrics", get(b"/health", b"endpoint-load-metrics-format: \x01"), ok | bad
    for value in (b"nan", b"-1", b"1e400", b"", b"0", b"1 1", b"0x10", b"inf"):
        yield f"a time limit of {value!r}", post(BODY, b"x-request-timeout: " + value), frozenset({400})
    for value in (b"-1", b"9" * 30, b"x", b"1.5", b"\xff"):
        yield f"a replica of {value!r}", post(BODY, b"x-data-parallel-rank: " + value), bad | ok
    for value in (b"websocket", b"h2c", b"TLS/1.0, HTTP/2.0", b"x" * 9000):
        lines = b"Connection: Upgrade", b"Upgrade: " + value
        yield f"an upgrade to {value[:20]!r}", get(b"/health", *lines), ok
        yield f"a body and an upgrade to {value[:20]!r}", post(BODY, *lines), ok
    ws = (
        b"Connection: keep-alive, Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: eA==",
    )
    yield "a web socket", get(b"/v1/realtime", *ws), bad
    yield (
        "settings of HTTP/2",
        get(b"/health", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"),
        ok,
    )


def _lengths() -> Iterator[tuple[str, bytes, frozenset[int]]]:
    """Bodies and what announces them."""
    ok, bad = FINE, REFUSED
    for value in (b"-1", b"+5", b"0x10", b"1e3", b"5, 6", b"", b"5 5", b"\xb2", b"1_0"):
        yield f"a length of {value!r}", post(BODY, b"Content-Length: " + value, length=False), bad
    yield "two lengths", post(BODY, b"Content-Length: 5"), bad
    yield "the same length twice", post(BODY, b"Content-Length: %d" % len(BODY)), ok | bad
    yield "a length of 4,000 digits", post(b"", b"Content-Length: " + b"9" * 4000, length=False), bad
    yield "a length of 18 digits", post(b"", b"Content-Length: " + b"9" * 18, length=False), frozenset({413})
    yield "a length without a body that is a GET's", get(b"/health", b"Content-Length: 0"), ok
    yield "no length", post(b"", length=False), bad
    yield "both lengths", post(BODY, b"Transfer-Encoding: chunked"), frozenset({400})
    yield "both lengths the other way", chunked(in_chunks(BODY, 9), b"Content-Length: 3"), frozenset({400})
    for value in (
        b"gzip, chunked",
        b"identity",
        b"chunked, chunked",
        b"x",
        b"chunked, gzip",
        b"\x0bchunked",
        b"chunkedx",
    ):
        yield f"a coding of {value!r}", post(in_chunks(BODY, 9), b"Transfer-Encoding: " + value, length=False), bad
    yield "a folded coding", post(in_chunks(BODY, 9), b"Transfer-Encoding:", b" chunked", length=False), ok | bad
    yield "a coding and a tab", post(in_chunks(BODY, 9), b"Transfer-Encoding:\tchunked\t", length=False), ok | bad
    yield "a coding with a parameter", post(in_chunks(BODY, 9), b"Transfer-Encoding: chunked;q=1", length=False), bad
    yield "a length and a tab", post(BODY, b"Content-Length:\t%d\t" % len(BODY), length=False), ok | bad
    yield (
        "a list of equal lengths",
        post(BODY, b"Content-Length: %d,%d" % (len(BODY), len(BODY)), length=False),
        ok | bad,
    )
    yield "a length and a coding by the name of an underscore", post(BODY, b"Transfer_Encoding: chunked"), ok | bad
    yield "two codings", chunked(in_chunks(BODY, 9), b"Transfer-Encoding: chunked"), bad | ok
    yield "a coding in capitals", post(in_chunks(BODY, 9), b"Transfer-Encoding: CHUNKED", length=False), ok


def _chunks() -> Iterator[tuple[str, bytes, frozenset[int]]]:
    """Chunked bodies."""
    ok, bad = FINE, REFUSED
    for size in (b"-1", b"0x5", b"+5", b"5 ", b" 5", b"g", b"f" * 21, b"", b"5_", b"\xff"):
        yield f"a chunk of {size!r}", chunked(size + b"\r\nabcde\r\n0\r\n\r\n"), bad
    yield "a chunk of 2^60", chunked(b"1" + b"0" * 15 + b"\r\nabcde\r\n"), bad | CLOSED
    yield "a chunk that is too long", chunked(b"3\r\nabcde\r\n0\r\n\r\n"), bad
    yield "an extension", chunked(b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)), ok
    yield "an extension of 100 KB", chunked(b"5;" + b"a" * 100_000 + b"\r\nabcde\r\n0\r\n\r\n"), bad
    yield "extensions on small chunks", chunked(b"1;aaaa=bbbbbbbb\r\n \r\n" * 3000 + b"0\r\n\r\n"), frozenset({400})
    yield "one-byte chunks", chunked(in_chunks(b" " * 20_000, 1)), frozenset({400})
    yield "chunks of 60 bytes", chunked(in_chunks(b" " * 60_000, 60)), frozenset({400})
    yield (
        "small chunks after a long one",
        chunked(in_chunks(b" " * 600_000, 600_000, b"") + in_chunks(b" " * 9000, 1)),
        frozenset({400}),
    )
    yield (
        "pairs of a long and small ones",
        chunked((in_chunks(b" " * 9000, 9000, b"") + in_chunks(b" " * 200, 1, b"")) * 20 + b"0\r\n\r\n"),
        frozenset({400}),
    )
    yield "one-byte chunks on an open path", chunked(in_chunks(b" " * 20_000, 1), target=b"/health"), bad
    yield "one-byte chunks on no path", chunked(in_chunks(b" " * 20_000, 1), target=b"/x"), bad
    yield (
        "one-byte chunks of a GET",
        get(b"/health", b"Transfer-Encoding: chunked") + in_chunks(b" " * 20_000, 1),
        ok | bad,
    )
    yield "chunks of 100 bytes", chunked(in_chunks(BODY[:-1] + b" " * 50_000 + b"}", 100)), ok
    yield "300 trailers", chunked(in_chunks(BODY, 99, b"0\r\n" + b"a: b\r\n" * 300 + b"\r\n")), frozenset({400})
    yield (
        "folded trailers",
        chunked(in_chunks(BODY, 99, b"0\r\na: b\r\n" + b" c\r\n" * 5000 + b"\r\n")),
        frozenset({400}),
    )
    yield (
        "extensions of 4 KB",
        chunked(in_chunks(b" " * 640_000, 64).replace(b"40\r\n", b"40;" + b"a" * 4000 + b"\r\n")),
        bad,
    )
    yield "a coding in a trailer", chunked(in_chunks(BODY, 99, b"0\r\nTransfer-Encoding: chunked\r\n\r\n")), ok | bad
    yield "a trailer with a length", chunked(in_chunks(BODY, 99, b"0\r\nContent-Length: 5\r\n\r\n")), ok | bad
    yield "a trailer with a key", chunked(in_chunks(BODY, 99, b"0\r\nx-api-key: k\r\n\r\n")), ok
    yield "a wrong trailer", chunked(in_chunks(BODY, 99, b"0\r\na b\r\n\r\n")), bad


def _contents() -> Iterator[tuple[str, bytes, frozenset[int]]]:
    """What bodies hold."""
    ok, bad = FINE, REFUSED
    yield "what waits for a word", post(BODY, b"Expect: 100-continue"), frozenset({100, 200})
    yield "what waits for another word", post(BODY, b"Expect: x"), ok | bad
    yield "a compressed body", post(BODY, b"Content-Encoding: gzip"), ok | bad
    for kind in (
        b"text/plain",
        b"multipart/form-data; boundary=x",
        b"application/x-www-form-urlencoded",
        b"",
        b"a" * 9000,
        b"application/jsonx",
        b"text/json",
        b"application/json, text/plain",
    ):
        yield f"a body of {kind[:40]!r}", post(BODY, b"Content-Type: " + kind), bad
    yield (
        "a body in UTF-16",
        post(BODY.decode().encode("utf-16"), b"Content-Type: application/json; charset=utf-16"),
        bad,
    )
    yield "a body of ten bytes of 100", post(BODY[:10]), bad
    yield "a body of zero bytes", post(b"\0" * 5000), bad
    yield "a deep body", post(b"[" * 100_000), bad
    yield "a deep body that ends", post(b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"), bad
    yield "a number of 5,000 digits", post(BODY[:-1] + b', "seed": ' + b"9" * 5000 + b"}"), bad
    yield "a name of 5,000 letters", post(BODY[:-1] + b', "' + b"a" * 5000 + b'": 1}'), bad | ok


def _forms() -> Iterator[tuple[str, bytes, frozenset[int]]]:
    """Forms, and what other methods and routes of OpenAI's API take."""
    ok, bad = FINE, REFUSED
    parts = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"a" * 9000 + b"\r\n--x--\r\n"
    form = b"Content-Type: multipart/form-data; boundary=x"
    for target in (
        b"/v1/audio/transcriptions",
        b"/v1/audio/translations",
        b"/v1/files",
        b"/v1/images/edits",
        b"/v1/uploads",
    ):
        yield f"a form to {target.decode()}", post(parts, form, target=target), frozenset({404})
    yield "a form to chat", post(parts, form), frozenset({400})
    bomb = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nb\r\n" * 20_000 + b"--x--\r\n"
    yield "a form of 20,000 parts", post(bomb, form, target=b"/v1/audio/transcriptions"), frozenset({404})
    yield "a form of 20,000 parts to chat", post(bomb, form), frozenset({400})
    yield "a boundary of 60 KB", post(parts, b"Content-Type: multipart/form-data; boundary=" + b"x" * 60_000), bad
    yield (
        "a range of 9,000 pieces",
        get(b"/openapi.json", b"Range: bytes=" + b"0-1," * 9000),
        ok | bad | frozenset({206}),
    )
    yield "9,000 entity tags", get(b"/openapi.json", b"If-None-Match: " + b'"a",' * 9000), ok | bad | frozenset({304})
    yield "9,000 languages", get(b"/health", b"Accept-Language: " + b"de;q=0.1," * 6000), ok
    yield "a body of a GET", get(b"/health", b"Content-Length: 60000") + b"x" * 60_000, ok
    yield (
        "a body of a HEAD",
        get(b"/health", b"Content-Length: 60000", b"Connection: close").replace(b"GET", b"HEAD") + b"x" * 60_000,
        ok | bad,
    )
    frames = b"\x81\x85\1\2\3\4abcde" * 3000
    yield (
        "frames of a web socket",
        get(b"/v1/chat/completions", b"Connection: Upgrade", b"Upgrade: websocket") + frames,
        bad,
    )
    yield "a speech", post(b'{"input": "a", "voice": "b"}', target=b"/v1/audio/speech"), frozenset({404})
    yield (
        "a batch of OpenAI's",
        post(b'{"input_file_id": "f", "endpoint": "/v1/chat/completions"}', target=b"/v1/batches"),
        frozenset({404}),
    )


def make_pipelines() -> Iterator[tuple[str, tuple[bytes, ...], frozenset[int], int]]:
    """Several requests on one connection, and some in pieces."""
    yield "three requests", (get() * 3,), FINE, 3
    yield "fifty requests", (get() * 50,), FINE, 50
    yield "a body and a request", (post(BODY) + get(),), FINE, 2
    yield "chunks and a request", (chunked(in_chunks(BODY, 9)) + get(),), FINE, 2
    yield "a request and no HTTP", (get() + b"\x16\x03\x01\r\n\r\n",), FINE, 2
    yield "a request and a long target", (get() + get(b"/" + b"a" * 9000),), FINE, 2
    yield "a request and a long head", (get() + get(b"/health", b"a: " + b"b" * 70_000),), FINE, 2
    yield "a request and many fields", (get() + get(b"/health", *[b"a:"] * 9000),), FINE, 2
    yield "a request and half of one", (get() + b"GET /hea",), FINE, 1
    yield "a request after its end", (get(b"/health", b"Connection: close") + get(),), FINE, 1
    yield "a body after an error", (post(b"x", b"Content-Type: text/plain") + get(),), REFUSED, 2
    yield "a request in a body", (post(get(b"/v1/models")) + get(),), REFUSED, 2
    head = get(host=b"127.0.0.1")
    yield "a head byte by byte", tuple(head[i : i + 1] for i in range(len(head))), FINE, 1
    yield "a body byte by byte", (post(BODY)[: -len(BODY)], *(BODY[i : i + 1] for i in range(len(BODY)))), FINE, 1
    data = in_chunks(BODY, 9)
    yield "chunks byte by byte", (chunked(b""), *(data[i : i + 1] for i in range(len(data)))), FINE, 1
    yield "two heads cut in the middle", (head[:9], head[9:] + head[:9], head[9:]), FINE, 2


def make_requests() -> Iterator[tuple[str, bytes, frozenset[int]]]:
    """All single requests: a name, what is sent, and the statuses of the answer."""
    for some in (_lines(), _fields(), _lengths(), _chunks(), _contents(), _forms()):
        yield from some
