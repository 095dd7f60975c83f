"""Streams, events, pinned memory and graphs of a card, by the accelerator in use: only this module and ``graph_pool``
use them.

Programs run on one stream, copies to the device on a second, copies from it on a third, copies of weights within a
launch on a fourth; events order them. Tests make
the same calls to ``twin.twin_runtime.TwinRuntime``, which records them, so their order is checked without a card.

Counter of the kernels that Triton compiles: after warm-up the number must not grow.
"""

from __future__ import annotations

import gc
import math
import mmap
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from triton import knobs

from trencadis.backends.cuda.graph_pool import CapturedGraphs, CudaGraph, GraphPool, discard_failed_capture
from trencadis.backends.cuda.kernels.gpu_platform import Accelerator, TorchGraph, in_use
from trencadis.backends.cuda.runtime_protocol import Array, Graph, Stream
from trencadis.backends.fault_injection_hooks import Hooks
from trencadis.core.device.backend import Body, Memory, OutOfDeviceMemory
from trencadis.core.graphs.graph_manager import EventStopwatch


class CompileCounter:
    """Counts the kernels that this process compiles or loads after the first instance was made."""

    _counts: ClassVar[Counter[str]] = Counter()
    _watching = False

    def __init__(self) -> None:
        if not CompileCounter._watching:
            CompileCounter._watching = True
            before = knobs.runtime.jit_post_compile_hook

            def hook(**event: object) -> bool | None:
                CompileCounter._counts[_name(event)] += 1
                return None if before is None else before(**event)

            knobs.runtime.jit_post_compile_hook = hook
        self._begun = self._counts.copy()

    def count(self) -> int:
        """Returns the compilations since this object was made; compiled kernels serve all backends of the process."""
        return self._counts.total() - self._begun.total()

    def names(self) -> dict[str, int]:
        """Returns compilations by kernel, for the log line that names recompiled kernels."""
        return dict(self._counts - self._begun)


def _name(event: Mapping[str, object]) -> str:
    return str(getattr(event.get("fn"), "name", "") or event.get("repr", "kernel"))


T = TypeVar("T")

LARGE = 128 << 20
"""From this many bytes on, page-locked memory is not allocated by torch, which would lock the next power of two and
keep it.
"""

PAGE = mmap.PAGESIZE


@contextmanager
def _no_sync() -> Iterator[None]:
    """Makes torch raise at calls that wait for the card."""
    cards = in_use()
    cards.raise_at_waits(True)
    try:
        yield
    finally:
        cards.raise_at_waits(False)


class CudaMemory:
    """Memory of the card in bytes, as the driver reports it; the reserve of torch's allocator counts as used."""

    def __init__(self, device: torch.device, cards: Accelerator) -> None:
        self._device, self._cards = device, cards

    def total(self) -> int:
        return int(self._cards.module.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(self._cards.module.mem_get_info(self._device)[0])

    def real_kv_bytes(self) -> int | None:
        """Returns None: all memory of the device is real."""
        return None


class CudaRuntime:
    """Implements ``Runtime`` by torch's module for the cards.

    The stream of programs becomes the current stream of the thread that makes the runtime: torch's allocator keeps
    freed memory by stream, so launches can reuse what the start-up freed.
    """

    graphs = True
    interprets = False

    def __init__(self, device: torch.device, cards: Accelerator | None = None) -> None:
        self._cards = cards or in_use()
        self._torch = self._cards.module
        if device.index is None:  # several calls of torch refuse a device without an index
            device = torch.device(self._cards.name, self._torch.current_device())
        self._torch.set_device(device)
        name = self._torch.get_device_properties(device).name
        self.device, self.label = device, f"{self._cards.name} ({name})"
        self.processors = self._cards.processors(device)
        self.memory: Memory = CudaMemory(device, self._cards)
        self.hooks = Hooks(no_sync=_no_sync)
        self._compiled = CompileCounter()
        self._streams = {stream: self._torch.Stream(device) for stream in Stream}
        self._captured = CapturedGraphs(device, self._cards)
        self._torch.set_stream(self._streams[Stream.PROGRAMS])

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
        """Allocates uint8 [size] on pages of its own, locked as long as a tensor uses them; None if the driver
        refuses.
        """
        whole = -(-size // PAGE) * PAGE
        held: Any = np.empty(whole + PAGE, np.uint8)
        begin = -held.ctypes.data % PAGE
        address = held.ctypes.data + begin
        with self._torch.device(self.device):
            unlock = self._cards.lock_pages(address, whole)
            if unlock is None:
                with suppress(RuntimeError):  # torch reports the error at its next kernel: let that be this one
                    torch.empty(1, device=self.device).fill_(0)
                return None
        weakref.finalize(held, unlock, address).atexit = False
        return torch.from_numpy(held)[begin : begin + size]

    def event(self) -> Any:
        return self._torch.Event()

    def start_stopwatch(self) -> EventStopwatch:
        return EventStopwatch(lambda: self._torch.Event(enable_timing=True), self._streams[Stream.PROGRAMS])

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

    def launch(self, name: str, body: Body, inputs: object, static: Tensor) -> Any:
        with self._programs():
            return body(inputs)

    def on_captures(self, call: Callable[[], T]) -> T:
        return self._captured.on_thread(call)

    def capture(self, pool: str, name: str, body: Body, inputs: object, static: Tensor) -> CudaGraph:
        return self._captured.on_thread(lambda: self._capture(pool, body, inputs))

    def _capture(self, pool: str, body: Body, inputs: object) -> CudaGraph:
        """Captures without torch's context manager ``graph``, which empties torch's cache first, so that the cost could
        not be measured.
        """
        gc.collect()
        self._torch.synchronize(self.device)
        with self._captured.capture(pool) as memory:
            graph = self._cards.make_graph()
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

    def _end(self, graph: TorchGraph, memory: GraphPool) -> None:
        """Ends a capture. If that fails, the next graphs of the stage use another pool."""
        try:
            graph.capture_end()
        except BaseException:
            self._captured.abandon(memory)
            discard_failed_capture(graph, memory, self.device.index, self._cards)
            raise

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, CudaGraph)
        with self._programs():
            graph.graph.replay()

    def release(self, graph: Graph) -> None:
        assert isinstance(graph, CudaGraph)
        self._torch.synchronize(self.device)
        graph.out = None
        graph.end()
        self._torch.empty_cache()

    def release_bytes(self, count: int) -> None:
        """Does nothing: the driver accounts for memory."""

    def compilations(self) -> int:
        return self._compiled.count()

    def synchronize(self) -> None:
        self._torch.synchronize(self.device)

    def _on(self, stream: Stream) -> AbstractContextManager[object]:
        """Returns a context in which ``stream`` is the thread's current one.

        torch then returns to the card that was current, which in a new thread is card 0. If the process has no context
        there,
        CUDA would create one, of some 500 MiB; such a thread stays on this card instead.
        """
        current = self._torch.current_device()
        if current != self.device.index:
            known = self._cards.internal("hasPrimaryContext")
            if known is None or not known(current):
                self._torch.set_device(self.device)
        scope: AbstractContextManager[object] = self._torch.stream(self._streams[stream])
        return scope

    def _programs(self) -> LaunchScope:
        return LaunchScope(self._on(Stream.PROGRAMS))


class LaunchScope:
    """Context of a launch: on a stream, without gradients; converts torch's out-of-memory error to the engine's.

    This is no generator: with Python 3.12 its frame, which is part of the traceback, leads to the frame that holds the
    error, so that a launch's tensors would stay until garbage collection, while the launch is retried.
    """

    def __init__(self, stream: AbstractContextManager[object]) -> None:
        self._stream, self._grad = stream, torch.no_grad()

    def __enter__(self) -> None:
        self._stream.__enter__()
        self._grad.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._grad.__exit__(None, None, None)
        self._stream.__exit__(None, None, None)
        if isinstance(error, RuntimeError) and (lack := _lack(error)):
            raise OutOfDeviceMemory(lack) from error


def _lack(error: BaseException | None) -> str:
    """Returns the message of the out-of-memory error that caused ``error``; "" if there is none.

    Ending a broken capture raises another error over it. The error itself is not returned: in a frame of its own
    traceback
    it would keep the launch's tensors alive.
    """
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return "" if error is None else str(error) or "CUDA out of memory"
