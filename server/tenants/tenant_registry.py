"""The current tenants of a key file: finds the tenant of a key, and reloads the file when it changes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trencadis.server.tenants.api_key_file import KeyFileError, Tenant, read_key_file
from trencadis.server.tenants.rate_limits import TenantAccount

log = logging.getLogger("trencadis.server")
MAX_KEYS = 2
"""Keys of a request that are looked up: x-api-key and the bearer's."""
LOOK_EVERY = 2.0
"""Seconds between checks of the file's time and size."""


class FileStamp(NamedTuple):
    """What changes when a file is replaced: nanoseconds since 1970 of its last change, its bytes, and its inode."""

    mtime_ns: int = 0
    size: int = 0
    inode: int = 0


def read_stamp(path: str | Path) -> FileStamp:
    """Returns the stamp of a file; zeros if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return FileStamp()
    return FileStamp(found.st_mtime_ns, found.st_size, found.st_ino)


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
        self._by_digest: dict[bytes, TenantAccount] = {}
        self._reader: asyncio.Future[tuple[Tenant, ...] | KeyFileError] | None = None
        self._seen = self._get_mtime()
        self._looked = clock()
        self._set(read_key_file(path))

    def _get_mtime(self) -> FileStamp:
        return read_stamp(self._path)

    def _set(self, tenants: tuple[Tenant, ...]) -> None:
        before, self.accounts = self.accounts, {}
        for tenant in tenants:
            account = before.get(tenant.name)
            if account is None:
                account = self._account(tenant, self._clock)
            else:
                account.update_tenant(tenant)
            self.accounts[tenant.name] = account
        self._by_digest = {
            bytes.fromhex(digest): account for account in self.accounts.values() for digest in account.tenant.digests
        }

    def reload(self) -> None:
        """Reads the file again; if it is wrong, what counted before counts on, with a warning.

        Where an event loop runs, a thread reads, since thousands of tenants take a second.
        """
        self._seen = self._get_mtime()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._apply(self._read())
            return
        if self._reader is None or self._reader.done():
            self._reader = loop.run_in_executor(None, self._read)
            self._reader.add_done_callback(lambda read: None if read.cancelled() else self._apply(read.result()))
        else:
            self._seen = FileStamp()  # changed while it was read: the next look reads it again

    def _read(self) -> tuple[Tenant, ...] | KeyFileError:
        try:
            return read_key_file(self._path)
        except KeyFileError as error:
            return error

    def _apply(self, read: tuple[Tenant, ...] | KeyFileError) -> None:
        if isinstance(read, KeyFileError):
            log.warning("%s The keys read before stay in force.", read)
        else:
            self._set(read)
            log.info("--api-key-file %s: %d tenants", self._path, len(self.accounts))

    def find(self, keys: list[bytes]) -> TenantAccount | None:
        """Returns the account of the first of ``keys`` that is valid; None if none is.

        Only the first ``MAX_KEYS`` count, so that a request costs two digests at most. The time of the look-up may
        depend on the digest of a key, which tells nothing about a key that is not known already.
        """
        now = self._clock()
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            if self._get_mtime() != self._seen:
                self.reload()
        matched = [self._by_digest.get(hashlib.sha256(key).digest()) for key in keys[:MAX_KEYS] if key]
        return next((a for a in matched if a is not None and self._now() <= a.tenant.expires), None)
