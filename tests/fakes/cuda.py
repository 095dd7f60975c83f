"""As much of ``torch.cuda`` as a capture needs, with torch's own rules about pools, streams and device indices.

What the rules are: ``CUDAGraph.capture_begin`` and ``reset`` (aten/src/ATen/cuda/CUDAGraph.cpp) and the private pools
of the caching allocator: a handle that no graph uses any more is refused as long as the allocator still knows its
memory, which it forgets when ``empty_cache`` finds all of it free.

``reset`` of a graph whose capture ended, well or not, frees the cuBLAS workspaces of the stream that it was captured
on, and so does its destructor. Every other graph captured on that stream has their address in its products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Refused(RuntimeError):
    """What torch would raise."""


class Stream:
    """A stream of one device."""

    current: Any = None

    def __init__(self, device: Any) -> None:
        self.device = device


@dataclass
class Books:
    """The allocator's: graphs by pool, pools whose memory something still holds, pools that are recorded into."""

    uses: dict[tuple[int, int], int] = field(default_factory=dict)
    held: set[tuple[int, int]] = field(default_factory=set)
    recording: set[tuple[int, int]] = field(default_factory=set)
    made: int = 0
    workspaces: dict[Stream, object] = field(default_factory=dict)
    """cuBLAS' by stream: made by the first product there."""
    invalid: bool = False
    """The next capture cannot be ended: something in it was not permitted."""
    unbuilt: bool = False
    """The next capture ends, and no graph can be made of it."""

    def handle(self) -> tuple[int, int]:
        self.made += 1
        return 0, self.made

    def workspace(self) -> object:
        """A product on the current stream."""
        return self.workspaces.setdefault(Stream.current, object())

    def end(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.recording:
            raise Refused("not recording to this pool")
        self.recording.discard(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.uses[pool] -= 1

    def empty(self) -> None:
        for pool in [p for p, count in self.uses.items() if not count and p not in self.held]:
            del self.uses[pool]


class Graph:
    """``torch.cuda.CUDAGraph``."""

    books: Books

    def __init__(self) -> None:
        self.pool: tuple[int, int] | None = None
        self.ended = False
        self.stream: Any = None
        self.workspace: object = None

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local", "other threads wait for events meanwhile"
        b = self.books
        pool = pool or b.handle()
        if not isinstance(Stream.current, Stream):
            raise Refused("CUDA graphs must be captured on a non-default stream")
        if pool in b.uses and not b.uses[pool]:
            raise Refused("INTERNAL ASSERT FAILED: use_count > 0")
        if pool in b.recording:
            raise Refused("already recording to mempool_id")
        self.pool, self.stream, self.workspace = pool, Stream.current, b.workspace()
        b.uses[pool] = b.uses.get(pool, 0) + 1
        b.recording.add(pool)

    def capture_end(self) -> None:
        assert self.pool is not None
        if self.books.invalid:
            self.books.invalid = False
            raise Refused("CUDA error: operation failed due to a previous error during capture")
        self.books.end(0, self.pool)
        self.ended = True
        if self.books.unbuilt:
            self.books.unbuilt = False
            raise Refused("CUDA error: out of memory (cudaGraphInstantiate)")

    def replay(self) -> None:
        assert self.ended
        if self.books.workspaces.get(self.stream) is not self.workspace:
            raise Refused("CUDA error: an illegal memory access was encountered (a workspace that was freed)")

    def reset(self) -> None:
        if self.ended:
            assert self.pool is not None
            self.books.workspaces.pop(self.stream, None)
            self.books.release(0, self.pool)
            self.ended = False

    def __del__(self) -> None:
        self.reset()


def install(patch: pytest.MonkeyPatch) -> Books:
    """Puts all of it in the place of ``torch.cuda``'s; returns the allocator's books."""
    books = Books()

    def indexed(device: Any) -> None:
        if not isinstance(device, int) and device.index is None:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")

    @contextmanager
    def stream(s: Any) -> Iterator[None]:
        before, Stream.current = Stream.current, s
        try:
            yield
        finally:
            Stream.current = before

    graph = type("Graph", (Graph,), {"books": books})
    fakes: dict[str, Any] = {
        "CUDAGraph": graph, "graph_pool_handle": books.handle, "Stream": Stream, "stream": stream,
        "set_device": indexed, "current_device": lambda: 0, "synchronize": lambda device=None: None,
        "get_device_properties": lambda d: SimpleNamespace(name="a card", multi_processor_count=132),
        "set_stream": lambda s: setattr(Stream, "current", s), "empty_cache": books.empty,
    }  # fmt: skip
    for name, value in fakes.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(Stream, "current", None)
    patch.setattr(torch._C, "_cuda_endAllocateToPool", books.end, raising=False)
    patch.setattr(torch._C, "_cuda_releasePool", books.release, raising=False)
    return books
