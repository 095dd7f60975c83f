"""Memory that the ranks of one host reach on each other's cards, by torch's symmetric memory; or why there is none."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.cuda.kernels.peers import shards, sums
from trencadis.backends.cuda.kernels.peers.sums import PeerRoom

ALIGNMENT = 256
"""Bytes; buffers begin at multiples."""

LEAST_VALUE = 2
"""Bytes of the shortest value: the longest message has so many more programs."""


def unreachable(names: Sequence[str], devices: Sequence[int], rank: int, reaches: Callable[[int, int], bool]) -> str:
    """Why a rank cannot read the others' memory; empty where it can.

    Args:
        names, devices: of each rank, its host and its card there.
    """
    for other, (name, device) in enumerate(zip(names, devices, strict=True)):
        if other == rank:
            continue
        if name != names[rank]:
            return f"ranks {rank} and {other} are on two hosts"
        if device == devices[rank]:
            return f"ranks {rank} and {other} share a card"
        if not reaches(devices[rank], device):
            return f"card {devices[rank]} does not reach the memory of card {device}"
    return ""


class PeerSums:
    """Sums of small messages in one rank's rooms.

    Args:
        once: of sums in one step; ``twice``: of those in two steps, where so many ranks have them.
    """

    def __init__(self, once: PeerRoom, twice: PeerRoom | None = None) -> None:
        self._once, self._twice = once, twice

    def takes(self, x: Tensor) -> bool:
        """Whether one or two steps sum x; what they do not take, the library sums."""
        wanted = shards.steps(x.nbytes, self._once.world)
        if wanted == 2:
            return self._twice is not None and shards.takes(x, self._twice)
        return wanted == 1 and sums.takes(x, self._once)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks of a message that ``takes`` named, with ``residual``."""
        if shards.steps(x.nbytes, self._once.world) == 2:
            assert self._twice is not None
            return shards.all_reduce(x, self._twice, residual)
        return sums.all_reduce(x, self._once, residual)


def opened(group: Any, host: Any, rank: int, world: int, device: torch.device) -> tuple[PeerSums | None, str]:
    """(a rank's sums, "") or (None, why); collective: all ranks have them, or none has.

    Args:
        group, host: process groups of the ranks, of cards and of their hosts.
    """
    told: list[Any] = [None] * world
    torch.distributed.all_gather_object(told, (socket.gethostname(), device.index or 0), group=host)
    names, devices = zip(*told, strict=True)
    why = unreachable(names, devices, rank, torch.cuda.can_device_access_peer)
    if not (why := _agreed(why, host, world)):
        made, why = _made(group, rank, world, device)
        if not (why := _agreed(why, host, world)):
            return None if made is None else PeerSums(*made), ""
    return None, f"small sums over ranks go over NCCL: {why}"


def _agreed(why: str, host: Any, world: int) -> str:
    """The first rank's reason that has one."""
    told: list[Any] = [None] * world
    torch.distributed.all_gather_object(told, why, group=host)
    return next(filter(None, told), "")


def _made(group: Any, rank: int, world: int, device: torch.device) -> tuple[list[PeerRoom] | None, str]:
    """The rooms of all steps in one allocation; zeros before any rank goes on."""
    try:
        from torch.distributed import _symmetric_memory as symmetric

        sizes = [room_bytes(step, world) for step in ((1, 2) if world >= shards.LEAST_RANKS else (1,))]
        held = symmetric.empty(sum(sizes), dtype=torch.uint8, device=device)
        held.zero_()
        everyone: Any = group or torch.distributed.group.WORLD
        handle = symmetric.rendezvous(held, group=everyone)
        torch.cuda.synchronize(device)
        torch.distributed.barrier(group=group)
        views = [handle.get_buffer(i, (held.numel(),), torch.uint8, 0) for i in range(world)]
    except Exception as error:  # an alpha interface: whatever it says, NCCL serves
        return None, f"torch's symmetric memory: {str(error).strip().splitlines()[0][:120] or type(error).__name__}"
    each = [torch.split(view, sizes) for view in views]
    return [room_of([parts[i] for parts in each], rank, device, i + 1) for i in range(len(sizes))], ""


_HELD: list[Any] = []
"""Buffers of rooms: they live as long as the process, for graphs hold their addresses."""


def _parts(step: int, world: int) -> tuple[int, int, int]:
    """(bytes of the longest message, bytes behind it, programs) of sums in ``step`` steps."""
    if step == 1:
        return sums.MOST, sums.MOST, sums.programs(sums.MOST // LEAST_VALUE)
    count = shards.programs(shards.MOST // LEAST_VALUE, world)
    return shards.MOST, 4 * sums.BLOCK * count, count


def room_bytes(step: int, world: int) -> int:
    """Bytes of a rank's buffer for sums in ``step`` steps: messages, what follows them, flags."""
    message, behind, count = _parts(step, world)
    return -(-(message + behind + 4 * count * world) // ALIGNMENT) * ALIGNMENT


def room_of(views: Sequence[torch.Tensor], rank: int, device: torch.device, step: int = 1) -> PeerRoom:
    """The room of a rank that sees all ranks' buffers, of ``room_bytes`` each, as ``views``, uint8 each."""
    world = len(views)
    _HELD.append(views)
    starts = [view.data_ptr() for view in views]
    message, behind, count = _parts(step, world)
    assert views[0].numel() >= room_bytes(step, world) and message % sums.BLOCK == 0
    messages, flags = (
        torch.tensor([start + more for start in starts], device=device) for more in (0, message + behind)
    )
    return PeerRoom(rank, world, messages, flags, torch.zeros(count, dtype=torch.int32, device=device), message)
