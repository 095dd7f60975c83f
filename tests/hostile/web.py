"""An attacker's web server, and a trap on loopback that must never be asked anything."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from tests.hostile.app import HOST
from tests.traffic.server_process import free_port


def reply(body=b"", status="200 OK", **headers):
    lines = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


async def slow_head(writer):
    for byte in reply(b"x") * 50:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.1)


async def slow_body(writer):
    writer.write(reply(Content_Type="image/png"))
    while True:
        writer.write(b"\x89")
        await writer.drain()
        await asyncio.sleep(0.05)


async def silent(writer):
    await asyncio.sleep(30)


def endless(chunked):
    async def answer(writer):
        writer.write(reply(**({"Transfer_Encoding": "chunked"} if chunked else {})))
        block = bytes(1 << 16)
        while True:
            writer.write(b"10000\r\n" + block + b"\r\n" if chunked else block)
            await writer.drain()

    return answer


class Web:
    """Both servers, in a thread of their own.

    Args:
        good: bytes of an image that ``/good`` serves.
    """

    def __init__(self, good: bytes) -> None:
        self.port = free_port()
        self.trapped: list[bytes] = []
        self.asked: list[str] = []
        self.open = 0
        self.pages = {
            "good": reply(good, Content_Type="image/png"),
            "html": reply(b"<html>", Content_Type="text/html"),
            "unlabelled-html": reply(b"<html>"),
            "404": reply(status="404 Not Found"),
            "500": reply(status="500 Oops"),
            "gzip": reply(b"\x1f\x8b" + bytes(50), Content_Encoding="gzip"),
            "long": reply(Content_Length=1 << 40),
            "cut": reply(good[:30], Content_Length=len(good)),
            "garbage": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
            "huge-header": reply(b"x", X="a" * 300_000),
            "slow-head": slow_head,
            "slow-body": slow_body,
            "silent": silent,
            "endless": endless(False),
            "endless-chunked": endless(True),
            "loop": reply(status="302 Found", Location="/loop"),
            "4-hops": reply(status="302 Found", Location="/3-hops"),
            "3-hops": reply(status="302 Found", Location="/2-hops"),
            "2-hops": reply(status="302 Found", Location="/1-hop"),
            "1-hop": reply(status="302 Found", Location="/good"),
        }
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def url(self, page: str, host: str = "hostile.example") -> str:
        """Of a page; what follows ``to:`` is where it redirects to."""
        return f"http://{host}:{self.port}/{page}"

    def close(self) -> None:
        """Ends both."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        outside = await asyncio.start_server(self._serve, HOST, self.port)
        inside = await asyncio.start_server(self._trap, "127.0.0.1", self.port)
        async with outside, inside:
            self._ready.set()
            await self._stop.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _trap(self, reader, writer):
        self.trapped.append(await reader.read(1000))
        writer.close()

    async def _serve(self, reader, writer):
        self.open += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            page = head.split()[1].decode()[1:]
            self.asked.append(page)
            if page.startswith("to:"):
                writer.write(reply(status="302 Found", Location=bytes.fromhex(page[3:]).decode()))
            elif callable(self.pages.get(page)):
                await self.pages[page](writer)
            else:
                writer.write(self.pages.get(page, reply(status="404 Not Found")))
            await writer.drain()
        self.open -= 1
        writer.close()
