"""Downloads a client's URL, connecting only to the address that was checked, by rules for network addresses."""

from __future__ import annotations

import asyncio
import functools
import mmap
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urljoin

import httpx
import idna

from trencadis.core.errors import BadRequest, Forbidden, TooLarge, Unprocessable, UnsupportedMedia

Address = IPv4Address | IPv6Address

MAX_URL = 8192
UNROUTED = tuple(
    ip_network(n) for n in ("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15")
)
GLOBAL6 = IPv6Network("2000::/3")
UNROUTED6 = tuple(IPv6Network(n) for n in ("2001::/23", "2001:db8::/32", "3fff::/20"))
NAT64 = IPv6Network("64:ff9b::/96")

_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE | re.DOTALL)
_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@%]+)(?::([0-9]{1,5}))?")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")
_ODD = re.compile(r"[\x00-\x20\x7f-\x9f\\\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class WebUrl:
    """A parsed http(s) URL: ``host`` is lower-case ASCII without brackets or final dot, ``target`` starts with /."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def default_port(self) -> int:
        """Default port of the scheme."""
        return 443 if self.scheme == "https" else 80

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == self.default_port else f"{name}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_url(url: str) -> WebUrl:
    """Parses a URL strictly, so that no two parsers can disagree about its host.

    Raises:
        BadRequest: too long; control characters, spaces, backslashes or user-info; a missing or malformed host; port 0.
    """
    if len(url) > MAX_URL:
        raise BadRequest(f"The URL is longer than {MAX_URL} characters.")
    whole = _URL.fullmatch(url)
    if _ODD.search(url) or whole is None:
        raise BadRequest("The URL is malformed.")
    scheme, authority, target = whole[1].lower(), whole[2], whole[3]
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        raise BadRequest("The URL's host is missing or malformed.")
    port = int(parts[2]) if parts[2] is not None else (443 if scheme == "https" else 80)
    if not 0 < port < 65536:
        raise BadRequest("The URL's port is out of range.")
    return WebUrl(scheme, _host(parts[1]), port, target if target.startswith("/") else "/" + target)


def _host(text: str) -> str:
    try:
        if text.startswith("["):
            return str(IPv6Address(text[1:-1]))
        host = text.lower() if text.isascii() else idna.encode(text, uts46=True).decode("ascii").lower()
    except (ValueError, UnicodeError):
        host = ""
    host = host.removesuffix(".")
    if len(host) > 253 or not _NAME.fullmatch(host):
        raise BadRequest("The URL's host is missing or malformed.")
    return host


def is_public(address: Address) -> bool:
    """Returns True if ``address`` and every address embedded in it are globally routed unicast."""
    if isinstance(address, IPv4Address):
        special = address.is_multicast or address.is_reserved or address.is_loopback or address.is_link_local
        return address.is_global and not special and not any(address in n for n in UNROUTED)
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if address in NAT64:
        return is_public(_low32(address))
    if address.sixtofour is not None:
        return is_public(address.sixtofour)
    if address not in GLOBAL6 or any(address in n for n in UNROUTED6) or not address.is_global:
        return False
    isatap = int(address) >> 32 & 0xFDFFFFFF == 0x00005EFE
    return is_public(_low32(address)) if isatap else True


def _low32(address: IPv6Address) -> IPv4Address:
    return IPv4Address(int(address) & 0xFFFFFFFF)


def is_special(address: Address) -> bool:
    """Returns True if ``address`` is link-local (where cloud metadata is served), multicast, unspecified or
    broadcast.
    """
    plain = getattr(address, "ipv4_mapped", None) or address
    broadcast = plain == IPv4Address("255.255.255.255")
    return bool(plain.is_link_local or plain.is_multicast or plain.is_unspecified or broadcast)


@dataclass(frozen=True)
class AddressRules:
    """The hosts that the operator allows.

    Args:
        domains: exact hosts, or suffixes that start with a dot. Empty allows every public address and no other. If
            given, only these hosts are allowed, at private addresses too; a link-local address must be listed itself.
    """

    domains: tuple[str, ...] = ()

    @classmethod
    def from_hosts(cls, domains: Sequence[str]) -> AddressRules:
        """Creates rules from hosts as an operator types them."""
        return cls(tuple(d.strip().strip("[]").rstrip(".").lower() for d in domains if d.strip()))

    def allows_host(self, host: str) -> bool:
        """Returns True if the server may connect to ``host`` at all."""
        return not self.domains or any(
            host == d or (d.startswith(".") and host.endswith(d)) for d in self.domains
        )  # fmt: skip

    def allows_address(self, host: str, address: str) -> bool:
        """Returns True if the server may connect to ``address``, to which ``host`` resolves."""
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        if getattr(parsed, "scope_id", None):
            return False
        if not self.domains:
            return is_public(parsed)
        return self.allows_host(host) and ((host in self.domains and host == str(parsed)) or not is_special(parsed))


Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> numeric addresses; raises OSError if there are none."""

REDIRECTS = (301, 302, 303, 307, 308)
MAX_ADDRESSES = 3
"""Maximum number of addresses of one host to try, IPv4 first."""
UNTYPED_CONTENT = ("application/octet-stream", "binary/octet-stream", "application/mp4", "application/x-binary")
"""Content types besides image/* and video/* that servers send for files of unknown type."""
_ABSOLUTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")
NOT_ALLOWED = "The address is not allowed by this server."
HEADERS = {
    "User-Agent": "trencadis",
    # Servers that negotiate answer image/* with AVIF.
    "Accept": "image/jpeg, image/png, image/webp, image/gif, image/bmp, */*;q=0.1",
    "Accept-Encoding": "identity",
    "Connection": "close",
}

MAX_REDIRECTS = 3


class Fetcher:
    """Downloads over http and https under the operator's rules.

    One connection serves one request: no cookies, no proxies from the environment, no reuse of a connection whose
    certificate was checked for another name.

    Args:
        rules: hosts and addresses to which it may connect.
        max_bytes: most bytes of a body.
        timeout: seconds from name look-up to the last byte, redirects included.
        max_redirects: most redirects to follow; each target is parsed, resolved and checked again.
        resolver: replaces the system's name look-up, for tests.
    """

    def __init__(
        self,
        rules: AddressRules,
        max_bytes: int,
        timeout: float,
        max_redirects: int = MAX_REDIRECTS,
        resolver: Resolver | None = None,
    ) -> None:
        self.rules = rules
        self.max_bytes = max_bytes
        self.timeout = timeout
        self.max_redirects = max_redirects
        self._resolve = resolver or self._system_resolver
        # Lookups whose DNS servers never answer would fill the event loop's own pool.
        self._resolver_threads = ThreadPoolExecutor(32, thread_name_prefix="names")

    async def get(self, url: str) -> bytes:
        """Returns the body of ``url``.

        Raises:
            BadRequest: a malformed URL.
            Forbidden: the rules exclude a host or address, of the URL or of a redirect.
            TooLarge: more than ``max_bytes``.
            UnsupportedMedia: the content type is not one of an image, a video or plain bytes.
            Unprocessable: no such host, no connection, a status other than 200, too many redirects, or a timeout.
        """
        try:
            async with asyncio.timeout(self.timeout):
                return await self._follow_redirects(parse_url(url))
        except TimeoutError:
            raise Unprocessable(f"The URL did not answer in full within {self.timeout:g} s.") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
            raise Unprocessable("The URL could not be fetched.") from None

    def close(self) -> None:
        """Shuts down the threads that resolve host names."""
        self._resolver_threads.shutdown(wait=False, cancel_futures=True)

    async def _follow_redirects(self, url: WebUrl) -> bytes:
        for _ in range(self.max_redirects + 1):
            found = await self._request(url)
            if isinstance(found, bytes):
                return found
            url = _redirect_target(url, found)
        raise Unprocessable("The URL redirects too often.")

    async def _request(self, url: WebUrl) -> bytes | str:
        """Returns the body, or the Location of a redirect."""
        addresses = await self._allowed_addresses(url)
        for i, address in enumerate(addresses):
            try:
                return await self._exchange(url, address)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if i + 1 == len(addresses):
                    raise
        raise Unprocessable("The URL's host was not found.")

    async def _allowed_addresses(self, url: WebUrl) -> list[str]:
        """Returns the host's addresses, all of which must be allowed: an attacker could mix a private one among
        public ones.
        """
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
        answers = await asyncio.get_running_loop().run_in_executor(self._resolver_threads, look)
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
        async with httpx.AsyncHTTPTransport(verify=_tls_context(), trust_env=False, retries=0) as wire:
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
        # An anonymous map costs memory only as it is written and returns it at once; a growing bytearray is copied.
        with mmap.mmap(-1, self.max_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as body:
            async for chunk in response.aiter_raw():
                if body.tell() + len(chunk) > self.max_bytes:
                    raise TooLarge(f"The URL's body is larger than {self.max_bytes} bytes.")
                body.write(chunk)
            return body[: body.tell()]


def check_content_type(label: str) -> None:
    """Refuses a content type other than an image's, a video's or plain bytes.

    Senders often get the format wrong (a WebP file called image/jpeg), so the format is detected from the bytes; but a
    text page is never intended.

    Raises:
        UnsupportedMedia: ``label`` is another type.
    """
    kind = label.partition(";")[0].strip().lower()
    if kind and not kind.startswith(("image/", "video/")) and kind not in UNTYPED_CONTENT:
        raise UnsupportedMedia("The content type is not supported; send JPEG, PNG, WebP, GIF, BMP or a video.")


def _redirect_target(url: WebUrl, location: str) -> WebUrl:
    """Returns the URL to which a redirect leads. A malformed one raises Forbidden: it may be an attack."""
    if any(c <= " " or c == "\\" for c in location):
        raise Forbidden("The URL redirects to a malformed address.")
    try:
        # urljoin reads "http:///x" as a path of the same host, so a location with its own scheme or host skips it.
        if location.startswith("//"):
            location = f"{url.scheme}:{location}"
        return parse_url(location if _ABSOLUTE.match(location) else urljoin(str(url), location))
    except (BadRequest, ValueError):
        raise Forbidden("The URL redirects to a malformed address.") from None


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)
