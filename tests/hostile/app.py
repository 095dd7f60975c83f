"""The server's own app with another network: some names of its own, and one loopback address that counts as public.

Named by ``--app``, so that everything but the look-up of names is what ``serve`` runs.
"""

from __future__ import annotations

import asyncio
import itertools
import socket

from trencadis.multimodal.sources import http_fetch

HOST = "127.9.9.9"
"""Where the attacker's web server listens; taken for a public address."""
NAMES = {
    "hostile.example": [HOST],
    "mixed.example": [HOST, "10.0.0.1"],
    "inside.example": ["10.1.2.3"],
    "metadata.example": ["169.254.169.254"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "six.example": ["fd00:ec2::254"],
}
turns = itertools.count()


async def resolve(self, host, port):
    """Names of ours, else the system's."""
    if host == "rebind.example":
        return [HOST if next(turns) % 2 == 0 else "127.0.0.1"]
    if host == "tarpit.example":
        await asyncio.sleep(60)
    if host.endswith(".invalid"):
        raise OSError("Name or service not known: inside")
    if host in NAMES:
        return NAMES[host]
    found = await asyncio.to_thread(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    return [a[4][0] for a in found]


def install():
    """Gives this process that network."""
    public = http_fetch.is_public
    http_fetch.is_public = lambda address: str(address) == HOST or public(address)
    http_fetch.Fetcher._system_resolver = resolve


def build(settings, supervisor):
    """``wiring.build_app`` over that network."""
    from trencadis.server.processes.build_app import build_app

    install()
    return build_app(settings, supervisor)
