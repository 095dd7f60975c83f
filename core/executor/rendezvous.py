"""Sets up torch.distributed for the ranks of one engine.

On one machine they share a file store and use the loopback interface; across hosts they connect to rank 0's store and
use the interface of the route to it.

Finds this machine's address and interface on the route to another one.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trencadis.core.device.backend import BackendConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.rank_info_and_fingerprint import TCP

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

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


TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives, in case a lost rank is not noticed through its socket."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")

_joined: set[str] = set()
_stores: dict[str, Store] = {}
"""Stores served by this process, by rendezvous."""

_chosen: dict[str, str] = {}
"""Environment variables set by ``restrict_interface``; values set by the user are kept."""


def serve_store(host: str, world: int) -> str:
    """Serves a store for ``world`` ranks on ``host``, an address of this machine; returns its rendezvous.

    The store and the collectives are not protected by the group's key: anyone who reaches their ports can disturb them.

    Raises:
        OSError: ``host`` is not an address of this machine.
    """
    family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind(where)
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    port = sock.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    c10d: Any = torch.distributed
    store = c10d.TCPStore(
        host, port, world, is_master=True, timeout=TIMEOUT, wait_for_workers=False, master_listen_fd=sock.detach()
    )
    rendezvous = f"{TCP}{shown}:{port}"
    _stores[rendezvous] = store
    return rendezvous


def open_store(cfg: BackendConfig) -> Store:
    """Returns the store of a group: a file store, or a client of rank 0's store."""
    restrict_interface(cfg.rendezvous)
    c10d: Any = torch.distributed
    made: Store
    if not cfg.rendezvous.startswith(TCP):
        made = c10d.FileStore(cfg.rendezvous, cfg.ranks)
        return made
    if cfg.rendezvous in _stores:
        return _stores[cfg.rendezvous]
    host, _, port = cfg.rendezvous.removeprefix(TCP).rpartition(":")
    made = c10d.TCPStore(
        host.strip("[]"), int(port), cfg.ranks, is_master=False, timeout=TIMEOUT, wait_for_workers=False
    )
    return made


def restrict_interface(rendezvous: str) -> None:
    """Binds collectives to the interface of the route to rank 0, unless the user names another one.

    By default they listen on the address of the host name.
    """
    name = "lo"
    if rendezvous.startswith(TCP):
        name = interface_to(rendezvous.removeprefix(TCP).rpartition(":")[0].strip("[]"))
    for variable in INTERFACES:
        if os.environ.get(variable, "") == _chosen.get(variable, ""):
            _chosen[variable] = name
            os.environ[variable] = name
            if not name:
                del os.environ[variable], _chosen[variable]


def join_group(cfg: BackendConfig, collectives: str) -> None:
    """Joins the process's default group, which contains all ranks, unless it exists already.

    Args:
        collectives: backends by torch's names, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.

    Raises:
        StartupError: the group is that of another engine of this process, whose ranks would wait for this one.
    """
    if cfg.ranks == 1:
        return
    if torch.distributed.is_initialized():
        if _joined and cfg.rendezvous not in _joined:
            raise StartupError(
                "an engine of several ranks is open in this process, which has one group of ranks; close it first."
            )
        return
    torch.distributed.init_process_group(
        collectives, store=open_store(cfg), rank=cfg.number, world_size=cfg.ranks, timeout=TIMEOUT
    )
    _joined.add(cfg.rendezvous)


def leave_group(rendezvous: str) -> None:
    """Destroys the group that ``join_group`` created and its store, so that the process may join another one."""
    if rendezvous in _joined:
        _joined.discard(rendezvous)
        torch.distributed.destroy_process_group()
    _stores.pop(rendezvous, None)
