"""The current tenants of a key file: finds the tenant of a key, and reloads the file when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from trencadis.server.tenants.api_key_file import KeyFileError, Tenant, read_key_file
from trencadis.server.tenants.rate_limits import TenantAccount

log = logging.getLogger("trencadis.server")
LOOK_EVERY = 2.0
"""Seconds between checks of the file's time and size."""


class TenantRegistry:
    """The accounts by name, and by the digests of their keys. For one event loop.

    Args:
        account: makes the account of a tenant.

    Raises:
        KeyFileError: the file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        account: Callable[[Tenant, Callable[[], float]], TenantAccount] = TenantAccount,
    ) -> None:
        self._path, self._clock, self._now, self._account = path, clock, now, account
        self.accounts: dict[str, TenantAccount] = {}
        self._digests: list[tuple[bytes, TenantAccount]] = []
        self._seen = self._get_mtime()
        self._looked = clock()
        self._set(read_key_file(path))

    def _get_mtime(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._path)
        except OSError:
            return (0, 0, 0)
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _set(self, tenants: tuple[Tenant, ...]) -> None:
        before, self.accounts = self.accounts, {}
        for tenant in tenants:
            account = before.get(tenant.name)
            if account is None:
                account = self._account(tenant, self._clock)
            else:
                account.update_tenant(tenant)
            self.accounts[tenant.name] = account
        self._digests = [
            (digest.encode(), account) for account in self.accounts.values() for digest in account.tenant.digests
        ]

    def reload(self) -> None:
        """Reads the file again; if it is wrong, the previous tenants stay, with a warning."""
        self._seen = self._get_mtime()
        try:
            self._set(read_key_file(self._path))
        except KeyFileError as error:
            log.warning("%s The keys read before stay in force.", error)
        else:
            log.info("--api-key-file %s: %d tenants", self._path, len(self.accounts))

    def find(self, keys: list[bytes]) -> TenantAccount | None:
        """Returns the account of the first of ``keys`` that is valid; None if none is.

        All digests are compared, each in constant time, so that the time reveals nothing about them.
        """
        now = self._clock()
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            if self._get_mtime() != self._seen:
                self.reload()
        given = [hashlib.sha256(key).hexdigest().encode() for key in keys if key]
        matched = [account for digest, account in self._digests for g in given if hmac.compare_digest(digest, g)]
        return next((a for a in matched if self._now() <= a.tenant.expires), None)
