"""Parses the texts of flags and variables: numbers with units, bytes, booleans, JSON, limits, names of hosts.

Hosts are those of ``--allowed-hosts``, and the names and addresses that are this machine's own.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import socket
from collections.abc import Callable, Sequence

from trencadis.core.envs import parse_bool
from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json, JsonObject

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HUMAN = re.compile(r"([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([kKmMgGtT])?")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT])(i?)[bB]?|[bB])?")


def parse_count(text: str, name: str) -> int:
    """Parses an integer with unit: ``1k`` is 1000, ``1K`` is 1024, ``25.6k`` is 25600.

    Raises:
        StartupError: not a whole number.
    """
    match = _HUMAN.fullmatch(text.strip().replace("_", ""))
    if match:
        number, unit = match.groups()
        value = float(number) * {**_DECIMAL, **_BINARY}.get(unit or "", 1)
        if math.isfinite(value) and (value == round(value) or unit):
            return round(value)
    raise StartupError(f"{name}: {text!r} is not a whole number (such as 4096, 4k or 4K).")


def parse_size(text: str, name: str) -> int:
    """Parses bytes: ``256MiB``, ``1GiB``, ``1GB`` (10^9), ``4K`` (4096), ``4k`` (4000)."""
    match = _BYTES.fullmatch(text.strip())
    if match:
        number, unit, binary = match.groups()
        bare = not text.strip().lower().endswith("b")
        factor = 1
        if unit:
            factor = _BINARY[unit.upper()] if binary or (bare and unit.isupper()) else _DECIMAL[unit.lower()]
        if math.isfinite(float(number) * factor):
            return round(float(number) * factor)
    raise StartupError(f"{name}: {text!r} is not a size (such as 256MiB, 1GB or 268435456).")


def parse_number(text: str, name: str) -> float:
    """Parses a finite decimal number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value or value in (float("inf"), float("-inf")):
        raise StartupError(f"{name}: {text!r} is not a number.")
    return value


def parse_amount(text: str, name: str) -> float:
    """Parses a share (``0.1``) or a size (``1GiB``)."""
    return float(parse_size(text, name)) if text.strip()[-1:].isalpha() else parse_number(text, name)


def parse_integer(text: str, name: str) -> int:
    """Parses an integer without units."""
    try:
        return int(text)
    except ValueError:
        raise StartupError(f"{name}: {text!r} is not a whole number.") from None


def parse_mapping(text: str, name: str) -> JsonObject:
    """Parses a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(":")[0]
        raise StartupError(f"{name}: {text!r} is not a JSON object ({why}).") from None
    if not isinstance(value, dict):
        raise StartupError(f"{name}: {text!r} is not a JSON object.")
    return value


def parse_limits(text: str, name: str) -> JsonObject:
    """Parses ``image=4,video=1`` or the same as JSON."""
    if text.lstrip().startswith("{"):
        return check_limits(parse_mapping(text, name), name)
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not sign or not key for key, sign, _ in pairs):
        raise StartupError(f'{name}: {text!r} is neither image=4 nor {{"image": 4}}.')
    return check_limits({key.strip(): parse_integer(value, name) for key, _, value in pairs}, name)


def check_limits(value: JsonObject, name: str) -> JsonObject:
    """Checks counts by modality, none of them negative; also accepts vLLM's ``{"image": {"count": 4}}``."""
    flat = {key: (one.get("count") if isinstance(one, dict) else one) for key, one in value.items()}
    for key, one in flat.items():
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            raise StartupError(f"{name}: {key}={one!r} is not a count.")
    return flat


def parse_words(text: str, name: str) -> list[str]:
    """Parses a JSON list, or one word."""
    if text.lstrip().startswith("["):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, list):
            raise StartupError(f"{name}: {text!r} is not a JSON list.")
        return [str(one) for one in value]
    return [text]


def parse_commas(text: str, name: str) -> list[str]:
    """Parses a JSON list, or words separated by commas."""
    return [one for word in parse_words(text, name) for one in word.split(",") if one]


def parse_json_or_text(text: str) -> Json:
    """Parses the value of ``--opt.key value``: JSON if possible, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


PARSERS: dict[str, Callable[[str, str], Json]] = {
    "bool": parse_bool,
    "int": parse_integer,
    "float": parse_number,
    "amount": parse_amount,
    "str": lambda text, name: text,
    "upper": lambda text, name: text.upper(),
    "count": parse_count,
    "bytes": parse_size,
    "json": parse_mapping,
    "limits": parse_limits,
    "list": parse_words,
    "commas": parse_commas,
}


ANY = "*"
NAME = re.compile(r"\.?[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")


def check_allowed_hosts(hosts: Sequence[str]) -> None:
    """Raises StartupError for the first host that is none."""
    for host in hosts:
        if host != ANY:
            parse_allowed_host(host)


def parse_allowed_host(host: str) -> str:
    """A host of ``--allowed-hosts`` in the form in which Host headers are compared with it.

    Raises:
        StartupError: it is neither a name, a suffix nor an address.
    """
    name = normalise_host(host.strip("[]"))
    if _is_address(name) or NAME.fullmatch(name):
        return name
    raise StartupError(
        f"--allowed-hosts: {host[:60]!r} is no host; give names, .suffix for all names below one, or addresses, "
        "without scheme and port, or *."
    )


def normalise_host(name: str) -> str:
    """A name in lower case without a final dot, or an address in its shortest form."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower().rstrip(".")


def is_loopback_address(text: str) -> bool:
    """True for an address that only this machine can reach; False for names."""
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False


def listens_on_loopback(host: str) -> bool:
    """True if a socket bound to ``host`` (``--host``) can be reached from this machine alone."""
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and is_loopback_address(str(found[0][4][0]))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
