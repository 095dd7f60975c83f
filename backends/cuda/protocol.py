"""What a backend asks of a card: streams, events, pinned memory, launches and graphs.

``runtime.CudaRuntime`` gives it over torch.cuda, ``twin.device.TwinRuntime`` on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.hooks import Hooks
from trencadis.core.backend import Memory

Array = NDArray[Any]


class Stream(Enum):
    """What runs in order of its submission; between lanes only events order anything."""

    PROGRAMS = "programs"
    UPLOADS = "uploads"
    DOWNLOADS = "downloads"


class CudaEvent(Protocol):
    """A point of a lane; opaque. Waiting for one that was never recorded does not wait."""


class Graph(Protocol):
    """A captured launch. ``out`` is what its body returned: tensors that every replay writes again."""

    out: Any


class Runtime(Protocol):
    """What a backend asks of a card."""

    device: torch.device
    label: str
    memory: Memory
    graphs: bool
    """Whether launches can be captured."""
    interprets: bool
    """Kernels are interpreted: a launch on padding would take minutes and show nothing."""
    processors: int
    hooks: Hooks
    """What the conformance suite may ask beside."""

    def buffer(self, size: int) -> Tensor:
        """uint8 [size] that keeps its address; the zeros are written on PROGRAMS."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that copies may run from and to while the host goes on."""
        ...

    def event(self) -> CudaEvent: ...

    def record(self, event: CudaEvent, lane: Stream) -> None: ...

    def wait(self, lane: Stream, event: CudaEvent) -> None:
        """What is submitted to ``lane`` from now on runs after ``event``."""
        ...

    def host_wait(self, event: CudaEvent) -> None: ...

    def reached(self, event: CudaEvent) -> bool: ...

    def write(self, area: Tensor) -> Array:
        """A pinned area to be written by the host, now."""
        ...

    def read(self, area: Tensor) -> Array:
        """A pinned area to be read by the host, now."""
        ...

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Pinned -> device, on UPLOADS."""
        ...

    def download(self, target: Tensor, source: Tensor) -> None:
        """Device -> pinned, on DOWNLOADS."""
        ...

    def launch(self, name: str, body: Callable[[Any], Any], inputs: Any, static: Tensor) -> Any:
        """Calls ``body(inputs)`` on PROGRAMS; ``static`` is the memory that the inputs lie in."""
        ...

    def capture(self, pool: str, name: str, body: Callable[[Any], Any], inputs: Any, static: Tensor) -> Graph:
        """Records ``body(inputs)``; graphs of one ``pool`` share the memory of what lives within a launch.

        Raises:
            OutOfDeviceMemory: the pool could not grow.
        """
        ...

    def replay(self, graph: Graph) -> None:
        """On PROGRAMS."""
        ...

    def release(self, graph: Graph) -> None:
        """Gives a graph up. A device may keep its memory until the last one is given up; then that of all returns."""
        ...

    def compilations(self) -> int:
        """Kernels compiled since the runtime was made."""
        ...

    def synchronize(self) -> None: ...
