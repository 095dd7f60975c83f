"""torch.distributed for the ranks of one engine: all on this machine, over the loopback interface."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from trencadis.core.backend import BackendConfig

TIMEOUT = timedelta(minutes=30)
"""For collectives. A rank that dies is noticed by its socket; this ends what nobody notices."""

_joined: set[str] = set()


def loopback() -> None:
    """Keeps collectives off the networks: by default they listen where the host's name leads."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")


def join(cfg: BackendConfig, collectives: str) -> None:
    """Makes the process's default group, of all ranks; a group that is there already is used.

    Args:
        collectives: as torch names them, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.
    """
    if cfg.world == 1 or torch.distributed.is_initialized():
        return
    loopback()
    torch.distributed.init_process_group(
        collectives, init_method=f"file://{cfg.rendezvous}", rank=cfg.rank, world_size=cfg.world, timeout=TIMEOUT
    )
    _joined.add(cfg.rendezvous)


def leave(rendezvous: str) -> None:
    """Ends the group that ``join`` made there, so that the process may make another one."""
    if rendezvous in _joined:
        _joined.discard(rendezvous)
        torch.distributed.destroy_process_group()
