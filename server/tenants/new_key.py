"""``trencadis key new``: makes a key for a client, and its entry for ``--api-key-file``."""

from __future__ import annotations

import argparse
import hashlib
import secrets
from collections.abc import Sequence

from trencadis.core.errors import StartupError
from trencadis.server.tenants.tenant_registry import NAME

PREFIX = "tk-"


def main(argv: Sequence[str]) -> int:
    """Prints a new key and its entry; stores nothing."""
    parser = argparse.ArgumentParser(
        prog="trencadis key", description="Makes API keys. A key is shown once; the server keeps its digest alone."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="a new key, and its entry for --api-key-file")
    new.add_argument("name", nargs="?", default="client", help="what metrics and logs call its owner")
    args = parser.parse_args(argv)
    if not NAME.fullmatch(args.name):
        raise StartupError(f"{args.name[:80]!r} is no name: it needs 1 to 64 letters, digits or any of ._@-.")
    key = PREFIX + secrets.token_urlsafe(32)
    print(f"key:  {key}\nentry for the list 'keys' of --api-key-file (chmod 600):\n")
    print(f"  - name: {args.name}\n    sha256: {hashlib.sha256(key.encode()).hexdigest()}")
    return 0
