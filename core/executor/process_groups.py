"""torch.distributed for the ranks of one engine: on one machine they meet over a file and use the loopback interface,
over hosts they meet at rank 0's store and use the interface of the route to it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch

from trencadis.core.backend import BackendConfig
from trencadis.core.executor.rank_info import TCP
from trencadis.core.links.network_route import interface_to

TIMEOUT = timedelta(minutes=30)
"""Of collectives, in case a lost rank is not noticed by its socket."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")

_joined: set[str] = set()
_stores: dict[str, Any] = {}
"""Stores that this process serves, by rendezvous."""

_chosen: dict[str, str] = {}
"""Variables that ``restrict_interface`` has set; what the user set is left alone."""


def serve_store(host: str, world: int) -> str:
    """Serves a store for ``world`` ranks on ``host``, an address of this machine; returns its rendezvous.

    The store and the collectives know nothing of the group's key: whoever reaches their ports may disturb them.

    Raises:
        OSError: ``host`` is no address of this machine.
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


def open_store(cfg: BackendConfig) -> Any:
    """The store of a group: a file's, or rank 0's."""
    restrict_interface(cfg.rendezvous)
    c10d: Any = torch.distributed
    if not cfg.rendezvous.startswith(TCP):
        return c10d.FileStore(cfg.rendezvous, cfg.ranks)
    if cfg.rendezvous in _stores:
        return _stores[cfg.rendezvous]
    host, _, port = cfg.rendezvous.removeprefix(TCP).rpartition(":")
    return c10d.TCPStore(
        host.strip("[]"), int(port), cfg.ranks, is_master=False, timeout=TIMEOUT, wait_for_workers=False
    )


def restrict_interface(rendezvous: str) -> None:
    """Keeps collectives on the interface that leads to rank 0, unless the user names another; by default they listen on
    the address of the host's name."""
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
    """Joins the process's default group, of all ranks, unless it exists already.

    Args:
        collectives: backends by torch's names, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.
    """
    if cfg.ranks == 1 or torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group(
        collectives, store=open_store(cfg), rank=cfg.number, world_size=cfg.ranks, timeout=TIMEOUT
    )
    _joined.add(cfg.rendezvous)


def leave_group(rendezvous: str) -> None:
    """Destroys the group that ``join_group`` made there, so that the process may join another one, and ends its
    store.
    """
    if rendezvous in _joined:
        _joined.discard(rendezvous)
        torch.distributed.destroy_process_group()
    _stores.pop(rendezvous, None)
