"""Rules for the network addresses to which the server may connect for a client's URL. Pure Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

import idna

from trencadis.core.errors import BadRequest

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
