"""The listening socket, bound before anything slow so that a port in use fails at once; and TLS for it.

Certificates can be replaced while the server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import resource
import socket
import ssl
import stat
import time
import weakref
from collections.abc import Callable
from typing import Any

from trencadis.core.errors import StartupError
from trencadis.core.operator_files import check_regular
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.tenants.tenant_registry import FileStamp, read_stamp

log = logging.getLogger("trencadis.server")

WANTED_FILES = 65535
BACKLOG = 32
"""Connections that asyncio accepts in one go. Each takes a tenth of a millisecond, which delays all answers; heads
are read a few at a time (``pending_request_heads_by_tenant.STARTS_PER_PASS``). Connections are accepted in the order
of arrival, whichever client they are from: one that arrives after a flood of thousands waits until those are accepted.
"""
QUEUED = 4096
"""Connections that the system queues until they are accepted (at most net.core.somaxconn). Linux drops what does not
fit and resets it seconds later, when its client has sent a request."""
MOST = 4096
"""Default of ``--max-connections``."""
KEPT = 160
"""Descriptors reserved for engine, decode workers, downloads and files; at most a third of the free ones."""
SAY_EVERY = 60.0
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Listener(socket.socket):
    """A listening socket that refuses connections when too many are open or no descriptor is left.

    asyncio would accept until descriptors run out, then print tracebacks without end, while nothing else in the process
    could open a file.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.most = MOST
        self.plain = True
        """True if clients can read a refusal; with TLS they cannot."""
        self.count_elsewhere: Callable[[int], int] = lambda here: 0
        """Called with the number of connections open here; returns how many other processes have open."""
        self.open: weakref.WeakSet[AcceptedSocket] = weakref.WeakSet()
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._said = -SAY_EVERY

    def listen(self, backlog: int = QUEUED, /) -> None:
        """Listens with a queue of at least ``QUEUED``: asyncio requests no more than it accepts in one go."""
        super().listen(max(backlog, QUEUED))

    def accept(self) -> tuple[socket.socket, Any]:
        """Returns the next connection.

        Raises:
            BlockingIOError: there is none, or it was refused.
        """
        try:
            plain, address = super().accept()
        except OSError as error:
            raise self._handle_accept_error(error) from None
        if len(self.open) + self.count_elsewhere(len(self.open)) >= self.most:
            self._refuse_connection(plain)
            raise BlockingIOError
        connection = AcceptedSocket(plain.family, plain.type, plain.proto, plain.detach())
        self.open.add(connection)
        connection.of = self.open
        self.count_elsewhere(len(self.open))
        return connection, address

    def _handle_accept_error(self, error: OSError) -> OSError:
        """Returns the exception that ``accept`` raises if the system could accept no connection."""
        if error.errno not in SHORT:
            return error
        self._refuse_without_descriptor()
        return BlockingIOError()

    def _refuse_connection(self, plain: socket.socket) -> None:
        """Closes a connection that is one too many."""
        with plain, contextlib.suppress(OSError):
            plain.setblocking(False)
            if self.plain:
                plain.send(FULL)
        self._log_rarely(f"{self.most} connections are open (--max-connections, ulimit -n): the server turns more away")

    def _refuse_without_descriptor(self) -> None:
        """Refuses the waiting connection with the spare descriptor, so that the event loop does not report it
        endlessly.
        """
        self._release_spare()
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)
        self._log_rarely("no file descriptor is left (ulimit -n): the server turns connections away")

    def _release_spare(self) -> None:
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    def close(self) -> None:
        """Closes the listener; connections stay open."""
        self._release_spare()
        super().close()

    def _log_rarely(self, line: str) -> None:
        now = time.monotonic()
        if now - self._said >= SAY_EVERY:
            self._said = now
            log.warning("%s", line)


class AcceptedSocket(socket.socket):
    """A connection that is counted while it is open."""

    of: weakref.WeakSet[AcceptedSocket] | None = None

    def close(self) -> None:
        """Closes the connection and stops counting it."""
        if self.of is not None:
            self.of.discard(self)
        super().close()


def get_max_connections(asked: int | None) -> int:
    """Returns the maximum number of connections: the descriptor limit minus a reserve, at most ``asked``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if asked is None else asked
    if soft == resource.RLIM_INFINITY:
        return wanted
    free = max(soft - len(os.listdir("/proc/self/fd")), 2)
    return max(1, min(wanted, free - min(KEPT, free // 3)))


def open_listener(server: ServerConfig) -> socket.socket:
    """Opens a bound and listening socket.

    Raises:
        StartupError: the port is in use, or the address does not belong to this machine.
    """
    sock = _listen_unix(server.uds) if server.uds else _listen_tcp(server.host or "0.0.0.0", server.port)
    sock.most, sock.plain = get_max_connections(server.max_connections), not server.ssl_certfile
    if server.max_connections is not None and sock.most < server.max_connections:
        log.warning("--max-connections %d: the limit of descriptors leaves %d", server.max_connections, sock.most)
    return sock


def open_shared_listener(name: Any, now: bool = True) -> socket.socket:
    """Opens a socket at ``name`` (of ``getsockname``), which other processes use too: the kernel distributes
    connections among the listening sockets.

    A unix socket cannot be shared this way; its processes accept connections from one queue.

    Args:
        now: True: it listens, so that connections wait until they are accepted; else the server calls ``listen``.

    Raises:
        StartupError: it cannot be opened.
    """
    sock = Listener(socket.AF_INET6 if len(name) == 4 else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind(name)
        if now:
            sock.listen()
    except OSError as error:
        sock.close()
        raise StartupError(f"port {name[1]} on {name[0]} cannot be shared ({error.strerror}).") from None
    return sock


def adopt_listener(server: ServerConfig, descriptor: int) -> Listener:
    """Returns the listening socket of an inherited descriptor."""
    sock = Listener(-1, -1, -1, descriptor)
    sock.most, sock.plain = get_max_connections(server.max_connections), not server.ssl_certfile
    return sock


def _listen_tcp(host: str, port: int) -> Listener:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartupError(f"--host {host}: {error.strerror}.") from None
    sock = Listener(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        # Two sockets may bind a reused address; only listening claims it.
        sock.listen()
    except OSError as error:
        sock.close()
        why = "is in use; choose another with --port" if error.errno == 98 else f"cannot be used ({error.strerror})"
        raise StartupError(f"port {port} on {host} {why}.") from None
    return sock


def _listen_unix(path: str) -> Listener:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            if probe.connect_ex(path) == 0:
                raise StartupError(f"--uds {path} is in use.")
            os.unlink(path)
    sock = Listener(socket.AF_UNIX)
    try:
        sock.bind(path)
        sock.listen()
    except OSError as error:
        sock.close()
        raise StartupError(f"--uds {path} cannot be used ({error.strerror}).") from None
    return sock


def format_address(sock: socket.socket, tls: bool) -> str:
    """Returns the URL at which ``sock`` listens."""
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix socket {name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'https' if tls else 'http'}://{host}:{name[1]}"


def is_reachable(sock: socket.socket) -> bool:
    """Returns True if other machines may reach ``sock``."""
    name = sock.getsockname()
    if isinstance(name, str):
        return False
    return not ipaddress.ip_address(name[0].partition("%")[0]).is_loopback


def raise_file_limit() -> None:
    """Raises the limit of descriptors as far as the system allows; the soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


LOOK_EVERY = 5.0
"""Seconds between checks of the files."""
PASSPHRASE = "the key has a passphrase; give one without"


class ReloadableContext(ssl.SSLContext):
    """A context for asyncio whose new connections use ``current``; open ones keep theirs.

    Loading a certificate into a context in use would change half of it if the key does not match, and authorities could
    only be added; so each reload makes a new context.
    """

    current: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Wraps one connection with the current context."""
        return self.current.wrap_bio(*args, **kwargs)


class Certificates:
    """The certificate files of ``server`` and the context made from them.

    Raises:
        StartupError: a file is missing or wrong, or has no authority although clients need a certificate.
    """

    def __init__(self, server: ServerConfig) -> None:
        if server.ssl_cert_reqs and not server.ssl_ca_certs:
            raise StartupError(
                f"--ssl-cert-reqs {server.ssl_cert_reqs} needs --ssl-ca-certs, which sign clients' certificates."
            )
        self._server = server
        self._seen = self._get_mtimes()
        self.context = ReloadableContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.current = self._make_context()

    def reload(self) -> None:
        """Reads the files again; if one is wrong, the previous ones stay in use, with a warning."""
        self._seen = self._get_mtimes()
        try:
            self.context.current = self._make_context()
        except StartupError as error:
            log.warning("%s The certificate read before stays in use.", error)
        else:
            log.info("--ssl-certfile %s: read again", self._server.ssl_certfile)

    async def watch(self, every: float = LOOK_EVERY, changed: Callable[[], None] | None = None) -> None:
        """Reads the files again when one has changed. A change is read once it is ``every`` seconds old.

        Certificate and key are two files: between their replacements they do not match.
        """
        before = self._seen
        while True:
            await asyncio.sleep(every)
            now = self._get_mtimes()
            if now != self._seen and now == before:
                (changed or self.reload)()
            before = now

    def _list_files(self) -> list[str]:
        server = self._server
        return [path for path in (server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs) if path]

    def _find_flag(self, path: str) -> str:
        server = self._server
        flags = {server.ssl_ca_certs: "--ssl-ca-certs", server.ssl_keyfile: "--ssl-keyfile"}
        return flags.get(path, "--ssl-certfile")

    def _get_mtimes(self) -> list[FileStamp]:
        return [read_stamp(path) for path in self._list_files()]

    def _make_context(self) -> ssl.SSLContext:
        server = self._server
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for path in self._list_files():
            try:
                check_regular(path)
            except OSError as error:
                raise StartupError(f"{self._find_flag(path)} {path}: {error.strerror}.") from None
        try:
            # Without a function for the passphrase OpenSSL would ask at the terminal.
            made.load_cert_chain(server.ssl_certfile, server.ssl_keyfile or None, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            why = PASSPHRASE if _needs_passphrase(server.ssl_keyfile or server.ssl_certfile) else _describe_error(error)
            raise StartupError(f"--ssl-certfile {server.ssl_certfile}: {why}.") from None
        if server.ssl_ca_certs:
            try:
                made.load_verify_locations(server.ssl_ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise StartupError(f"--ssl-ca-certs {server.ssl_ca_certs}: {_describe_error(error)}.") from None
        made.verify_mode = ssl.VerifyMode(server.ssl_cert_reqs)
        try:
            if server.ssl_ciphers:
                made.set_ciphers(server.ssl_ciphers)
        except ssl.SSLError:
            raise StartupError(f"--ssl-ciphers {server.ssl_ciphers}: OpenSSL knows none of these.") from None
        return made


def _needs_passphrase(path: str) -> bool:
    """Returns True if a key in PEM form needs a passphrase, which OpenSSL's errors do not show."""
    try:
        with open(path, errors="replace") as file:
            return "ENCRYPTED" in file.read(1 << 16)
    except OSError:
        return False


def _describe_error(error: OSError) -> str:
    """Describes an error of reading a certificate or key in a few words."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key (--ssl-keyfile) belongs to another certificate"
    return f"no certificate and key in PEM form ({error.reason or 'unreadable'})"
