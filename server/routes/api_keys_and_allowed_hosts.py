"""API keys, which guard everything except the probes of orchestrators; and which Host and Origin headers are allowed.

Hosts are the defence against web pages that a user of this machine visits. A page of any site may send requests to a
server at 127.0.0.1. Two things stop it: requests whose browser says that another site sent them are refused unless they
only read (``check_origin``), and a page that points its own name at this address, to be of the same site, is refused
because of the name (``check_host``).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

from starlette.datastructures import Headers

from trencadis.core.errors import Forbidden, Unauthorized
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.config.value_parsers import (
    ANY,
    is_loopback_address,
    listens_on_loopback,
    normalise_host,
    parse_allowed_host,
)
from trencadis.server.tenants.tenant_registry import CURRENT, TenantRegistry

UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters removed from request ids, and replaced in field names of headers."""

OPEN = frozenset({"/health", "/live", "/ready", "/ping", "/version"})


class Keys:
    """The accepted API keys.

    Args:
        guard_metrics: /metrics needs a key too.
        public: further paths that need none.
        tenants: the tenants of a key file, whose keys are accepted too.
    """

    def __init__(
        self,
        keys: Sequence[str],
        guard_metrics: bool = False,
        public: Set[str] = frozenset(),
        tenants: TenantRegistry | None = None,
    ) -> None:
        self._keys = [k.encode() for k in keys if k]
        self._tenants = tenants
        self._open = OPEN | public | (frozenset() if guard_metrics else {"/metrics"})

    def check(self, method: str, path: str, authorization: str, x_api_key: str) -> str:
        """Returns the tenant of a request, ``""`` if unknown.

        With configured keys the tenant is the key that matched, whatever the other header holds. Without them it is the
        key that the client sent, which a proxy in front may have checked. The account of a tenant of the key file is
        that of this task from now on (``tenants.tenant_registry.CURRENT``).

        Raises:
            Unauthorized: ``path`` needs a key and neither header has a valid one.
        """
        scheme, _, token = authorization.partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        given = [text.encode("latin-1", "replace") for text in (x_api_key, bearer)]
        CURRENT.set(None)
        if not self._keys and self._tenants is None:
            return get_key_tenant(given[0] or given[1])
        return self._find_tenant(method, path, given)

    def _find_tenant(self, method: str, path: str, given: list[bytes]) -> str:
        account = None if self._tenants is None else self._tenants.find(given)
        CURRENT.set(account)
        if account is not None:
            return get_key_tenant(f"name:{account.tenant.name}".encode())
        # Compares every pair, each in constant time, so that timing does not reveal a near match.
        matched = [key for key in self._keys for g in given if hmac.compare_digest(key, g)]
        if matched:
            return get_key_tenant(matched[0])
        if method == "OPTIONS" or path in self._open:
            return ""
        raise Unauthorized("The API key is missing or wrong.")


def get_key_tenant(key: bytes) -> str:
    """Returns a digest of ``key``. The uuids that clients give to media belong to their tenant."""
    return hashlib.sha256(key).hexdigest()[:32] if key else ""


SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
LOCALHOST = "localhost"
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
"""A Host header: a name or an address, and a port."""
DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True)
class HostRules:
    """The rules of one server.

    Args:
        hosts: names and addresses in lower case, ``.suffix`` for all names below one; None: any host.
        loopback: whether ``localhost`` and every loopback address count too.
        origins: origins that may send requests from other sites; ``*``: any.
    """

    hosts: frozenset[str] | None = None
    loopback: bool = False
    origins: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, config: ServerConfig) -> HostRules:
        """The rules of ``--allowed-hosts`` and ``--allowed-origins``.

        A server that listens on a loopback address takes the loopback names where no host is given; another one, or
        one on a unix socket, takes any.
        """
        origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
        if ANY in config.allowed_hosts:
            return cls(None, False, origins)
        loopback = not config.uds and listens_on_loopback(config.host)
        if not config.allowed_hosts:
            return cls(frozenset({normalise_host(config.host)}) if loopback else None, loopback, origins)
        return cls(frozenset(parse_allowed_host(one) for one in config.allowed_hosts), loopback, origins)

    def check_host(self, headers: Headers) -> None:
        """Raises Forbidden if the Host header names another host. A client of HTTP/1.0, which no browser is, may omit
        it.
        """
        given = headers.get("host", "")
        if self.hosts is None or not given:
            return
        found = HOST.fullmatch(given)
        name = normalise_host(found[1].strip("[]")) if found else ""
        if not name or not self._allows(name):
            raise Forbidden(f"The host {given[:60]!r} is not one of this server; --allowed-hosts names those that are.")

    def _allows(self, name: str) -> bool:
        assert self.hosts is not None
        if self.loopback and (name == LOCALHOST or is_loopback_address(name)):
            return True
        if name in self.hosts:
            return True
        return any(one.startswith(".") and name.endswith(one) for one in self.hosts)

    def check_origin(self, method: str, headers: Headers) -> None:
        """Raises Forbidden for a request of another site's page that may change something.

        Browsers alone send Origin and Sec-Fetch-Site, and pages cannot set them. ``same-origin`` also counts behind a
        proxy that rewrites Host, where Origin and Host differ.
        """
        if method in SAFE_METHODS:
            return
        origins = [one.lower() for one in headers.getlist("origin") if one]
        sites = {one.lower() for one in headers.getlist("sec-fetch-site")}
        if origins and (ANY in self.origins or self.origins.issuperset(origins)):
            return
        host = headers.get("host", "")
        own = sites == {"same-origin"} or all(_is_own(origin, host) for origin in origins)
        if "cross-site" in sites or not own:
            shown = ", ".join(origins)[:60] or "another site"
            raise Forbidden(f"A page of {shown} may not send this request; --allowed-origins names those that may.")


def _is_own(origin: str, host: str) -> bool:
    """True if ``origin`` is the server's own: the one of the Host header, whatever the scheme in front of a proxy."""
    scheme, _, place = origin.partition("://")
    if scheme not in DEFAULT_PORTS or not host:
        return False
    default = DEFAULT_PORTS[scheme]
    return place.removesuffix(default) == host.lower().removesuffix(default)
