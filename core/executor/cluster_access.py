"""Checks whether a Ray cluster accepts this process, and whether it accepts any client.

A separate process makes the connection: with a rejected token, Ray retries for most of a minute and then reports that
there is no cluster, and it aborts a process that has no token.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trencadis.core import envs
from trencadis.core.errors import StartupError

START = "`ray start --head` starts one, and RAY_ADDRESS=host:port names another"

PROBE = 3.0
"""Seconds in which the cluster's port must accept a connection."""

PATIENCE = 30.0
"""Seconds in which the cluster must accept or reject a token."""

LET_IN, REFUSED, NO_TOKEN = 0, 3, 4
"""Exit codes of the probe process; any other: the probe failed."""

UNKNOWN = -1

AUTH = "RAY_AUTH_"
"""Prefix of the environment variables about tokens."""

ASK = f"""
import sys
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
address = canonicalize_bootstrap_address_or_die(sys.argv[1])
print(address, flush=True)
try:
    ensure_token_if_auth_enabled(create_token_if_missing=False)
except AuthenticationError:
    sys.exit({NO_TOKEN})
try:
    GcsClient(address=address)
except AuthenticationError:
    sys.exit({REFUSED})
"""


@dataclass(frozen=True)
class ClusterAccess:
    """A cluster's answer to an access probe.

    Args:
        address: the cluster's address; empty: unknown.
        said: LET_IN, REFUSED, NO_TOKEN or UNKNOWN.
    """

    address: str
    said: int


def probe_access(address: str, environ: Mapping[str, str]) -> Callable[[], ClusterAccess]:
    """Starts a probe in a child process; returns a function that waits for its answer.

    Args:
        address: ``host:port``, or ``auto``.
        environ: the environment of the probe, which may hold a token.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", ASK, address], env=dict(environ), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip

    def answer() -> ClusterAccess:
        with process:
            try:
                found, _ = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                return ClusterAccess("", UNKNOWN)
        said = process.returncode if process.returncode in (LET_IN, REFUSED, NO_TOKEN) else UNKNOWN
        return ClusterAccess(found.strip(), said)

    return answer


def check_token(answer: ClusterAccess, environ: Mapping[str, str]) -> None:
    """Raises StartupError if the cluster does not accept this process."""
    if answer.said == NO_TOKEN:
        raise StartupError(
            "RAY_AUTH_MODE=token and there is no token: set RAY_AUTH_TOKEN_PATH=FILE or RAY_AUTH_TOKEN to that of the "
            "cluster's nodes"
        )
    if answer.said == REFUSED and (envs.get("RAY_AUTH_MODE", environ) or "").lower() == "token":
        raise StartupError(
            f"the Ray cluster at {answer.address} asks for another token than this process shows: set "
            "RAY_AUTH_TOKEN_PATH=FILE or RAY_AUTH_TOKEN to that of its nodes"
        )
    if answer.said == REFUSED:
        raise StartupError(
            f"the Ray cluster at {answer.address} asks for a token, and this process shows none: set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH=FILE or RAY_AUTH_TOKEN to that of its nodes"
        )


def check_not_open(address: str) -> None:
    """Raises StartupError for a cluster on a public address that runs code of any client, with or without a token."""
    if is_public(address) and accepts_any_client(address):
        raise StartupError(
            f"the Ray cluster at {address} has a public address and asks for no token: whoever reaches it runs code "
            "there: start it with RAY_AUTH_MODE=token (`ray get-auth-token --generate`), and this server too"
        )


def accepts_any_client(address: str) -> bool:
    """True if the cluster accepts clients without a token, or if that cannot be determined."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(AUTH)}
    return probe_access(address, bare)().said != REFUSED


def is_public(address: str) -> bool:
    """Returns True if ``host:port`` has a globally routable address; host names are resolved."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        return any(ipaddress.ip_address(str(where[0]).partition("%")[0]).is_global for *_, where in found)
    except (OSError, ValueError):
        return False


def check_reachable(address: str) -> None:
    """Raises StartupError if nothing answers at ``address``; Ray itself would retry for a minute."""
    host, _, port = address.rpartition(":")
    if address in ("auto", "local"):
        return
    if not host or "/" in address or not port.isdecimal():
        raise StartupError(f"RAY_ADDRESS={address[:100]} is no host:port of a cluster's head, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise StartupError(f"no Ray cluster answers at {address} ({why}): {START}") from None
