"""torch.distributed for the ranks of one engine, which are all on this machine and use the loopback interface."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from trencadis.core.backend import BackendConfig

TIMEOUT = timedelta(minutes=30)
"""Of collectives, in case a lost rank is not noticed by its socket."""

_joined: set[str] = set()


def loopback() -> None:
    """Keeps collectives off the network: by default they listen on the address of the host's name."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")


def join(cfg: BackendConfig, collectives: str) -> None:
    """Joins the process's default group, of all ranks, unless it exists already.

    Args:
        collectives: backends by torch's names, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.
    """
    if cfg.ranks == 1 or torch.distributed.is_initialized():
        return
    loopback()
    torch.distributed.init_process_group(
        collectives, init_method=f"file://{cfg.rendezvous}", rank=cfg.number, world_size=cfg.ranks, timeout=TIMEOUT
    )
    _joined.add(cfg.rendezvous)


def leave(rendezvous: str) -> None:
    """Destroys the group that ``join`` made with this file, so that the process may join another one."""
    if rendezvous in _joined:
        _joined.discard(rendezvous)
        torch.distributed.destroy_process_group()
