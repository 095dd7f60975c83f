"""Names and addresses of hosts: how ``--allowed-hosts`` reads them, and which of them are this machine's own."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from trencadis.core.errors import StartupError

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
