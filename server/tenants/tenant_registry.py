"""The tenants of ``--api-key-file``: their keys, weights and limits, and what each of them uses.

The file is YAML and holds digests of keys, not the keys themselves; it is read again when it changes. A tenant has
token buckets per minute, and a count of its requests inside the server. ``trencadis key new`` makes keys.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dates
import hashlib
import logging
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple

import yaml

from trencadis.core.errors import KeyLimitReached, StartupError
from trencadis.core.json_types import Json

DIGEST = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
KEY_PREFIX = "tk-"
MOST_BYTES = 16 << 20
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader, which reads thousands of tenants in a tenth of the time."""
RATES = ("requests_per_minute", "tokens_per_minute", "pixels_per_minute")
MOST_WEIGHT = 1000.0
PRIORITIES = (-(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One entry of a key file.

    Args:
        digests: SHA-256 of each of its keys in hexadecimal digits; several while a key is replaced.
        weight: its share under ``--scheduling-policy fair``, relative to other tenants.
        priorities: lowest and highest ``priority`` that its requests may have.
        rates: most requests, tokens and pixels a minute, by their names in ``RATES``; none: no limit.
        concurrency: most choices inside the server at a time; 0: no limit.
        expires: seconds since the epoch after which its keys are no longer accepted; infinite: never.
    """

    name: str
    digests: tuple[str, ...]
    weight: float = 1.0
    priorities: tuple[int, int] = PRIORITIES
    rates: Mapping[str, float] = field(default_factory=dict)
    concurrency: int = 0
    expires: float = math.inf


class KeyFileError(StartupError):
    """The file cannot be used; the message names it and the fault in one line."""


NO_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""Errors of the YAML library for invalid text, and those of Python that it lets through for invalid values of tags."""


def read_key_file(path: Path) -> tuple[Tenant, ...]:
    """Reads the tenants of a file.

    Raises:
        KeyFileError: it cannot be read, it is no regular file, others may read it, or an entry is wrong.
    """
    try:
        # Without O_NONBLOCK a pipe in its place would be waited for without end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            _check_file(path, found)
            text = file.read(MOST_BYTES + 1)
        given = yaml.load(text.decode("utf-8"), LOADER)
    except OSError as error:
        raise KeyFileError(f"--api-key-file {path}: {error.strerror or error}.") from None
    except NO_YAML:
        raise KeyFileError(f"--api-key-file {path}: it is no YAML.") from None
    try:
        return _read_tenants(given)
    except _Fault as fault:
        raise KeyFileError(f"--api-key-file {path}: {fault}.") from None


def _check_file(path: Path, found: os.stat_result) -> None:
    """Raises KeyFileError unless it is a regular file of a fair size that others may not read."""
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"--api-key-file {path}: it is no regular file.")
    if stat.S_IMODE(found.st_mode) & 0o077 and os.name == "posix":
        mode = stat.S_IMODE(found.st_mode)
        raise KeyFileError(f"--api-key-file {path}: others may read it (mode {mode:o}); run chmod 600.")
    if found.st_size > MOST_BYTES:
        raise KeyFileError(f"--api-key-file {path}: it has more than {MOST_BYTES >> 20} MiB.")


class _Fault(Exception):
    """The fault of an entry."""


def _read_tenants(given: Json) -> tuple[Tenant, ...]:
    if not isinstance(given, dict) or set(given) != {"keys"} or not isinstance(given["keys"], list):
        raise _Fault("it must hold one list, 'keys'")
    made = tuple(_read_tenant(entry, i) for i, entry in enumerate(given["keys"]))
    if not made:
        raise _Fault("'keys' is empty, so nobody could get in")
    owners: dict[str, str] = {}
    names: set[str] = set()
    for tenant in made:
        if tenant.name in names:
            raise _Fault(f"the name {tenant.name} occurs twice")
        names.add(tenant.name)
        for digest in tenant.digests:
            if digest in owners:
                raise _Fault(f"{tenant.name} has a key of {owners[digest]}")
            owners[digest] = tenant.name
    return made


def _read_tenant(entry: Json, index: int) -> Tenant:
    if not isinstance(entry, dict):
        raise _Fault(f"keys[{index}] must be a mapping")
    name = entry.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _Fault(f"keys[{index}].name must have 1 to 64 letters, digits or any of ._@-")
    known = {"name", "sha256", "weight", "priority", "concurrency", "expires", *RATES}
    unknown = next((str(key) for key in entry if key not in known), None)
    if unknown is not None:
        raise _Fault(f"{name} has the unknown field {unknown[:40]!r}")
    return Tenant(
        name=name,
        digests=_read_digests(name, entry.get("sha256")),
        weight=_read_number(name, "weight", entry.get("weight", 1.0), MOST_WEIGHT),
        priorities=_read_priorities(name, entry.get("priority")),
        rates={rate: _read_number(name, rate, entry[rate], 1e15) for rate in RATES if entry.get(rate) is not None},
        concurrency=_read_whole_number(name, "concurrency", entry.get("concurrency")),
        expires=_parse_expiry(name, entry.get("expires")),
    )


def _read_digests(name: str, given: Json) -> tuple[str, ...]:
    some = [given] if isinstance(given, str) else given
    if not isinstance(some, list) or not some or not all(isinstance(d, str) and DIGEST.fullmatch(d) for d in some):
        raise _Fault(f"{name}.sha256 must be a digest of 64 hexadecimal digits in lower case, or a list of them")
    return tuple(some)


def _read_number(name: str, field_name: str, given: Json, most: float) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= most:
        raise _Fault(f"{name}.{field_name} must be a number above 0, at most {most:g}")
    return float(given)


def _read_whole_number(name: str, field_name: str, given: Json) -> int:
    if given is None:
        return 0
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise _Fault(f"{name}.{field_name} must be a whole number, at least 1")
    return given


def _read_priorities(name: str, given: Json) -> tuple[int, int]:
    if given is None:
        return PRIORITIES
    pair = given if isinstance(given, list) else [given, given]
    whole = len(pair) == 2 and all(isinstance(p, int) and not isinstance(p, bool) for p in pair)
    if not whole or not PRIORITIES[0] <= pair[0] <= pair[1] <= PRIORITIES[1]:
        raise _Fault(f"{name}.priority must be a whole number, or a list of the lowest and the highest")
    return int(pair[0]), int(pair[1])


def _parse_expiry(name: str, given: Json) -> float:
    """Returns the end of a day, or a moment, in seconds since the epoch; without a time zone it is UTC."""
    if given is None:
        return math.inf
    if isinstance(given, str):
        try:
            given = datetime.fromisoformat(given)
        except ValueError:
            raise _Fault(f"{name}.expires must be a date or a time as in 2030-12-31T18:00:00+00:00") from None
    if isinstance(given, datetime):
        return (given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp()
    if isinstance(given, date):
        return datetime.combine(given, dates.time.max, UTC).timestamp()
    raise _Fault(f"{name}.expires must be a date or a time as in 2030-12-31T18:00:00+00:00")


MINUTE = 60.0
HEADERS = {"requests_per_minute": "requests", "tokens_per_minute": "tokens", "pixels_per_minute": "pixels"}
LONGEST = 120
"""Largest Retry-After, in seconds."""

FIRST_LENGTH = 256.0
"""Tokens that a choice is expected to have before a tenant has had any."""
LEARNING = 16
"""Answers over which the usual length is averaged."""


@dataclass(slots=True)
class TokenBucket:
    """A token bucket: holds at most a minute's worth, and refills evenly.

    It may fall below zero, as what an answer without a limit costs is known only once it is written; then it is closed
    until it is above zero again.
    """

    rate: float
    left: float
    at: float

    def refill(self, now: float) -> None:
        """Adds the refill since the last call."""
        self.left = min(self.rate, self.left + (now - self.at) * self.rate / MINUTE)
        self.at = now

    def wait(self, wanted: float) -> float:
        """Returns the seconds until ``wanted`` fits; a larger amount than the whole bucket needs a full one."""
        return max(0.0, (min(wanted, self.rate) - self.left) * MINUTE / self.rate)


@dataclass(slots=True)
class TenantAccount:
    """One tenant and its use. For one event loop.

    Args:
        inside: choices inside the server now.
        used: requests, tokens and pixels since the start, by their names in ``RATES``.
        rejected: refusals by the name of the limit.
        usual_length: tokens of a choice, averaged over the last ones.
    """

    tenant: Tenant
    clock: Callable[[], float] = time.monotonic
    inside: int = 0
    used: dict[str, float] = field(default_factory=lambda: dict.fromkeys(RATES, 0.0))
    rejected: dict[str, int] = field(default_factory=dict)
    buckets: dict[str, TokenBucket] = field(default_factory=dict)
    usual_length: float = FIRST_LENGTH

    def __post_init__(self) -> None:
        self._fit_buckets()

    def _fit_buckets(self) -> None:
        now, old = self.clock(), self.buckets
        self.buckets = {}
        for name, rate in self.tenant.rates.items():
            before = old.get(name)
            spent = 0.0 if before is None else before.rate - before.left
            self.buckets[name] = TokenBucket(rate, rate - spent, now)

    def update_tenant(self, tenant: Tenant) -> None:
        """Replaces the tenant by another entry of the same name; amounts spent in this minute stay spent."""
        self.tenant = tenant
        self._fit_buckets()

    def enter(self, requests: int, more: bool = False) -> None:
        """Admits ``requests`` choices of one HTTP request.

        Args:
            more: other choices of the request are inside already.

        Raises:
            KeyLimitReached: a limit is reached; the message names it.
        """
        most = self.tenant.concurrency
        if most and self.inside + requests > most:
            self._refuse("concurrency", 1)
        if not more:
            self.take("requests_per_minute", 1)
        self.inside += requests

    def take(self, name: str, count: float, reserved: float = 0.0) -> None:
        """Spends ``count`` of a rate, if the bucket has it.

        Args:
            reserved: taken from the bucket too, though not used yet; ``give_back`` returns it.

        Raises:
            KeyLimitReached: the bucket holds less.
        """
        bucket = self.buckets.get(name)
        if bucket is not None:
            bucket.refill(self.clock())
            wait = bucket.wait(count + reserved)
            if wait > 0:
                self._refuse(name, max(1, min(LONGEST, math.ceil(wait))))
            bucket.left -= count + reserved
        self.used[name] += count

    def spend(self, name: str, count: float) -> None:
        """Spends an amount that was already served, such as the tokens of an answer."""
        bucket = self.buckets.get(name)
        if bucket is not None:
            bucket.refill(self.clock())
            bucket.left -= count
        self.used[name] += count

    def refund(self, name: str, count: float) -> None:
        """Returns to the bucket the amount that ``take`` spent on a request that was not served."""
        bucket = self.buckets.get(name)
        if bucket is not None:
            bucket.left = min(bucket.rate, bucket.left + count)
        self.used[name] -= count

    def give_back(self, name: str, reserved: float) -> None:
        """Returns what ``take`` reserved."""
        bucket = self.buckets.get(name)
        if bucket is not None:
            bucket.refill(self.clock())
            bucket.left = min(bucket.rate, bucket.left + reserved)

    def record_answer(self, tokens: int, choices: int) -> None:
        """Spends the tokens of an answer of ``choices`` choices, whose usual length is learned from it."""
        self.spend("tokens_per_minute", tokens)
        if tokens and choices:
            self.usual_length += (tokens / choices - self.usual_length) / LEARNING

    def leave(self, requests: int) -> None:
        """Records that choices have left the server."""
        self.inside -= requests

    @property
    def own(self) -> int:
        """Number of choices inside that came through this process."""
        return self.inside

    def _refuse(self, limit: str, wait: int) -> None:
        self.rejected[limit] = self.rejected.get(limit, 0) + 1
        raise KeyLimitReached(f"The limit {limit} of this key is reached; try again later.", retry_after=wait)

    def make_headers(self) -> Iterator[tuple[str, str]]:
        """Yields ``x-ratelimit-*`` headers for OpenAI's clients: the limit, the rest, and the seconds until it is
        full again.
        """
        now = self.clock()
        for name, bucket in self.buckets.items():
            bucket.refill(now)
            word = HEADERS[name]
            yield f"x-ratelimit-limit-{word}", f"{bucket.rate:.0f}"
            yield f"x-ratelimit-remaining-{word}", f"{max(bucket.left, 0):.0f}"
            yield f"x-ratelimit-reset-{word}", f"{max(bucket.wait(bucket.rate), 0):.3f}s"


CURRENT: ContextVar[TenantAccount | None] = ContextVar("trencadis_account", default=None)
"""The account of the HTTP request that this task serves; None without a key file."""


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


def print_new_key(argv: Sequence[str]) -> int:
    """Runs ``trencadis key new``: prints a new key and its entry for ``--api-key-file``; stores nothing."""
    parser = argparse.ArgumentParser(
        prog="trencadis key", description="Makes API keys. A key is shown once; the server keeps its digest alone."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="a new key, and its entry for --api-key-file")
    new.add_argument("name", nargs="?", default="client", help="what metrics and logs call its owner")
    args = parser.parse_args(argv)
    if not NAME.fullmatch(args.name):
        raise StartupError(f"{args.name[:80]!r} is no name: it needs 1 to 64 letters, digits or any of ._@-.")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    print(f"key:  {key}\nentry for the list 'keys' of --api-key-file (chmod 600):\n")
    print(f"  - name: {args.name}\n    sha256: {hashlib.sha256(key.encode()).hexdigest()}")
    return 0
