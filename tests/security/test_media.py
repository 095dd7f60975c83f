"""Addresses, paths and data URLs that a stranger may send."""

import asyncio
import base64
import contextlib
import os
import ssl
import time
import tracemalloc
from ipaddress import ip_address

import httpx
import pytest

from trencadis.core.errors import TrencadisError
from trencadis.multimodal import fetch
from trencadis.multimodal.addresses import AddressRules, is_public, parse_url
from trencadis.multimodal.media import MediaLoader, _read_below

PARAM = "messages[0].content[1]"


def refusal(loader, source, status, *secrets):
    """The message of the typed error that ``source`` gets; it is short and repeats none of ``secrets``."""
    with pytest.raises(TrencadisError) as caught:
        asyncio.run(loader.load(source, PARAM))
    return judged(caught.value, status, *secrets)


def judged(error, status, *secrets):
    assert (error.status, error.param) == (status, PARAM), error
    assert 0 < len(error.message) < 200
    assert not [s for s in secrets if s and s in error.message]
    assert error.__suppress_context__ or error.__context__ is None
    return error.message


async def refused(loader, source, status, *secrets):
    with pytest.raises(TrencadisError) as caught:
        await loader.load(source, PARAM)
    return judged(caught.value, status, *secrets)


@pytest.fixture
def no_connection(monkeypatch):
    async def fail(*_):
        pytest.fail("connected")

    monkeypatch.setattr(fetch.Fetcher, "_exchange", fail)


FORBIDDEN = """127.0.0.1 127.1 2130706433 0x7f000001 0x7f.1 0177.0.0.1 017700000001 0 0.0.0.0 localhost localhost.
LOCALHOST [::1] [::] [0:0:0:0:0:0:0:1] [::ffff:127.0.0.1] [::ffff:7f00:1] [::127.0.0.1] [64:ff9b::7f00:1]
[64:ff9b:1::1] [2002:7f00:1::] [2002:a9fe:a9fe::1] [2001:0:4136:e378:8000:63bf:80ff:fffe] [2001:db8::1] [fe80::1]
[fc00::1] [fd00:ec2::254] [fec0::1] [ff02::1] [2606:4700::5efe:a00:1] [100::1] [4000::1]
169.254.169.254 10.0.0.1 172.16.5.4 192.168.1.1 100.64.0.1 192.0.0.8 192.0.2.1 192.88.99.1 198.18.0.1 203.0.113.9
224.0.0.1 240.0.0.1 255.255.255.255 １２７.０.０.１ ①②⑦.⓪.⓪.① 127。0。0。1 ｌｏｃａｌｈｏｓｔ""".split()  # noqa: SIM905


@pytest.mark.parametrize("host", FORBIDDEN)
def test_private_addresses_in_every_spelling(no_connection, host):
    for url in (f"http://{host}/secret.png", f"HTTPS://{host}:8443?x"):
        refusal(MediaLoader(), url, 403, host, "secret")


MALFORMED = [
    "http://user@127.0.0.1/", "http://a:b@93.184.215.14/", "http://93.184.215.14\\@127.0.0.1/", "http:\\\\127.0.0.1/",
    "http://127.0.0.1%2f@example.com/", "http:///path", "http://", "http://?x", "http://#x", "http:/127.0.0.1/",
    "http:", "http://93.184.215.14:0/", "http://93.184.215.14:65536/", "http://93.184.215.14:99999999999/",
    "http://h:80:80/",
    "http://h:/", "http://h:-1/", "http://[::1/", "http://::1/", "http://[::1]x/", "http://[fe80::1%25eth0]/",
    "http://[1.2.3.4]/", "http://exa mple/", "http://exa\tmple/", "http://example\r\nHost: x/", "http://example/\0",
    "http://example/a b", "http://example/a\\b", "http://example/\u2028", "http://.../", "http://.a/", "http://a..b/", "http://-a/",
    "http://" + "a" * 64 + "/", "http://" + "a." * 130 + "b/", "http://xn--\u00fc/", "http://example.com,evil.com/",
    "http://example.com/" + "a" * 9000, "http://ex%61mple/", "http://\u202eexample/",
]  # fmt: skip


@pytest.mark.parametrize("url", MALFORMED)
def test_malformed_urls(no_connection, url):
    refusal(MediaLoader(), url, 400, "127.0.0.1", "93.184", "example")


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "gopher://a", "jar:http://a", "C:\\x.png", "/etc/passwd", "", " http://a/"]
)
def test_other_schemes(no_connection, url):
    assert refusal(MediaLoader(), url, 400) == "The URL must be either a HTTP, data or file URL."


def test_parsed_urls():
    url = parse_url("HTTPS://Bücher.Example.:8443?q=1#frag")
    assert (url.scheme, url.host, url.port, url.target) == ("https", "xn--bcher-kva.example", 8443, "/?q=1")
    assert url.authority == "xn--bcher-kva.example:8443"
    assert str(parse_url("http://[2606:4700::6810:84E5]:80/a")) == "http://[2606:4700::6810:84e5]/a"


@pytest.mark.parametrize(
    "address",
    ["93.184.215.14", "8.8.8.8", "2606:4700::6810:84e5", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808"],
)
def test_public_addresses_are_public(address):
    assert is_public(ip_address(address))


def test_hosts_that_are_not_listed_are_not_even_looked_up():
    async def resolver(host, port):
        pytest.fail("looked up")

    refusal(MediaLoader(["a.example"], resolver=resolver), "http://b.example/", 403, "b.example")


def test_lists_of_hosts():
    rules = AddressRules.of(["pictures.example", ".corp.example", "169.254.169.254", "[::1]"])
    assert rules.lists("pictures.example") and rules.lists("a.corp.example")
    assert not any(map(rules.lists, ["corp.example", "evilpictures.example", "a.pictures.example", "xcorp.example"]))
    assert rules.admits("pictures.example", "10.0.0.1") and rules.admits("::1", "::1")
    assert not rules.admits("pictures.example", "169.254.169.254")
    assert not rules.admits("pictures.example", "::ffff:169.254.169.254")
    assert not rules.admits("pictures.example", "fe80::1%eth0")
    assert not rules.admits("pictures.example", "garbage")
    assert rules.admits("169.254.169.254", "169.254.169.254")
    assert not rules.admits("other.example", "8.8.8.8")
    assert AddressRules.of([]).admits("any.example", "8.8.8.8")


def answer(body=b"", status="200 OK", **headers):
    lines = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


@contextlib.asynccontextmanager
async def serving(reply):
    """A server on 127.0.0.1; ``reply`` is bytes, or a coroutine (request, writer). Yields (port, requests seen)."""
    seen = []

    async def handle(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            if callable(reply):
                await reply(seen[-1], writer)
            else:
                writer.write(reply)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        server.close()


LOCAL = ["127.0.0.1"]


def test_a_listed_host_is_fetched_with_plain_headers(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def main():
        async with serving(answer(b"picture", Set_Cookie="a=b")) as (port, seen):
            loader = MediaLoader(LOCAL)
            url = f"http://127.0.0.1:{port}/a%20b.png?q#frag"
            assert [await loader.load(url, PARAM) for _ in range(2)] == [b"picture"] * 2
            return port, seen

    port, seen = asyncio.run(main())
    head = seen[0].decode().lower().split("\r\n")
    assert head[0] == "get /a%20b.png?q http/1.1" and f"host: 127.0.0.1:{port}" in head
    assert "accept-encoding: identity" in head and not any(
        "cookie" in h for h in seen[1].decode().lower().split("\r\n")
    )


def test_the_checked_address_is_the_one_that_is_connected_to(monkeypatch):
    asked = []

    class Wire:
        def __init__(self, **options):
            assert options["trust_env"] is False

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

        async def handle_async_request(self, request):
            asked.append((request.url.host, request.headers["host"], request.extensions["sni_hostname"]))
            return httpx.Response(200, stream=httpx.ByteStream(b"picture"))

    answers = iter([["93.184.215.14"], ["127.0.0.1"], ["10.0.0.1", "93.184.215.14"]])

    async def resolver(host, port):
        return next(answers)

    monkeypatch.setattr(httpx, "AsyncHTTPTransport", Wire)
    loader = MediaLoader(resolver=resolver)
    assert asyncio.run(loader.load("https://rebind.example/", PARAM)) == b"picture"
    assert asked == [("93.184.215.14", "rebind.example", "rebind.example")]
    refusal(loader, "https://rebind.example/", 403, "rebind", "127.0.0.1")
    refusal(loader, "https://rebind.example/", 403, "rebind", "10.0.0.1")
    assert len(asked) == 1


def test_a_name_is_resolved_once_and_never_by_the_client(monkeypatch):
    looked = []
    plain = asyncio.BaseEventLoop.getaddrinfo

    async def spy(self, host, *args, **kwargs):
        looked.append(host if isinstance(host, str) else host.decode())
        return await plain(self, host, *args, **kwargs)

    calls = []

    async def resolver(host, port):
        calls.append(host)
        return ["127.0.0.1"]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", spy)

    async def main():
        async with serving(answer(b"x")) as (port, seen):
            looked.clear()
            loader = MediaLoader(["pictures.example"], resolver=resolver)
            await loader.load(f"http://pictures.example:{port}/", PARAM)
            assert f"Host: pictures.example:{port}".encode() in seen[0]

    asyncio.run(main())
    assert calls == ["pictures.example"] and set(looked) <= {"127.0.0.1"}


def test_tls_names_the_host_and_verifies_it():
    hello = []

    async def main():
        async def handle(reader, writer):
            hello.append(await reader.read(2000))
            writer.close()

        async def resolver(host, port):
            return ["127.0.0.1"]

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        loader = MediaLoader(["pictures.example"], resolver=resolver)
        await refused(loader, f"https://pictures.example:{port}/", 422, "pictures")
        server.close()

    asyncio.run(main())
    assert b"pictures.example" in hello[0]
    assert fetch._tls().check_hostname and fetch._tls().verify_mode == ssl.CERT_REQUIRED


def test_redirects_are_followed_by_hand():
    async def reply(request, writer):
        hop = int(request.split()[1].rsplit(b"/", 1)[1])
        writer.write(answer(b"picture") if hop == 3 else answer(status="302 Found", Location=f"{hop + 1}"))

    async def main():
        async with serving(reply) as (port, _):
            assert await MediaLoader(LOCAL).load(f"http://127.0.0.1:{port}/x/0", PARAM) == b"picture"
            await refused(MediaLoader(LOCAL, max_redirects=2), f"http://127.0.0.1:{port}/x/0", 422, "127.0.0.1")

    asyncio.run(main())


@pytest.mark.parametrize(
    "target",
    [
        "http://localhost/", "//localhost/x", "http://169.254.169.254/latest", "http://[::1]/", "http://2130706433/",
        "file:///etc/passwd", "ftp://127.0.0.1/", "data:image/png;base64,AAAA", "http://127.0.0.1\\@evil/",
        "http://u@127.0.0.1/", "http://127.0.0.1:0/", "http://[", "http:///x",
    ],
)  # fmt: skip
@pytest.mark.parametrize("status", ["301 Moved", "307 Temporary"])
def test_redirects_to_what_is_not_allowed(target, status):
    async def main():
        async with serving(answer(status=status, Location=target)) as (port, seen):
            await refused(MediaLoader(LOCAL), f"http://127.0.0.1:{port}/", 403, "127.0.0.1", "localhost", "169.254")
            assert len(seen) == 1

    asyncio.run(main())


def test_redirect_from_a_public_name_to_a_private_address(monkeypatch):
    async def resolver(host, port):
        return {"public.example": ["93.184.215.14"], "inside.example": ["10.1.2.3"]}[host]

    hops = []

    async def hop(self, url, address):
        hops.append(address)
        return "http://inside.example/admin"

    monkeypatch.setattr(fetch.Fetcher, "_exchange", hop)
    refusal(MediaLoader(resolver=resolver), "http://public.example/", 403, "inside", "public", "10.1")
    assert hops == ["93.184.215.14"]


def test_redirect_loops_end():
    async def main():
        async with serving(answer(status="302 Found", Location="/again")) as (port, seen):
            await refused(MediaLoader(LOCAL), f"http://127.0.0.1:{port}/", 422, "127.0.0.1")
            assert len(seen) == 4

    asyncio.run(main())


ANSWERS = {
    "404": answer(status="404 Not Found"),
    "500": answer(status="500 Oops", Content_Length=0),
    "204": answer(status="204 No Content"),
    "partial": answer(b"x", status="206 Partial"),
    "redirect without a target": answer(status="302 Found"),
    "short body": answer(b"abc", Content_Length=10),
    "garbage": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "nothing": b"",
    "compressed": answer(b"\x1f\x8b", Content_Encoding="gzip"),
    "bad length": answer(b"abc", Content_Length="-5"),
    "huge headers": answer(b"abc", X="a" * 300_000),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_are_no_picture(name):
    async def main():
        async with serving(ANSWERS[name]) as (port, _):
            await refused(MediaLoader(LOCAL), f"http://127.0.0.1:{port}/", 422, "127.0.0.1", str(port))

    asyncio.run(main())


def test_refused_connections_and_unknown_names():
    async def unknown(host, port):
        raise OSError("Name or service not known: hidden.example")

    async def empty(host, port):
        return []

    async def main():
        async with serving(b"") as (port, _):
            pass
        await refused(MediaLoader(LOCAL), f"http://127.0.0.1:{port}/", 422, "127.0.0.1")
        await refused(MediaLoader(resolver=unknown), "http://hidden.example/", 422, "hidden")
        await refused(MediaLoader(resolver=empty), "http://hidden.example/", 422, "hidden")

    asyncio.run(main())


def test_the_next_address_is_tried_where_one_refuses():
    async def resolver(host, port):
        return ["::1", "127.0.0.2", "127.0.0.1"]

    async def main():
        async with serving(answer(b"x")) as (port, _):
            loader = MediaLoader(["two.example"], resolver=resolver)
            return await loader.load(f"http://two.example:{port}/", PARAM)

    assert asyncio.run(main()) == b"x"


async def drip_head(request, writer):
    for byte in answer(b"x") * 100:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.05)


async def drip_body(request, writer):
    writer.write(answer())
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def drip_redirects(request, writer):
    await asyncio.sleep(0.15)
    writer.write(answer(status="302 Found", Location="/"))


async def silent(request, writer):
    await asyncio.sleep(30)


@pytest.mark.parametrize("reply", [drip_head, drip_body, drip_redirects, silent])
def test_one_deadline_for_everything(reply):
    async def main():
        async with serving(reply) as (port, _):
            start = time.monotonic()
            await refused(MediaLoader(LOCAL, timeout=0.3), f"http://127.0.0.1:{port}/", 422, "127.0.0.1")
            return time.monotonic() - start

    assert 0.2 < asyncio.run(main()) < 2


def test_a_name_that_never_resolves_meets_the_deadline():
    async def resolver(host, port):
        await asyncio.sleep(30)
        return []

    start = time.monotonic()
    refusal(MediaLoader(timeout=0.1, resolver=resolver), "http://tarpit.example/", 422, "tarpit")
    assert time.monotonic() - start < 2


def endless(chunked):
    async def reply(request, writer):
        writer.write(answer(**({"Transfer_Encoding": "chunked"} if chunked else {})))
        block = b"x" * 65536
        while True:
            writer.write(b"10000\r\n" + block + b"\r\n" if chunked else block)
            await writer.drain()

    return reply


@pytest.mark.parametrize("chunked", [False, True])
def test_endless_bodies_stop_at_the_cap(chunked):
    async def main():
        async with serving(endless(chunked)) as (port, _):
            tracemalloc.start()
            await refused(MediaLoader(LOCAL, max_bytes=1 << 20), f"http://127.0.0.1:{port}/", 413, "127.0.0.1")
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak

    assert asyncio.run(main()) < 8 << 20


def test_a_stated_length_above_the_cap_is_refused_unread():
    async def reply(request, writer):
        writer.write(answer(Content_Length=1 << 40))
        await writer.drain()
        await asyncio.sleep(30)

    async def main():
        async with serving(reply) as (port, _):
            start = time.monotonic()
            await refused(MediaLoader(LOCAL), f"http://127.0.0.1:{port}/", 413, "127.0.0.1")
            return time.monotonic() - start

    assert asyncio.run(main()) < 2


def test_a_body_of_exactly_the_cap_is_taken():
    async def main():
        async with serving(answer(b"x" * 1000)) as (port, _):
            url = f"http://127.0.0.1:{port}/"
            assert len(await MediaLoader(LOCAL, max_bytes=1000).load(url, PARAM)) == 1000
            await refused(MediaLoader(LOCAL, max_bytes=999), url, 413)

    asyncio.run(main())


def test_downloads_are_bounded():
    now = most = 0

    async def reply(request, writer):
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.03)
        now -= 1
        writer.write(answer(b"x"))

    async def main():
        async with serving(reply) as (port, _):
            loader = MediaLoader(LOCAL, concurrent=3)
            await asyncio.gather(*(loader.load(f"http://127.0.0.1:{port}/", PARAM) for _ in range(12)))

    asyncio.run(main())
    assert most == 3


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "media"
    (root / "sub").mkdir(parents=True)
    (root / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "media-evil").mkdir()
    (tmp_path / "media-evil" / "x").write_bytes(b"outside")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to(tmp_path)
    (root / "in").symlink_to(root / "a b.png")
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "fifo")
    return root


def test_files_under_the_folder_are_read(tree):
    loader = MediaLoader(allowed_local_path=tree)
    for path in ("a%20b.png", "sub/../a b.png", "in", "./a%20b.png", "sub/%2e%2e/a%20b.png"):
        for host in ("", "localhost"):
            assert asyncio.run(loader.load(f"file://{host}{tree}/{path}", PARAM)) == b"inside"
    linked = tree.parent / "link"
    linked.symlink_to(tree)
    assert asyncio.run(MediaLoader(allowed_local_path=linked).load(f"file://{linked}/in", PARAM)) == b"inside"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("../secret", 403), ("sub/../../secret", 403), ("%2e%2e/secret", 403), ("..%2fsecret", 403), ("out", 403),
        ("up/secret", 403), ("up/media/../secret", 403), ("../media-evil/x", 403), ("../missing", 403), ("loop", 403),
        ("/../../../../../../../etc/passwd", 403), ("missing", 422), ("sub", 422), ("", 422), ("fifo", 422),
        ("a b.png/x", 422), ("a%00b", 400), ("in?x", 400),
    ],
)  # fmt: skip
def test_paths_outside_and_odd_files(tree, path, status):
    refusal(MediaLoader(allowed_local_path=tree), f"file://{tree}/{path}", status, str(tree), "secret")


def test_files_of_other_hosts_or_without_permission(tree):
    refusal(MediaLoader(allowed_local_path=tree), f"file://evil{tree}/in", 400, "evil")
    refusal(MediaLoader(allowed_local_path=tree), "file:in", 400)
    refusal(MediaLoader(), f"file://{tree}/in", 403, str(tree))
    refusal(MediaLoader(allowed_local_path=tree / "none"), f"file://{tree}/in", 403, str(tree))


def test_large_files(tree):
    (tree / "big").write_bytes(bytes(1001))
    assert len(asyncio.run(MediaLoader((), tree, 1001).load(f"file://{tree}/big", PARAM))) == 1001
    refusal(MediaLoader((), tree, 1000), f"file://{tree}/big", 413, str(tree))


@pytest.mark.parametrize("parts", [("out",), ("up", "secret")])
def test_a_link_put_there_after_the_check_is_not_followed(tree, parts):
    with pytest.raises(OSError):
        _read_below(tree, parts, 100)


def data(text, label="image/png;base64"):
    return f"data:{label},{text}"


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 1000, 3 << 20, (3 << 20) + 1])
def test_base64_is_decoded(size):
    raw = os.urandom(size)
    text = base64.b64encode(raw).decode()
    loader = MediaLoader()
    assert asyncio.run(loader.load(data(text), PARAM)) == raw
    assert asyncio.run(loader.load(data(text, "text/html;charset=utf-8;BASE64"), PARAM)) == raw
    wrapped = "\r\n ".join(text[i : i + 76] for i in range(0, len(text), 76))
    assert asyncio.run(loader.load(data(wrapped), PARAM)) == raw


@pytest.mark.parametrize(
    "url",
    [
        data("QUJ"), data("QQ"), data("QQ="), data("QQ==="), data("QQ==QQ=="), data("Q=Q="), data("===="), data("=QQQ"),
        data("QU-_"), data("QUJ%44"), data("QUJ\u00e9"), data("QUJ\0"), data("QUJD!!!!"), data("A" * 70000 + "*AAA"),
        data("A" * ((1 << 20) - 4) + "QQ==" + "AAAA"), data("QUJD", "image/png"), data("QUJD", ""), "data:",
        "data:;base64", data("QUJD", "image/png;base64;x"), data("QUJD", "image/png;" + "x" * 2000 + ";base64"),
    ],
    ids=lambda u: u[:30],
)  # fmt: skip
def test_wrong_base64(url):
    refusal(MediaLoader(), url, 400, "QUJ")


def test_long_data_urls_stop_at_the_cap():
    text = "A" * (40 << 20)
    tracemalloc.start()
    refusal(MediaLoader(max_bytes=1 << 20), data(text), 413)
    peak = tracemalloc.get_traced_memory()[1] - len(text)
    tracemalloc.stop()
    assert peak < 8 << 20
    assert len(asyncio.run(MediaLoader(max_bytes=3000).load(data("A" * 4000), PARAM))) == 3000
    refusal(MediaLoader(max_bytes=2999), data("A" * 4000), 413)
