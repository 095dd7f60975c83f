"""The protocol between a backend and a card: streams, events, pinned memory, launches and graphs.

``cuda_runtime.CudaRuntime`` implements it by torch.cuda, ``twin.twin_runtime.TwinRuntime`` on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.fault_injection_hooks import Hooks
from trencadis.core.device.backend import Body, Memory
from trencadis.core.graphs.graph_manager import Stopwatch

Array = NDArray[Any]
T = TypeVar("T")


class Stream(Enum):
    """The streams of a card. Work on one stream runs in the order of its submission; only events order work between
    streams.
    """

    PROGRAMS = "programs"
    UPLOADS = "uploads"
    DOWNLOADS = "downloads"
    WEIGHTS = "weights"


class CudaEvent(Protocol):
    """An opaque point in a stream's work; waiting for an event that was never recorded returns at once."""


class Graph(Protocol):
    """A captured launch. ``out`` is what its body returned: tensors that every replay overwrites."""

    out: Any


class Runtime(Protocol):
    """The calls of a backend to its card."""

    device: torch.device
    label: str
    memory: Memory
    graphs: bool
    """True if launches can be captured."""
    interprets: bool
    """True if Triton interprets the kernels: then launches of padding, which would take minutes, are left out."""
    processors: int
    hooks: Hooks
    """Extra checks that the conformance suite may run."""

    def buffer(self, size: int) -> Tensor:
        """Returns uint8 [size] of zeros, written on PROGRAMS; its address does not change."""
        ...

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns page-locked host memory: copies from and to it run asynchronously."""
        ...

    def event(self) -> CudaEvent: ...

    def start_stopwatch(self) -> Stopwatch:
        """Starts a stopwatch on PROGRAMS."""
        ...

    def record(self, event: CudaEvent, stream: Stream) -> None: ...

    def wait(self, stream: Stream, event: CudaEvent) -> None:
        """Makes work submitted to ``stream`` from now on run after ``event``."""
        ...

    def host_wait(self, event: CudaEvent) -> None: ...

    def is_complete(self, event: CudaEvent) -> bool: ...

    def write(self, area: Tensor) -> Array:
        """Returns the array through which the host may now write a pinned area."""
        ...

    def read(self, area: Tensor) -> Array:
        """Returns the array through which the host may now read a pinned area."""
        ...

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copies from pinned memory to the device, on UPLOADS."""
        ...

    def on_uploads(self, call: Callable[[], None], writes: Sequence[Tensor]) -> None:
        """Runs ``call()``, whose copies to ``writes`` are queued on UPLOADS."""
        ...

    def upload_weights(self, target: Tensor, source: Tensor) -> None:
        """Copies from pinned memory to the device, on WEIGHTS, within a launch and in its graph."""
        ...

    def download(self, target: Tensor, source: Tensor) -> None:
        """Copies from the device to pinned memory, on DOWNLOADS."""
        ...

    def launch(self, name: str, body: Body, inputs: object, static: Tensor) -> Any:
        """Calls ``body(inputs)`` on PROGRAMS; ``static`` is the memory that contains the inputs."""
        ...

    def on_captures(self, call: Callable[[], T]) -> T:
        """Runs ``call()`` on the capture thread.

        Run a body there before its capture: libraries initialise themselves per thread, which a capture may not allow.
        """
        ...

    def capture(self, pool: str, name: str, body: Body, inputs: object, static: Tensor) -> Graph:
        """Records ``body(inputs)``; graphs of one ``pool`` share the memory of tensors that live only within a launch.

        Raises:
            OutOfDeviceMemory: the pool could not grow.
        """
        ...

    def replay(self, graph: Graph) -> None:
        """Replays a graph on PROGRAMS."""
        ...

    def release(self, graph: Graph) -> None:
        """Releases a graph. Memory that it shares with others of its pool is freed with the last of them."""
        ...

    def release_bytes(self, count: int) -> None:
        """Reports that weights of ``count`` bytes have left the device; a real card ignores it."""
        ...

    def compilations(self) -> int:
        """Returns the kernels compiled since the runtime was made."""
        ...

    def synchronize(self) -> None: ...
