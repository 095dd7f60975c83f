"""What a backend asks of a card: streams, events, pinned memory, launches and graphs.

``runtime.CudaRuntime`` gives it over torch.cuda, ``twin.device.TwinRuntime`` on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.hooks import Hooks
from trencadis.core.backend import Memory

Array = NDArray[Any]
T = TypeVar("T")


class Stream(Enum):
    """Work on one stream runs in the order of its submission; between streams only events order anything."""

    PROGRAMS = "programs"
    UPLOADS = "uploads"
    DOWNLOADS = "downloads"
    WEIGHTS = "weights"


class CudaEvent(Protocol):
    """An opaque point in a stream's work; waiting for an event that was never recorded returns at once. Waiting for
    an event that was never recorded returns at once.
    """


class Graph(Protocol):
    """A captured launch. ``out`` is what its body returned: tensors that every replay overwrites."""

    out: Any


class Runtime(Protocol):
    """What a backend asks of a card."""

    device: torch.device
    label: str
    memory: Memory
    graphs: bool
    """Whether launches can be captured."""
    interprets: bool
    """Whether Triton interprets the kernels: a launch of padding would take minutes and prove nothing."""
    processors: int
    hooks: Hooks
    """Extra checks that the conformance suite may run."""

    def buffer(self, size: int) -> Tensor:
        """uint8 [size] of zeros, written on PROGRAMS; it keeps its address."""
        ...

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked host memory: copies from and to it run while the host goes on."""
        ...

    def event(self) -> CudaEvent: ...

    def record(self, event: CudaEvent, stream: Stream) -> None: ...

    def wait(self, stream: Stream, event: CudaEvent) -> None:
        """Work submitted to ``stream`` from now on runs after ``event``."""
        ...

    def host_wait(self, event: CudaEvent) -> None: ...

    def is_complete(self, event: CudaEvent) -> bool: ...

    def write(self, area: Tensor) -> Array:
        """The array through which the host writes a pinned area now."""
        ...

    def read(self, area: Tensor) -> Array:
        """The array through which the host reads a pinned area now."""
        ...

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Pinned -> device, on UPLOADS."""
        ...

    def on_uploads(self, call: Callable[[], None], writes: Sequence[Tensor]) -> None:
        """``call()``, whose copies to ``writes`` are queued on UPLOADS."""
        ...

    def upload_weights(self, target: Tensor, source: Tensor) -> None:
        """Pinned -> device, on WEIGHTS, within a launch and in its graph."""
        ...

    def download(self, target: Tensor, source: Tensor) -> None:
        """Device -> pinned, on DOWNLOADS."""
        ...

    def launch(self, name: str, body: Callable[[Any], Any], inputs: Any, static: Tensor) -> Any:
        """Calls ``body(inputs)`` on PROGRAMS; ``static`` is the memory that the inputs lie in."""
        ...

    def on_captures(self, call: Callable[[], T]) -> T:
        """Runs ``call()`` on the capture thread; run a body there before its capture, so that libraries initialise on
        that thread. Run a body there before its capture: libraries set themselves up for each thread, and may not
        within a capture.
        """
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
        """Releases a graph. What it shares with others of its pool returns with the last of them."""
        ...

    def release_bytes(self, count: int) -> None:
        """Reports that weights of ``count`` bytes have left the device; a real card needs no notice."""
        ...

    def compilations(self) -> int:
        """Kernels compiled since the runtime was made."""
        ...

    def synchronize(self) -> None: ...
