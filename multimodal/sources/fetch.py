"""Fetches a URL for a stranger: the address that was checked is the address that is connected to."""

from __future__ import annotations

import asyncio
import functools
import mmap
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urljoin

import httpx

from trencadis.core.errors import BadRequest, Forbidden, TooLarge, Unprocessable, UnsupportedMedia
from trencadis.multimodal.sources.addresses import AddressRules, WebUrl, parse_url

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> numeric addresses; raises OSError where there are none."""

REDIRECTS = (301, 302, 303, 307, 308)
MAX_ADDRESSES = 3
"""Addresses of one host that are tried, IPv4 first."""
UNTYPED = ("application/octet-stream", "binary/octet-stream", "application/mp4", "application/x-binary")
"""Labels of files whose server does not know what they are, beside image/* and video/*."""
_ABSOLUTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")
NOT_ALLOWED = "The address is not allowed by this server."
HEADERS = {
    "User-Agent": "trencadis",
    # Servers that negotiate would answer image/* with AVIF.
    "Accept": "image/jpeg, image/png, image/webp, image/gif, image/bmp, */*;q=0.1",
    "Accept-Encoding": "identity",
    "Connection": "close",
}


class Fetcher:
    """Downloads over http and https under the operator's rules.

    One connection serves one request: no cookies, no proxies from the environment, no reuse of a connection whose
    certificate was checked for another name.

    Args:
        rules: hosts and addresses that may be reached.
        max_bytes: of a body.
        timeout: seconds from the look-up of the name to the last byte, redirects included.
        max_redirects: followed by hand; each target is parsed, resolved and checked afresh.
        resolver: replaces the system's, for tests.
    """

    def __init__(
        self,
        rules: AddressRules,
        max_bytes: int,
        timeout: float,
        max_redirects: int = 3,
        resolver: Resolver | None = None,
    ) -> None:
        self.rules = rules
        self.max_bytes = max_bytes
        self.timeout = timeout
        self.max_redirects = max_redirects
        self._resolve = resolver or self._system_resolver
        # The event loop's own pool would be filled by names whose servers never answer.
        self._names = ThreadPoolExecutor(32, thread_name_prefix="names")

    async def get(self, url: str) -> bytes:
        """The body behind ``url``.

        Raises:
            BadRequest: a malformed URL.
            Forbidden: a host or an address, of it or of a redirect, that the rules exclude.
            TooLarge: more than ``max_bytes``.
            UnsupportedMedia: a content type that is no image's.
            Unprocessable: no such host, no connection, a status but 200, too many redirects, or out of time.
        """
        try:
            async with asyncio.timeout(self.timeout):
                return await self._follow(parse_url(url))
        except TimeoutError:
            raise Unprocessable(f"The URL did not answer in full within {self.timeout:g} s.") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
            raise Unprocessable("The URL could not be fetched.") from None

    def close(self) -> None:
        """Ends the threads that look names up."""
        self._names.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, url: WebUrl) -> bytes:
        for _ in range(self.max_redirects + 1):
            found = await self._ask(url)
            if isinstance(found, bytes):
                return found
            url = _redirect(url, found)
        raise Unprocessable("The URL redirects too often.")

    async def _ask(self, url: WebUrl) -> bytes | str:
        """The body, or the Location of a redirect."""
        addresses = await self._allowed_addresses(url)
        for i, address in enumerate(addresses):
            try:
                return await self._exchange(url, address)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if i + 1 == len(addresses):
                    raise
        raise Unprocessable("The URL's host was not found.")

    async def _allowed_addresses(self, url: WebUrl) -> list[str]:
        """The addresses of the host; all of them must be admissible, so that an attacker cannot mix them."""
        if not self.rules.allows_host(url.host):
            raise Forbidden(NOT_ALLOWED)
        try:
            found = list(dict.fromkeys(await self._resolve(url.host, url.port)))
        except (OSError, UnicodeError):
            raise Unprocessable("The URL's host was not found.") from None
        if not all(self.rules.allows_address(url.host, a) for a in found):
            raise Forbidden(NOT_ALLOWED)
        return sorted(found, key=lambda a: ":" in a)[:MAX_ADDRESSES]

    async def _system_resolver(self, host: str, port: int) -> list[str]:
        look = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        answers = await asyncio.get_running_loop().run_in_executor(self._names, look)
        return [str(a[4][0]) for a in answers]

    async def _exchange(self, url: WebUrl, address: str) -> bytes | str:
        numeric = f"[{address}]" if ":" in address else address
        request = httpx.Request(
            "GET",
            f"{url.scheme}://{numeric}:{url.port}{url.target}",
            headers={**HEADERS, "Host": url.authority},
            extensions={
                "sni_hostname": url.host,
                "timeout": {"connect": self.timeout / 2, "read": None, "write": None, "pool": None},
            },
        )
        async with httpx.AsyncHTTPTransport(verify=_tls(), trust_env=False, retries=0) as wire:
            response = await wire.handle_async_request(request)
            try:
                if response.status_code in REDIRECTS and "location" in response.headers:
                    return str(response.headers["location"])
                if response.status_code != 200:
                    raise Unprocessable(f"The URL answered with status {response.status_code}.")
                return await self._body(response)
            finally:
                await response.aclose()

    async def _body(self, response: httpx.Response) -> bytes:
        check_content_type(response.headers.get("content-type", ""))
        if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise Unprocessable("The URL answered with a compressed body, which was not asked for.")
        length = response.headers.get("content-length", "")
        if length.isdigit() and len(length) < 20 and int(length) > self.max_bytes:
            raise TooLarge(f"The URL's body is larger than {self.max_bytes} bytes.")
        # Pages of an anonymous map cost nothing until they are written, and go back at once; a growing array moves.
        with mmap.mmap(-1, self.max_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as body:
            async for chunk in response.aiter_raw():
                if body.tell() + len(chunk) > self.max_bytes:
                    raise TooLarge(f"The URL's body is larger than {self.max_bytes} bytes.")
                body.write(chunk)
            return body[: body.tell()]


def check_content_type(label: str) -> None:
    """Refuses what its sender calls neither an image nor a video nor plain bytes; the bytes decide the rest.

    Labels are often wrong about the format (a WebP file called image/jpeg), but a page of text is not what was meant.

    Raises:
        UnsupportedMedia: ``label`` is another type.
    """
    kind = label.partition(";")[0].strip().lower()
    if kind and not kind.startswith(("image/", "video/")) and kind not in UNTYPED:
        raise UnsupportedMedia("The content type is not supported; send JPEG, PNG, WebP, GIF, BMP or a video.")


def _redirect(url: WebUrl, location: str) -> WebUrl:
    """The next URL. A garbled or foreign target is the remote's fault, but told as a refusal: it may be an attack."""
    if any(c <= " " or c == "\\" for c in location):
        raise Forbidden("The URL redirects to a malformed address.")
    try:
        # urljoin reads "http:///x" as a path of the same host; what has a scheme or host of its own is parsed as it is.
        if location.startswith("//"):
            location = f"{url.scheme}:{location}"
        return parse_url(location if _ABSOLUTE.match(location) else urljoin(str(url), location))
    except (BadRequest, ValueError):
        raise Forbidden("The URL redirects to a malformed address.") from None


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)
