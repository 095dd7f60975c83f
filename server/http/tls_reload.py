"""TLS whose certificates can be replaced while the server runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

from trencadis.core.errors import StartupError
from trencadis.server.config.config import ServerConfig
from trencadis.server.tenants.tenant_registry import FileStamp, read_stamp

log = logging.getLogger("trencadis.server")
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

    def _get_mtimes(self) -> list[FileStamp]:
        return [read_stamp(path) for path in self._list_files()]

    def _make_context(self) -> ssl.SSLContext:
        server = self._server
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
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
