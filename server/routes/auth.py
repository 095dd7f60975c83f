"""API keys, which guard everything except the probes of orchestrators."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence, Set

from trencadis.core.errors import Unauthorized
from trencadis.server.tenants.rate_limits import CURRENT
from trencadis.server.tenants.tenant_registry import TenantRegistry

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
        that of this task from now on (``tenants.rate_limits.CURRENT``).

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
