"""``--api-key-file``: names, digests of keys, weights and limits, as YAML. The file does not hold the keys
themselves.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from pathlib import Path

import yaml

from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json

DIGEST = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
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
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError):
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
        return datetime.combine(given, time.max, UTC).timestamp()
    raise _Fault(f"{name}.expires must be a date or a time as in 2030-12-31T18:00:00+00:00")
