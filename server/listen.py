"""The listening socket, bound before anything slow happens so that a taken port is said at once."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat

from trencadis.core.errors import StartupError
from trencadis.server.config import ServerConfig

WANTED_FILES = 65535
BACKLOG = 2048


def listen(server: ServerConfig) -> socket.socket:
    """A bound and listening socket.

    Raises:
        StartupError: the port is taken, or the address is none of this machine's.
    """
    return _unix(server.uds) if server.uds else _tcp(server.host or "0.0.0.0", server.port)


def _tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartupError(f"--host {host}: {error.strerror}.") from None
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        # Two sockets that reuse an address may both be bound; only listening makes it ours.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        why = "is in use; choose another with --port" if error.errno == 98 else f"cannot be used ({error.strerror})"
        raise StartupError(f"port {port} on {host} {why}.") from None
    return sock


def _unix(path: str) -> socket.socket:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            if probe.connect_ex(path) == 0:
                raise StartupError(f"--uds {path} is in use.")
            os.unlink(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StartupError(f"--uds {path} cannot be used ({error.strerror}).") from None
    return sock


def address(sock: socket.socket, tls: bool) -> str:
    """Where ``sock`` listens, as a URL."""
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix socket {name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'https' if tls else 'http'}://{host}:{name[1]}"


def raise_file_limit() -> None:
    """As many open connections as the system allows; the soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
