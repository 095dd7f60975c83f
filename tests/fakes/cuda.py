"""As much of ``torch.cuda`` as a capture needs, with torch's rules about pools, streams, threads and device indices.

What the rules are: ``CUDAGraph.capture_begin`` and ``reset`` (aten/src/ATen/cuda/CUDAGraph.cpp) and the private pools
of the caching allocator: a handle that no graph uses any more is refused as long as the allocator still knows its
memory, which it forgets when ``empty_cache`` finds all of it free.

Products work in a workspace (aten/src/ATen/cuda/CublasHandlePool.cpp): one for each thread and stream, made by the
first product, and within a capture from the pool that is recorded into, so that it returns there. Whoever drops it, a
graph that was captured over it goes on using it. ``reset`` of a graph whose capture ended, well or not, drops those of
the stream that it was captured on, and so does its destructor: of all threads where the books are of one process
(torch 2.11 to 2.13), of the calling thread where they are of a thread (pytorch #180283, reverted by #193033, to come
again). There the end of a thread drops its own. A thread's first product makes a handle, which no capture permits.

A thread begins on card 0. To make a stream current takes the thread to the stream's card, and so does going back to the
stream before (torch/csrc/cuda/Module.cpp, ``THCPModule_setStream_wrap``); from CUDA 12 on that makes a context there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

Pool = tuple[int, int]

ENDS, RELEASES = (2, 13), (2, 14)
"""Versions of torch from which on a capture that fails ends the recording into its pool (pytorch #180395), and from
which on ``reset`` releases the pool of such a capture (#190348). Before, both are left to the caller, and a filter of
the host allocator stays, which points to the graph."""


class Refused(RuntimeError):
    """What torch would raise."""


class Stream:
    """A stream of one device."""

    _here = threading.local()

    def __init__(self, device: Any) -> None:
        self.device = device

    @classmethod
    def current(cls) -> Any:
        """The calling thread's."""
        return getattr(cls._here, "stream", None)

    @classmethod
    def make_current(cls, stream: Any) -> None:
        cls._here.stream = stream


@dataclass(eq=False)
class Workspace:
    """Memory that products work in; ``home``: the pool it was taken from, None for memory that anything may get."""

    home: Pool | None
    dropped: bool = False


@dataclass
class PoolAccounting:
    """The allocator's: graphs by pool, pools whose memory something still holds, pools that are recorded into."""

    threads: bool = False
    """Whether workspaces are booked by thread."""
    uses: dict[Pool, int] = field(default_factory=dict)
    held: set[Pool] = field(default_factory=set)
    recording: dict[Pool, Graph] = field(default_factory=dict)
    made: int = 0
    workspaces: dict[threading.Thread, dict[Any, Workspace]] = field(default_factory=dict)
    handles: set[threading.Thread] = field(default_factory=set)
    invalid: bool = False
    """The next capture cannot be ended: something in it was not permitted."""
    unbuilt: bool = False
    """The next capture ends, and no graph can be made of it."""
    version: tuple[int, int] = (2, 11)
    """Of torch."""
    filters: list[weakref.ref[Graph]] = field(default_factory=list)
    """By which the allocator of pinned memory tells what is allocated within a capture: each asks its graph."""
    locked: int = 0
    """Bytes of page-locked memory: torch's allocator takes powers of two (ATen/core/CachingHostAllocator.h)."""
    registered: dict[int, int] = field(default_factory=dict)
    """Memory of others that is page-locked: bytes by address."""
    lockable: bool = True
    """Whether the driver locks memory of others."""
    stale: bool = False
    """A call of CUDA has failed, and torch takes it for a failure of the next kernel that it launches."""
    contexts: set[int] = field(default_factory=set)
    """Cards on which this process has a context."""

    def handle(self) -> Pool:
        self.made += 1
        return 0, self.made

    def product(self) -> None:
        """A product on the current stream."""
        me, stream = threading.current_thread(), Stream.current()
        graph = next((g for g in self.recording.values() if g.stream is stream), None)
        if me not in self.handles:
            if graph is not None:
                raise Refused("CUBLAS_STATUS_NOT_INITIALIZED: operation not permitted when stream is capturing")
            self.handles.add(me)
        mine = self.workspaces.setdefault(me, {})
        if stream not in mine:
            mine[stream] = Workspace(None if graph is None else graph.mempool)
        if graph is not None:
            graph.workspaces.add(mine[stream])

    def drop(self, stream: Any = None) -> None:
        """Of one stream, or all, as far as this thread's books go."""
        for thread in [threading.current_thread()] if self.threads else list(self.workspaces):
            mine = self.workspaces.get(thread, {})
            for one in [stream] if stream is not None else list(mine):
                if one in mine:
                    mine.pop(one).dropped = True

    def settle(self) -> None:
        """Threads that have ended take their handle with them, and their workspaces where these are a thread's."""
        for thread in [t for t in self.workspaces if not t.is_alive()]:
            self.handles.discard(thread)
            if self.threads:
                for workspace in self.workspaces.pop(thread).values():
                    workspace.dropped = True

    def valid(self, workspace: Workspace, pool: Pool) -> bool:
        """Whether a graph of ``pool`` may work there: memory of its own pool stays with the pool's graphs."""
        if workspace.home is not None and workspace.home not in self.uses:
            return False
        return not workspace.dropped or workspace.home == pool

    def end(self, device: int, pool: Pool) -> None:
        if pool not in self.recording:
            raise Refused("not recording to this pool")
        del self.recording[pool]

    def release(self, device: int, pool: Pool) -> None:
        self.uses[pool] -= 1
        if self.uses[pool] < 0:
            raise Refused("uc >= 0 INTERNAL ASSERT FAILED")

    def check_filters(self) -> None:
        if any(graph() is None for graph in self.filters):
            raise Refused("a filter of the host allocator reads a graph that is gone")

    def empty(self) -> None:
        """``empty_cache``."""
        self.settle()
        booked = {w.home for mine in self.workspaces.values() for w in mine.values()}
        for pool in [p for p, count in self.uses.items() if not count and p not in self.held | booked]:
            del self.uses[pool]


class Graph:
    """``torch.cuda.CUDAGraph``."""

    accounting: PoolAccounting

    def __init__(self) -> None:
        self.begun = False
        self.mempool: Pool | None = None
        self.ended = False
        self.stream: Any = None
        self.workspaces: set[Workspace] = set()

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local", "other threads wait for events meanwhile"
        b = self.accounting
        pool = pool or b.handle()
        if not isinstance(Stream.current(), Stream):
            raise Refused("CUDA graphs must be captured on a non-default stream")
        if pool in b.uses and not b.uses[pool]:
            raise Refused("INTERNAL ASSERT FAILED: use_count > 0")
        if pool in b.recording:
            raise Refused("already recording to mempool_id")
        self.mempool, self.stream = pool, Stream.current()
        b.uses[pool] = b.uses.get(pool, 0) + 1
        b.recording[pool] = self
        b.check_filters()
        b.filters.append(weakref.ref(self))
        self.begun = True

    def capture_end(self) -> None:
        assert self.mempool is not None
        if self.accounting.invalid:
            self.accounting.invalid = False
            if self.accounting.version >= ENDS:
                self._end()
            raise Refused("CUDA error: operation failed due to a previous error during capture")
        self._end()
        self.ended = True
        if self.accounting.unbuilt:
            self.accounting.unbuilt = False
            raise Refused("CUDA error: out of memory (cudaGraphInstantiate)")

    def _end(self) -> None:
        assert self.mempool is not None
        self.accounting.end(0, self.mempool)
        self.accounting.filters.remove(weakref.ref(self))

    def pool(self) -> Pool:
        if not self.ended:
            raise Refused("Called CUDAGraph::pool() without a preceding successful capture.")
        assert self.mempool is not None
        return self.mempool

    def replay(self) -> None:
        assert self.ended and self.mempool is not None
        self.accounting.settle()
        if not all(self.accounting.valid(w, self.mempool) for w in self.workspaces):
            raise Refused("CUDA error: an illegal memory access was encountered (a workspace that was freed)")

    def reset(self) -> None:
        if self.ended or (self.begun and self.accounting.version >= RELEASES):
            assert self.mempool is not None
            self.accounting.drop(self.stream)
            self.accounting.release(0, self.mempool)
        self.ended = self.begun = False

    def __del__(self) -> None:
        self.reset()


def _current(books: PoolAccounting) -> dict[str, Any]:
    """Which card and stream are a thread's."""
    here = threading.local()

    def current_device() -> int:
        return getattr(here, "card", 0)

    def set_device(device: Any) -> None:
        if not isinstance(device, int) and device.index is None:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
        here.card = device if isinstance(device, int) else device.index
        books.contexts.add(here.card)

    def set_stream(s: Any) -> None:
        set_device(s.device.index or 0)
        Stream.make_current(s)

    @contextmanager
    def stream(s: Any) -> Iterator[None]:
        before, card = Stream.current(), current_device()
        set_stream(s)
        try:
            yield
        finally:
            set_device(card)
            Stream.make_current(before)

    return {"current_device": current_device, "set_device": set_device, "set_stream": set_stream, "stream": stream}


def _locked(books: PoolAccounting) -> tuple[Any, Any]:
    """(``torch.empty``, ``torch.cuda.cudart``) with page-locked memory."""
    empty = torch.empty

    def pinned_empty(*args: Any, pin_memory: bool = False, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        if device is not None and books.stale:  # whatever is made there is filled at once
            books.stale = False
            raise Refused("CUDA error: operation not supported")
        books.locked += 1 << (made.nbytes - 1).bit_length() if pin_memory else 0
        return made

    def register(address: int, size: int, flags: int) -> int:
        if not books.lockable:
            books.stale = True
            return 801
        assert address % 4096 == 0 and not size % 4096, "a page that two areas share cannot be locked twice"
        books.locked += size
        books.registered[address] = size
        return 0

    def unregister(address: int) -> int:
        books.locked -= books.registered.pop(address)
        return 0

    return pinned_empty, lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)


CALLS = (
    "CUDAGraph", "graph_pool_handle", "Stream", "cudart", "get_device_properties", "synchronize", "empty_cache",
    "device", "current_device", "set_device", "set_stream", "stream",
)  # fmt: skip
"""What ``install`` replaces of torch's module."""


def install(
    patch: pytest.MonkeyPatch, threads: bool = False, drops: bool = True, version: tuple[int, int] = (2, 11)
) -> PoolAccounting:
    """Puts all of it in the place of ``torch.cuda``'s; returns the allocator's books.

    Args:
        threads: whether workspaces are booked by thread.
        drops: whether torch has its call that drops workspaces.
        version: of torch.
    """
    books = PoolAccounting(threads, version=version)
    empty, cudart = _locked(books)
    patch.setattr(torch, "empty", empty)
    graph = type("Graph", (Graph,), {"accounting": books})
    fakes: dict[str, Any] = {
        "CUDAGraph": graph, "graph_pool_handle": books.handle, "Stream": Stream, "cudart": cudart,
        "get_device_properties": lambda d: SimpleNamespace(name="a card", multi_processor_count=132),
        "synchronize": lambda device=None: None, "empty_cache": books.empty, "device": lambda card: nullcontext(),
        **_current(books),
    }  # fmt: skip
    for name, value in fakes.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(Stream, "_here", threading.local())
    patch.setattr(torch, "__version__", f"{version[0]}.{version[1]}.0+cu130")
    patch.setattr(torch._C, "_cuda_endAllocateToPool", books.end, raising=False)
    patch.setattr(torch._C, "_cuda_releasePool", books.release, raising=False)
    patch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda card: card in books.contexts, raising=False)
    if drops:
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", books.drop, raising=False)
    else:
        patch.delattr(torch._C, "_cuda_clearCublasWorkspaces", raising=False)
    return books
