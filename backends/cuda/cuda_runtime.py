"""Streams, events, pinned memory and graphs of an NVIDIA card: only this module and ``captured`` touch them.

Programs run on one stream, copies to the device on a second, copies from it on a third, copies of weights within a
launch on a fourth; events order them. Tests make
the same calls to ``twin.device.TwinRuntime``, which records them, so their order is checked without a card.
"""

from __future__ import annotations

import gc
import math
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.cuda.compile_counter import CompileCounter
from trencadis.backends.cuda.graph_pool import CapturedGraphs, CudaGraph, GraphPool, discard_failed_capture
from trencadis.backends.cuda.runtime_protocol import Array, Graph, Stream
from trencadis.backends.hooks import Hooks
from trencadis.core.backend import Memory, OutOfDeviceMemory

T = TypeVar("T")

LARGE = 128 << 20
"""Bytes of page-locked memory from which on it is not torch's: torch locks the next power of two, and keeps it."""

PAGE = mmap.PAGESIZE


@contextmanager
def _no_sync() -> Iterator[None]:
    """torch raises at calls that wait for the card."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class CudaMemory:
    """Bytes as the driver reports them; what torch's allocator holds in reserve counts as taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def real_kv_bytes(self) -> int | None:
        """Returns None: all memory of the device is real."""
        return None


class CudaRuntime:
    """``Runtime`` over torch.cuda.

    The stream of programs becomes the current stream of the thread that makes the runtime: torch's allocator keeps
    freed memory by stream, so launches can reuse what the start-up freed.
    """

    graphs = True
    interprets = False

    def __init__(self, device: torch.device) -> None:
        if device.index is None:  # which several calls of torch refuse
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        self.device, self.label = device, f"cuda ({properties.name})"
        self.processors: int = properties.multi_processor_count
        self.memory: Memory = CudaMemory(device)
        self.hooks = Hooks(no_sync=_no_sync)
        self._compiled = CompileCounter()
        self._streams = {stream: torch.cuda.Stream(device) for stream in Stream}  # type: ignore[no-untyped-call]
        self._captured = CapturedGraphs(device)
        torch.cuda.set_stream(self._streams[Stream.PROGRAMS])

    def buffer(self, size: int) -> Tensor:
        with self._on(Stream.PROGRAMS):  # another thread's current stream is not this one
            return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        area = self._lock_pages(size) if size >= LARGE else None
        if area is not None:
            return area.view(dtype).view(tuple(shape))
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def _lock_pages(self, size: int) -> Tensor | None:
        """uint8 [size] of its own pages, locked as long as a tensor lies there; None where the driver locks none."""
        whole = -(-size // PAGE) * PAGE
        held: Any = np.empty(whole + PAGE, np.uint8)
        begin = -held.ctypes.data % PAGE
        address, driver = held.ctypes.data + begin, torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            if int(driver.cudaHostRegister(address, whole, 0)):
                with suppress(RuntimeError):  # torch takes it for a failure of the next kernel: let that be this one
                    torch.empty(1, device=self.device).fill_(0)
                return None
        weakref.finalize(held, driver.cudaHostUnregister, address).atexit = False
        return torch.from_numpy(held)[begin : begin + size]

    def event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self, event: Any, stream: Stream) -> None:
        event.record(self._streams[stream])

    def wait(self, stream: Stream, event: Any) -> None:
        self._streams[stream].wait_event(event)

    def host_wait(self, event: Any) -> None:
        event.synchronize()

    def is_complete(self, event: Any) -> bool:
        return bool(event.query())

    def write(self, area: Tensor) -> Array:
        return area.numpy()

    def read(self, area: Tensor) -> Array:
        return area.numpy()

    def upload(self, target: Tensor, source: Tensor) -> None:
        with self._on(Stream.UPLOADS):
            target.copy_(source, non_blocking=True)

    def on_uploads(self, call: Callable[[], None], writes: Sequence[Tensor]) -> None:
        with self._on(Stream.UPLOADS):
            call()

    def upload_weights(self, target: Tensor, source: Tensor) -> None:
        with self._on(Stream.WEIGHTS):
            target.copy_(source, non_blocking=True)

    def download(self, target: Tensor, source: Tensor) -> None:
        # The output of a launch without a graph may be freed before the copy runs.
        source.record_stream(self._streams[Stream.DOWNLOADS])
        with self._on(Stream.DOWNLOADS):
            target.copy_(source, non_blocking=True)

    def launch(self, name: str, body: Callable[[Any], Any], inputs: Any, static: Tensor) -> Any:
        with self._programs():
            return body(inputs)

    def on_captures(self, call: Callable[[], T]) -> T:
        return self._captured.on_thread(call)

    def capture(self, pool: str, name: str, body: Callable[[Any], Any], inputs: Any, static: Tensor) -> CudaGraph:
        return self._captured.on_thread(lambda: self._capture(pool, body, inputs))

    def _capture(self, pool: str, body: Callable[[Any], Any], inputs: Any) -> CudaGraph:
        """Not by ``torch.cuda.graph``: that empties torch's cache first, and the graph's cost could not be measured."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        with self._captured.capture(pool) as memory:
            graph = torch.cuda.CUDAGraph()
            try:
                with self._programs():
                    graph.capture_begin(pool=memory.handle, capture_error_mode="thread_local")
                    try:
                        out = body(inputs)
                    finally:
                        self._end(graph, memory)
            except BaseException:
                self._captured.end(graph, memory)
                raise
            return CudaGraph(graph, out, memory, self._captured.end)

    def _end(self, graph: torch.cuda.CUDAGraph, memory: GraphPool) -> None:
        """Ends a capture. After one that cannot end, the next graphs of the stage take another pool."""
        try:
            graph.capture_end()
        except BaseException:
            self._captured.abandon(memory)
            discard_failed_capture(graph, memory, self.device.index)
            raise

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, CudaGraph)
        with self._programs():
            graph.graph.replay()

    def release(self, graph: Graph) -> None:
        assert isinstance(graph, CudaGraph)
        torch.cuda.synchronize(self.device)
        graph.out = None
        graph.end()
        torch.cuda.empty_cache()

    def release_bytes(self, count: int) -> None:
        """Does nothing: the driver accounts for memory."""

    def compilations(self) -> int:
        return self._compiled.count()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _on(self, stream: Stream) -> Any:
        """Makes a stream the thread's current one for a while. torch then goes back to the card that was current, card
        0 in a new thread, and CUDA makes a context there, of some 500 MiB, where the process has none: such a thread
        stays on this card."""
        current = torch.cuda.current_device()
        if current != self.device.index:
            known = getattr(torch._C, "_cuda_hasPrimaryContext", None)
            if known is None or not known(current):
                torch.cuda.set_device(self.device)
        return torch.cuda.stream(self._streams[stream])

    def _programs(self) -> LaunchScope:
        return LaunchScope(self._on(Stream.PROGRAMS))


class LaunchScope:
    """Runs on a stream, without gradients; torch's out-of-memory error becomes the engine's.

    No generator: with Python 3.12 its frame, which stands in the traceback, leads to the frame that holds the error,
    and what a launch held would stay until garbage is collected, while the launch is tried again.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._grad = stream, torch.no_grad()

    def __enter__(self) -> None:
        self._stream.__enter__()
        self._grad.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._grad.__exit__(None, None, None)
        self._stream.__exit__(None, None, None)
        if isinstance(error, RuntimeError) and (lack := _lack(error)):
            raise OutOfDeviceMemory(lack) from error


def _lack(error: BaseException | None) -> str:
    """What the out-of-memory error behind ``error`` says, "" if there is none: ending a broken capture raises another
    error over it. Not the error itself: in a frame of its own traceback it would keep the launch's tensors."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return "" if error is None else str(error) or "CUDA out of memory"
