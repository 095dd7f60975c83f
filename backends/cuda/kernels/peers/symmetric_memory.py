"""Memory that the ranks of one host share between their cards, by torch's symmetric memory."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cuda.kernels.gpu_platform import in_use
from trencadis.backends.cuda.kernels.peers import one_shot_reduce, start_check, two_shot_reduce
from trencadis.backends.cuda.kernels.peers.one_shot_reduce import PeerBuffers
from trencadis.backends.cuda.kernels.peers.start_check import CapturedSums
from trencadis.core.errors import StartupError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALIGNMENT = 256
"""Buffers begin at multiples of this many bytes."""

LEAST_VALUE = 2
"""Bytes of the smallest dtype, which gives the longest message the most programs."""


def unreachable_reason(
    names: Sequence[str], devices: Sequence[int], rank: int, reaches: Callable[[int, int], bool]
) -> str:
    """Returns why a rank cannot read the others' memory; empty if it can.

    Args:
        names, devices: per rank, its host and its card there.
    """
    if not two_shot_reduce.one_step_bytes(len(names)):
        return f"{len(names)} ranks are more than sum over each other's memory"
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
    """All-reduce of small messages through one rank's buffers.

    Args:
        once: buffers of one-shot sums; ``twice``: of two-shot sums, if there are enough ranks for them.
    """

    def __init__(self, once: PeerBuffers, twice: PeerBuffers | None = None) -> None:
        self._once, self._twice = once, twice

    def can_reduce(self, x: Tensor) -> bool:
        """Returns True if one-shot or two-shot sums take x; other messages are left to NCCL."""
        if not x.is_floating_point() or x.itemsize > 4:  # sums are float32
            return False
        wanted = two_shot_reduce.steps(x.nbytes, self._once.world)
        if wanted == 2:
            return self._twice is not None and two_shot_reduce.can_reduce(x, self._twice)
        return wanted == 1 and one_shot_reduce.can_reduce(x, self._once)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, polls: int | None = None) -> Tensor:
        """Returns the sum over ranks of a message that ``can_reduce`` accepted, plus ``residual``.

        Args:
            polls: of a rank's flag before a launch leaves NaN; None: as many as take half a minute or more.
        """
        if two_shot_reduce.steps(x.nbytes, self._once.world) == 2:
            assert self._twice is not None
            return two_shot_reduce.all_reduce(x, self._twice, residual, polls)
        return one_shot_reduce.all_reduce(x, self._once, residual, polls)


def open_peer_memory(
    group: ProcessGroup | None,
    host: ProcessGroup | None,
    rank: int,
    world: int,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    capture: Callable[[Callable[[], list[Tensor]]], CapturedSums],
) -> tuple[PeerAllReduce | None, str]:
    """Opens symmetric memory on all ranks and checks the sums over it: (sums, "") or (None, reason); collective, the
    same on every rank.

    Args:
        group, host: process groups of the ranks, for cards and for hosts.
        dtypes: of messages.
        capture: captures a body, whose results are sums, as a graph.

    Raises:
        StartupError: the check has left the card in an error, so that nothing else can run either.
    """
    places: list[Any] = [None] * world
    torch.distributed.all_gather_object(places, (socket.gethostname(), device.index or 0), group=host)
    names, devices = zip(*places, strict=True)
    why = unreachable_reason(names, devices, rank, in_use().can_access_peer)
    if why := _agree_reason(why, host, world):
        return None, why
    made, why = _allocate_buffers(group, rank, world, device)
    if (why := _agree_reason(why, host, world)) or made is None:
        return None, why

    def sum_by_library(x: Tensor) -> None:
        torch.distributed.all_reduce(x, group=group)

    def agree(why: str) -> str:
        return _agree_reason(why, host, world)

    sums = PeerAllReduce(*made)
    why = start_check.find_fault(
        sums, start_check.RankCalls(rank, world, sum_by_library, agree, capture), dtypes, device
    )
    _require_usable(device, why)
    in_use().module.empty_cache()
    if not why:
        return sums, ""
    _HELD.clear()
    return None, f"the check at the start: {why}"


def _require_usable(device: torch.device, why: str) -> None:
    """Raises StartupError if the card has an error, which ends all later work of the process."""
    try:
        in_use().module.synchronize(device)
    except RuntimeError as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise StartupError(
            f"the check of sums over ranks has stopped the card ({why or text}); TRENCADIS_CUDA_PEER_SUMS=0 starts "
            "without them"
        ) from error


def _agree_reason(why: str, host: ProcessGroup | None, world: int) -> str:
    """Returns the reason of the lowest rank that has one; the same string on all ranks."""
    reasons: list[Any] = [None] * world
    torch.distributed.all_gather_object(reasons, why, group=host)
    return next(filter(None, reasons), "")


def _allocate_buffers(
    group: ProcessGroup | None, rank: int, world: int, device: torch.device
) -> tuple[list[PeerBuffers] | None, str]:
    """Allocates the buffers of all steps at once, zeroed before any rank goes on; returns (buffers, "") or (None,
    reason).
    """
    try:
        from torch.distributed import _symmetric_memory as symmetric

        sizes = [peer_buffer_bytes(step, world) for step in ((1, 2) if world >= two_shot_reduce.LEAST_RANKS else (1,))]
        held = symmetric.empty(sum(sizes), dtype=torch.uint8, device=device)
        held.zero_()
        everyone: Any = group or torch.distributed.group.WORLD
        handle = symmetric.rendezvous(held, group=everyone)
        in_use().module.synchronize(device)
        torch.distributed.barrier(group=group)
        views = [handle.get_buffer(i, (held.numel(),), torch.uint8, 0) for i in range(world)]
    except Exception as error:  # an alpha interface: NCCL is used after any error
        return None, f"torch's symmetric memory: {str(error).strip().splitlines()[0][:120] or type(error).__name__}"
    each = [torch.split(view, sizes) for view in views]
    return [make_peer_buffers([parts[i] for parts in each], rank, device, i + 1) for i in range(len(sizes))], ""


_HELD: list[Any] = []
"""Buffers of all ranks. They live as long as the process, because graphs hold their addresses."""


class _BufferParts(NamedTuple):
    """Parts of a rank's buffer: bytes of the longest message, bytes after it, and the number of programs."""

    message: int
    behind: int
    programs: int


def _parts(step: int, world: int) -> _BufferParts:
    """Returns the parts of a buffer for sums in ``step`` steps."""
    if step == 1:
        most = one_shot_reduce.MOST
        return _BufferParts(most, most, one_shot_reduce.programs(most // LEAST_VALUE))
    count = two_shot_reduce.programs(two_shot_reduce.MOST // LEAST_VALUE, world)
    return _BufferParts(two_shot_reduce.MOST, 4 * one_shot_reduce.BLOCK * count, count)


def peer_buffer_bytes(step: int, world: int) -> int:
    """Returns the bytes of a rank's buffer for sums in ``step`` steps: messages, partial sums, flags."""
    message, behind, count = _parts(step, world)
    return -(-(message + behind + 4 * count * world) // ALIGNMENT) * ALIGNMENT


def make_peer_buffers(views: Sequence[torch.Tensor], rank: int, device: torch.device, step: int = 1) -> PeerBuffers:
    """Builds the buffers of a rank from ``views``, all ranks' buffers: uint8, ``peer_buffer_bytes`` each."""
    world = len(views)
    _HELD.append(views)
    starts = [view.data_ptr() for view in views]
    message, behind, count = _parts(step, world)
    assert views[0].numel() >= peer_buffer_bytes(step, world) and message % one_shot_reduce.BLOCK == 0
    messages, flags = (
        torch.tensor([start + more for start in starts], device=device) for more in (0, message + behind)
    )
    return PeerBuffers(rank, world, messages, flags, torch.zeros(count, dtype=torch.int32, device=device), message)
