"""The graphs of one capture stream: their pools of memory, their cuBLAS workspaces, and the thread that captures them.

torch keeps a cuBLAS workspace for each stream; the products of a graph hold its address. ``CUDAGraph.reset`` and its
destructor free the workspaces of the graph's stream, even if other graphs hold them (pytorch #193402). Where torch
keeps them for each thread as well (pytorch #180283), the end of a thread frees its own. Three rules keep every address
valid:

* **Each graph works in a workspace of its own pool.** Workspaces are dropped before and after a capture, so that the
first product of a capture takes one from the pool that is being recorded into, as any tensor would. Memory of a pool
lives as long as a graph of it, whichever code drops the workspace. So graphs end one by one.
* Where torch has no call that drops workspaces, graphs share one, and **end together**: a graph that is released, or
  whose capture failed, is kept until no graph is left to replay.
* **One thread captures, and lives as long as a graph does.** Products run once on it before they are captured, since
  cuBLAS has a handle for each thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from trencadis.backends.cuda.kernels.gpu_platform import Accelerator, TorchGraph
from trencadis.core.executor.executor_interface import SerialThread

T = TypeVar("T")


class GraphPool:
    """The memory that graphs of one pool share, by torch's handle. Memory and handle end with the last graph: torch
    accepts a handle again only while a graph uses it.
    """

    def __init__(self, name: str, cards: Accelerator) -> None:
        self.name, self.handle = name, cards.module.graph_pool_handle()
        self.graphs = 0


class CudaGraph:
    """A captured graph, and outputs that keep their addresses while it lives; ``end`` or garbage collection releases
    it.
    """

    def __init__(self, graph: TorchGraph, out: Any, memory: GraphPool, end: Callable[..., None]) -> None:
        self.graph, self.out, self.memory = graph, out, memory
        self.end = weakref.finalize(self, end, graph, memory)
        self.end.atexit = False


RESET_RELEASES = 2, 14
"""First version of torch whose ``reset`` releases the pool of a capture that could not be ended (pytorch #190348)."""

_FAILED_CAPTURES: list[TorchGraph] = []
"""Graphs whose capture could not be ended, kept alive: before pytorch #180395 a filter in torch's allocator of pinned
memory goes on calling the graph.
"""


def discard_failed_capture(graph: TorchGraph, memory: GraphPool, device: int, cards: Accelerator) -> None:
    """Cleans up after a failed ``capture_end``, so that the allocator stops recording into the pool. Depending on the
    release, torch does none of it, some, or all; a pool released twice would be freed while graphs use it.
    """
    end, release = cards.internal("endAllocateToPool"), cards.internal("releasePool")
    with suppress(RuntimeError):  # since pytorch #180395 the recording has already ended
        if end is not None:
            end(device, memory.handle)
    try:
        graph.pool()
    except RuntimeError:
        _FAILED_CAPTURES.append(graph)
        before = tuple(int(part) for part in torch.__version__.split(".")[:2]) < RESET_RELEASES
        if before and release is not None:
            release(device, memory.handle)
    # Otherwise the capture has ended, but the graph ran out of memory: ``reset`` releases the pool.


class CapturedGraphs:
    """Owns the graphs of one capture stream, their memory pools and the thread that captures them.

    Args:
        device: the card, with its index.
        cards: the kind of it.
    """

    def __init__(self, device: torch.device, cards: Accelerator) -> None:
        self._cards = cards
        self._drop = cards.internal("clearCublasWorkspaces")
        self._pools: dict[str, GraphPool] = {}
        self._live = 0
        self._ended: list[tuple[TorchGraph, GraphPool]] = []
        self._recording = False
        # garbage collection may end a graph at any time, in any thread, including this one
        self._lock = threading.RLock()
        self._capture_thread = SerialThread("captures")
        self._thread = self.on_thread(threading.get_ident)
        self.on_thread(lambda: cards.module.set_device(device))
        weakref.finalize(self, self._capture_thread.end, 0.0).atexit = False

    def on_thread(self, call: Callable[[], T]) -> T:
        """Runs ``call()`` on the capture thread and returns its result."""
        if threading.get_ident() == getattr(self, "_thread", None):
            return call()
        calls, results, done = [call], list[tuple[Any, BaseException | None]](), threading.Event()

        def work() -> None:  # keeps no result: the thread holds the function until the next one
            try:
                results.append((calls.pop()(), None))
            except BaseException as error:
                results.append((None, error))
            done.set()

        del call
        self._capture_thread.put(work)
        done.wait()
        result, failure = results.pop()
        try:
            if failure is not None:
                raise failure
            return result  # type: ignore[no-any-return]
        finally:
            del failure

    @contextmanager
    def capture(self, name: str) -> Iterator[GraphPool]:
        """Yields the pool of a graph that is captured inside the context.

        The graph counts from now on, so that graphs which end during the capture do not end the pool; they end after
        it.
        """
        with self._lock:
            self._recording = True
            memory = self._pools.setdefault(name, GraphPool(name, self._cards))
            memory.graphs += 1
            self._live += 1
        self._drop_workspaces()
        try:
            yield memory
        finally:
            self._drop_workspaces()
            with self._lock:
                self._recording = False
                self._sweep()

    def abandon(self, memory: GraphPool) -> None:
        """Makes later graphs use another pool; existing graphs keep theirs."""
        if self._pools.get(memory.name) is memory:
            del self._pools[memory.name]

    def end(self, graph: TorchGraph, memory: GraphPool) -> None:
        """Releases ``graph``, which is not replayed again."""
        with self._lock:
            self._ended.append((graph, memory))
            self._live -= 1
            self._sweep()

    def _sweep(self) -> None:
        """Resets released graphs.

        Does nothing during a capture; if graphs share a workspace, waits until the last one has ended.
        """
        if self._recording or (self._drop is None and self._live):
            return
        over, self._ended = self._ended, []
        for graph, memory in over:
            with suppress(RuntimeError):  # a graph of a failed capture may refuse to reset; the others end nevertheless
                graph.reset()
            memory.graphs -= 1
            if not memory.graphs:
                self.abandon(memory)

    def _drop_workspaces(self) -> None:
        """Frees torch's cuBLAS workspaces, of all threads or of this one, depending on the torch release."""
        if self._drop is not None:
            self._drop()
