"""Finds this machine's address and interface on the route to another one."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915


def own_address(towards: str) -> str:
    """Returns this machine's address on the route to ``towards``. Nothing is sent.

    Raises:
        OSError: the name cannot be resolved, or there is no route.
    """
    family, kind, _, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(where)
        address: str = sock.getsockname()[0]
        return address


def interface(address: str) -> str:
    """Returns the interface that has ``address``; empty if none has."""
    if ":" in address:
        return _sixth(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # the interface has no IPv4 address
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    loopback = ipaddress.ip_address(address).is_loopback  # all of 127.0.0.0/8 is on the loopback interface
    return "lo" if loopback else ""


def _sixth(address: str) -> str:
    wanted = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[-1] for line in lines if line.startswith(wanted)), "")


def interface_to(host: str) -> str:
    """Returns the interface of the route to ``host``; empty if it is unknown."""
    try:
        return interface(own_address(host))
    except OSError:
        return ""
