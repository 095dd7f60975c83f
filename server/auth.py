"""API keys. Everything is guarded but what orchestrators probe."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from trencadis.core.errors import Unauthorized

OPEN = frozenset({"/health", "/live", "/ready", "/ping", "/version"})


class Keys:
    """The accepted API keys.

    Args:
        guard_metrics: whether /metrics needs one too.
    """

    def __init__(self, keys: Sequence[str], guard_metrics: bool = False) -> None:
        self._keys = [k.encode() for k in keys if k]
        self._open = OPEN if guard_metrics else OPEN | {"/metrics"}

    def check(self, method: str, path: str, authorization: str, x_api_key: str) -> None:
        """Raises Unauthorized where ``path`` needs a key and neither header has one."""
        if not self._keys or method == "OPTIONS" or path in self._open:
            return
        scheme, _, token = authorization.partition(" ")
        given = [x_api_key.encode("latin-1", "replace")]
        if scheme.lower() == "bearer":
            given.append(token.strip().encode("latin-1", "replace"))
        # Every pair is compared, in constant time each, so that timing tells nothing about which key came close.
        if not any([hmac.compare_digest(key, g) for key in self._keys for g in given]):
            raise Unauthorized("The API key is missing or wrong.")


def tenant(headers: Mapping[str, str]) -> str:
    """A digest of the key that a request came with; names that clients give (uuids) belong to their tenant."""
    given = headers.get("x-api-key", "") or headers.get("authorization", "").partition(" ")[2].strip()
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:32] if given else ""
