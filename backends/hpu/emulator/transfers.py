"""Copies between host and card: which memory they use, when they read and write it, and how many there were."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trencadis.backends.hpu.emulator.device_queue import DeviceQueue
from trencadis.backends.hpu.emulator.device_tensor import DeviceTensor
from trencadis.backends.hpu.emulator.int32_range import check_host

GARBAGE = 123
"""Fill value of integer host memory until a copy to it is finished."""


@dataclass
class CopyCounts:
    """Counts of copies to the card, of copies to the host, and of those that went through the driver's staging
    memory.
    """

    up: int = 0
    down: int = 0
    staged: int = 0


class Transfers:
    """The copies of one card, with the timing of pinned and of other memory.

    Pinned memory is read and written by the card itself. Other memory is staged: an upload that does not block may read
    its source late, and a fetch that does not block is finished by a thread of the host.
    """

    def __init__(self, queue: DeviceQueue, computes: bool) -> None:
        self.queue, self.computes = queue, computes
        self.counts = CopyCounts()
        self._pinned: set[int] = set()

    def pin(self, tensor: Tensor) -> Tensor:
        """Returns a copy of ``tensor`` in pinned memory: ordinary memory whose address the card knows."""
        made = tensor.detach().clone()
        address = made.untyped_storage().data_ptr()
        if address:
            self._pinned.add(address)
            weakref.finalize(made, self._pinned.discard, address)
        return made

    def is_pinned(self, tensor: Tensor) -> bool:
        """Returns True if a host tensor begins where a tensor made by ``pin`` does that still exists.

        The plug-in knows pinned memory by the address of a tensor's first element: a view into it may not be found.
        """
        return tensor.data_ptr() in self._pinned

    def upload(self, target: DeviceTensor, source: Tensor, non_blocking: bool) -> None:
        """Copies from host to card. The source is read when the copy runs."""
        check_host(source)
        self.counts.up += 1
        self.counts.staged += not self.is_pinned(source)
        self.queue.push(lambda: self.copy(target, source))
        if not non_blocking:
            self.queue.wait()

    def download(self, target: Tensor, source: DeviceTensor, non_blocking: bool) -> None:
        """Copies from card to host. Without blocking, ordinary memory holds garbage until the copy is finished."""
        pinned = self.is_pinned(target)
        self.counts.down += 1
        self.counts.staged += not pinned
        if pinned or not non_blocking:
            self.queue.push_down(lambda: self.copy(target, source))
            if not non_blocking:
                self.queue.land()
            return
        buffer = torch.empty_like(target)
        target.fill_(float("nan") if target.is_floating_point() else GARBAGE)
        self.queue.push_down(lambda: self._copy_staged(target, buffer, source))

    def copy_on_device(self, target: DeviceTensor, source: DeviceTensor, non_blocking: bool) -> None:
        """Copies from one device tensor to another."""
        self._enqueue(lambda: self.copy(target, source), non_blocking)

    def _copy_staged(self, target: Tensor, buffer: Tensor, source: DeviceTensor) -> None:
        self.copy(buffer, source)
        self.queue.land_later(lambda: target.copy_(buffer))

    def _enqueue(self, work: Callable[[], None], non_blocking: bool) -> None:
        self.queue.push(work)
        if not non_blocking:
            self.queue.wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies the values; a card without values clears a target on the host instead."""
        if not self.computes:
            if not isinstance(target, DeviceTensor):
                target.zero_()
            return
        inner = [t.held if isinstance(t, DeviceTensor) else t for t in (target, source)]
        if inner[0] is not inner[1]:
            if isinstance(target, DeviceTensor):
                target.store.untouched = False
            inner[0].copy_(inner[1])
