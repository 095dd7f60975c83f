"""The kind of card behind this package: its name, torch's module for it, and what differs between such modules.

Launches, graphs and kernels ask the accelerator in use for streams, events, graphs, memory and architectures; none of
them names a module of torch. NVIDIA's is ``Accelerator``. A package for cards that torch has in another module, such as
``torch.xpu``, makes a subclass of it and gives it to ``make_backend``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Protocol, cast

import torch


class TorchGraph(Protocol):
    """A graph of torch's, empty or captured."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None: ...

    def capture_end(self) -> None: ...

    def pool(self) -> object: ...

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Accelerator:
    """NVIDIA cards; a subclass sets the names, and replaces the methods whose calls its module of torch lacks.

    Attributes:
        name: torch's type of device, and the name of the device for users.
        graph_type: name of the class of graphs in torch's module.
        internals: how names of functions of torch's C library for these cards begin.
        collectives: torch's library of collectives for these cards.
    """

    name = "cuda"
    graph_type = "CUDAGraph"
    internals = "_cuda_"
    collectives = "nccl"

    @property
    def module(self) -> ModuleType:
        """torch's module for these cards, whose calls all such modules have: streams, events, memory, devices."""
        return cast(ModuleType, getattr(torch, self.name))

    def internal(self, name: str) -> Callable[..., object] | None:
        """Returns a function of torch's C library, such as ``hasPrimaryContext``; None if this torch has none."""
        found: Callable[..., object] | None = getattr(torch._C, self.internals + name, None)
        return found

    def make_graph(self) -> TorchGraph:
        """Returns an empty graph."""
        return cast(TorchGraph, getattr(self.module, self.graph_type)())

    @property
    def runs_ptx(self) -> bool:
        """True if kernels may hold instructions of PTX and calls of Triton's ``extra.cuda``; False: they take the
        portable way, which gives the same values.
        """
        return self.name == "cuda"

    def processors(self, device: torch.device) -> int:
        """Returns how many programs of a kernel run at a time."""
        return int(self.module.get_device_properties(device).multi_processor_count)

    def architecture(self, device: torch.device) -> int:
        """Returns the number by which the tables of tiles know the card: compute capability x 10."""
        major, minor = self.module.get_device_capability(device)
        return int(major * 10 + minor)

    def can_access_peer(self, device: int, other: int) -> bool:
        """Returns True if card ``device`` reads and writes the memory of card ``other``."""
        return bool(self.module.can_device_access_peer(device, other))

    def lock_pages(self, address: int, size: int) -> Callable[[int], object] | None:
        """Locks host memory, so that copies from it run asynchronously; returns the function that unlocks an address,
        or None where the driver refuses.
        """
        driver = self.module.cudart()
        return None if int(driver.cudaHostRegister(address, size, 0)) else driver.cudaHostUnregister

    def raise_at_waits(self, on: bool) -> None:
        """Makes torch raise at calls that wait for the card, or not."""
        self.module.set_sync_debug_mode("error" if on else "default")


class _Chosen:
    """The accelerator of this process: kernels are functions, which no object can be handed to."""

    accelerator = Accelerator()


def use(accelerator: Accelerator) -> None:
    """Makes ``accelerator`` the one of this process."""
    _Chosen.accelerator = accelerator


def in_use() -> Accelerator:
    """Returns the accelerator of this process; NVIDIA's where none was chosen."""
    return _Chosen.accelerator
