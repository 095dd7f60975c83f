"""The key of a group: 32 secret bytes that its processes share and that are never printed.

TLS for the links of a group: both ends present a certificate of the group's own authority.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
import stat
from typing import NamedTuple, NoReturn

from trencadis.core.errors import StartupError
from trencadis.core.operator_files import read_regular

SIZE = 32


class GroupKey:
    """Computes proofs and derives keys; ``repr``, ``str`` and pickle do not reveal the key."""

    __slots__ = ("_held",)

    def __init__(self, data: bytes) -> None:
        if len(data) != SIZE:
            raise ValueError(f"a group's key has {SIZE} bytes")
        self._held = bytes(data)

    @classmethod
    def generate(cls) -> GroupKey:
        """Returns a random key."""
        return cls(os.urandom(SIZE))

    @classmethod
    def read(cls, path: str) -> GroupKey:
        """Returns the key derived from a file: any content of 32 bytes or more, without surrounding white space.

        Raises:
            StartupError: the file cannot be read, is too short, or others than its owner may read or write it.
        """
        try:
            mode, data = os.stat(path).st_mode, read_regular(path).strip()
        except OSError as error:
            raise StartupError(f"--group-key-file {path}: {error.strerror}") from None
        if mode & 0o077:
            shown = stat.S_IMODE(mode)
            raise StartupError(f"--group-key-file {path}: others may read it (mode {shown:o}); run chmod 600.")
        if len(data) < SIZE:
            raise StartupError(
                f"--group-key-file {path}: {len(data)} bytes, and {SIZE} are needed: "
                f"head -c 32 /dev/urandom | base64 > {path}"
            )
        return cls(hashlib.blake2b(data, digest_size=SIZE, person=b"trencadis-group").digest())

    def proof(self, *parts: bytes) -> bytes:
        """Returns HMAC-SHA256 over ``parts``, each preceded by its length: 32 bytes."""
        made = hmac.new(self._held, digestmod=hashlib.sha256)
        for part in parts:
            made.update(len(part).to_bytes(4, "little"))
            made.update(part)
        return made.digest()

    def export_bytes(self) -> bytes:
        """Returns the bytes themselves, for a process of the same group."""
        return self._held

    def __repr__(self) -> str:
        return "GroupKey(***)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a group's key is never pickled")


class TlsFiles(NamedTuple):
    """Paths of PEM files; all three, or none."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    def context(self, server: bool) -> ssl.SSLContext | None:
        """Returns a TLS 1.3 context with certificates on both sides; None if there are no files. Host names are not
        checked, because the authority signs only this group's certificates.

        Raises:
            StartupError: one of the files is missing or unreadable.
        """
        if not any(self):
            return None
        if not all(self):
            raise StartupError("--group-tls-cert, --group-tls-key and --group-tls-ca belong together: name all three.")
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.check_hostname = False
        made.verify_mode = ssl.CERT_REQUIRED
        try:
            made.load_cert_chain(self.cert, self.key, password="")
            made.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise StartupError(f"--group-tls-cert, --group-tls-key or --group-tls-ca: {why}") from None
        return made
