"""TLS for the links of a group: both ends present a certificate of the group's own authority."""

from __future__ import annotations

import ssl
from typing import NamedTuple

from trencadis.core.errors import StartupError


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
