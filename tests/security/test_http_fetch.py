"""Downloads for a stranger: rebinding, redirects, odd answers, slow and endless ones."""

import asyncio
import contextlib
import ssl
import time
import tracemalloc

import httpx
import pytest

from tests.hostile.refusals import PARAM, judged, refusal
from trencadis.core.errors import TrencadisError
from trencadis.multimodal.sources import http_fetch
from trencadis.multimodal.sources.media_loader import MediaLoader


async def refused(loader, source, status, *secrets):
    with pytest.raises(TrencadisError) as caught:
        await loader.load(source, PARAM)
    return judged(caught.value, status, *secrets)


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
        async with serving(answer(b"image", Set_Cookie="a=b")) as (port, seen):
            loader = MediaLoader(LOCAL)
            url = f"http://127.0.0.1:{port}/a%20b.png?q#frag"
            assert [await loader.load(url, PARAM) for _ in range(2)] == [b"image"] * 2
            return port, seen

    port, seen = asyncio.run(main())
    head = seen[0].decode().lower().split("\r\n")
    assert head[0] == "get /a%20b.png?q http/1.1" and f"host: 127.0.0.1:{port}" in head
    assert "accept-encoding: identity" in head and not any(
        "cookie" in h for h in seen[1].decode().lower().split("\r\n")
    )


def test_the_checked_address_is_the_one_that_is_connected_to(monkeypatch):
    requested = []

    class Wire:
        def __init__(self, **options):
            assert options["trust_env"] is False

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

        async def handle_async_request(self, request):
            requested.append((request.url.host, request.headers["host"], request.extensions["sni_hostname"]))
            return httpx.Response(200, stream=httpx.ByteStream(b"image"))

    answers = iter([["93.184.215.14"], ["127.0.0.1"], ["10.0.0.1", "93.184.215.14"]])

    async def resolver(host, port):
        return next(answers)

    monkeypatch.setattr(httpx, "AsyncHTTPTransport", Wire)
    loader = MediaLoader(resolver=resolver)
    assert asyncio.run(loader.load("https://rebind.example/", PARAM)) == b"image"
    assert requested == [("93.184.215.14", "rebind.example", "rebind.example")]
    refusal(loader, "https://rebind.example/", 403, "rebind", "127.0.0.1")
    refusal(loader, "https://rebind.example/", 403, "rebind", "10.0.0.1")
    assert len(requested) == 1


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
        await refused(loader, f"https://pictures.example:{port}/", 422, "images")
        server.close()

    asyncio.run(main())
    assert b"pictures.example" in hello[0]
    assert http_fetch._tls_context().check_hostname and http_fetch._tls_context().verify_mode == ssl.CERT_REQUIRED


def test_redirects_are_followed_by_hand():
    async def reply(request, writer):
        hop = int(request.split()[1].rsplit(b"/", 1)[1])
        writer.write(answer(b"image") if hop == 3 else answer(status="302 Found", Location=f"{hop + 1}"))

    async def main():
        async with serving(reply) as (port, _):
            assert await MediaLoader(LOCAL).load(f"http://127.0.0.1:{port}/x/0", PARAM) == b"image"
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

    monkeypatch.setattr(http_fetch.Fetcher, "_exchange", hop)
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
def test_answers_that_are_no_image(name):
    async def main():
        async with serving(ANSWERS[name]) as (port, _):
            await refused(MediaLoader(LOCAL), f"http://127.0.0.1:{port}/", 422, "127.0.0.1", str(port))

    asyncio.run(main())


@pytest.mark.parametrize("label", ["text/html; charset=utf-8", "application/json", "image", "audio/mpeg"])
def test_answers_of_other_types_are_not_read(label):
    async def reply(request, writer):
        writer.write(answer(b"x" * 100, Content_Type=label, Content_Length=1 << 20))
        await writer.drain()
        await asyncio.sleep(5)

    async def main():
        async with serving(reply) as (port, _):
            start = time.monotonic()
            await refused(MediaLoader(LOCAL), f"http://127.0.0.1:{port}/", 415, "127.0.0.1", label)
            return time.monotonic() - start

    assert asyncio.run(main()) < 4


@pytest.mark.parametrize("label", ["", "image/jpeg", "IMAGE/png; q=1", "video/mp4", "binary/octet-stream"])
def test_answers_of_images_whatever_the_format_is_called(label):
    async def main():
        async with serving(answer(b"x", Content_Type=label)) as (port, _):
            assert await MediaLoader(LOCAL).load(f"http://127.0.0.1:{port}/", PARAM) == b"x"

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
