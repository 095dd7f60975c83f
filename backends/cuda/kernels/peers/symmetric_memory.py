"""Memory that the ranks of one host reach on each other's cards, by torch's symmetric memory; or why there is none."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.cuda.kernels.peers import one_shot_reduce, two_shot_reduce
from trencadis.backends.cuda.kernels.peers.one_shot_reduce import PeerBuffers

ALIGNMENT = 256
"""Bytes; buffers begin at multiples."""

LEAST_VALUE = 2
"""Bytes of the shortest value: the longest message has so many more programs."""


def unreachable_reason(
    names: Sequence[str], devices: Sequence[int], rank: int, reaches: Callable[[int, int], bool]
) -> str:
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


class PeerAllReduce:
    """Sums of small messages in one rank's buffers.

    Args:
        once: of sums in one step; ``twice``: of those in two steps, where so many ranks have them.
    """

    def __init__(self, once: PeerBuffers, twice: PeerBuffers | None = None) -> None:
        self._once, self._twice = once, twice

    def can_reduce(self, x: Tensor) -> bool:
        """Whether one or two steps sum x; what they do not take, the library sums."""
        wanted = two_shot_reduce.steps(x.nbytes, self._once.world)
        if wanted == 2:
            return self._twice is not None and two_shot_reduce.can_reduce(x, self._twice)
        return wanted == 1 and one_shot_reduce.can_reduce(x, self._once)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks of a message that ``can_reduce`` named, with ``residual``."""
        if two_shot_reduce.steps(x.nbytes, self._once.world) == 2:
            assert self._twice is not None
            return two_shot_reduce.all_reduce(x, self._twice, residual)
        return one_shot_reduce.all_reduce(x, self._once, residual)


def open_peer_memory(
    group: Any, host: Any, rank: int, world: int, device: torch.device
) -> tuple[PeerAllReduce | None, str]:
    """Opens symmetric memory on all ranks: (sums, "") or (None, reason); collective, the same on every rank.

    Args:
        group, host: process groups of the ranks, of cards and of their hosts.
    """
    told: list[Any] = [None] * world
    torch.distributed.all_gather_object(told, (socket.gethostname(), device.index or 0), group=host)
    names, devices = zip(*told, strict=True)
    why = unreachable_reason(names, devices, rank, torch.cuda.can_device_access_peer)
    if not (why := _agree_reason(why, host, world)):
        made, why = _allocate_buffers(group, rank, world, device)
        if not (why := _agree_reason(why, host, world)):
            return None if made is None else PeerAllReduce(*made), ""
    return None, f"small sums over ranks go over NCCL: {why}"


def _agree_reason(why: str, host: Any, world: int) -> str:
    """Returns the reason of the lowest rank that has one; the same string on all ranks."""
    told: list[Any] = [None] * world
    torch.distributed.all_gather_object(told, why, group=host)
    return next(filter(None, told), "")


def _allocate_buffers(group: Any, rank: int, world: int, device: torch.device) -> tuple[list[PeerBuffers] | None, str]:
    """The buffers of all steps in one allocation; zeros before any rank goes on."""
    try:
        from torch.distributed import _symmetric_memory as symmetric

        sizes = [peer_buffer_bytes(step, world) for step in ((1, 2) if world >= two_shot_reduce.LEAST_RANKS else (1,))]
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
    return [make_peer_buffers([parts[i] for parts in each], rank, device, i + 1) for i in range(len(sizes))], ""


_HELD: list[Any] = []
"""Buffers of all ranks: they live as long as the process, for graphs hold their addresses."""


def _parts(step: int, world: int) -> tuple[int, int, int]:
    """(bytes of the longest message, bytes behind it, programs) of sums in ``step`` steps."""
    if step == 1:
        return one_shot_reduce.MOST, one_shot_reduce.MOST, one_shot_reduce.programs(one_shot_reduce.MOST // LEAST_VALUE)
    count = two_shot_reduce.programs(two_shot_reduce.MOST // LEAST_VALUE, world)
    return two_shot_reduce.MOST, 4 * one_shot_reduce.BLOCK * count, count


def peer_buffer_bytes(step: int, world: int) -> int:
    """Bytes of a rank's buffer for sums in ``step`` steps: messages, what follows them, flags."""
    message, behind, count = _parts(step, world)
    return -(-(message + behind + 4 * count * world) // ALIGNMENT) * ALIGNMENT


def make_peer_buffers(views: Sequence[torch.Tensor], rank: int, device: torch.device, step: int = 1) -> PeerBuffers:
    """The buffers of a rank that sees all ranks' buffers, of ``peer_buffer_bytes`` each, as ``views``, uint8 each."""
    world = len(views)
    _HELD.append(views)
    starts = [view.data_ptr() for view in views]
    message, behind, count = _parts(step, world)
    assert views[0].numel() >= peer_buffer_bytes(step, world) and message % one_shot_reduce.BLOCK == 0
    messages, flags = (
        torch.tensor([start + more for start in starts], device=device) for more in (0, message + behind)
    )
    return PeerBuffers(rank, world, messages, flags, torch.zeros(count, dtype=torch.int32, device=device), message)
