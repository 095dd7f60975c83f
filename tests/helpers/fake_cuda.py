"""As much of ``torch.cuda`` as a capture needs, with torch's own rules about pools, streams and device indices.

What the rules are: ``CUDAGraph.capture_begin`` and ``reset`` (aten/src/ATen/cuda/CUDAGraph.cpp) and the private pools
of the caching allocator: a handle that no graph uses any more is refused as long as the allocator still knows its
memory, which it forgets when ``empty_cache`` finds all of it free.
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


@dataclass
class Books:
    """The allocator's: graphs by pool, pools whose memory something still holds, pools that are recorded into."""

    uses: dict[tuple[int, int], int] = field(default_factory=dict)
    held: set[tuple[int, int]] = field(default_factory=set)
    recording: set[tuple[int, int]] = field(default_factory=set)
    made: int = 0
    invalid: bool = False
    """The next capture cannot be ended: something in it was not permitted."""

    def handle(self) -> tuple[int, int]:
        self.made += 1
        return 0, self.made

    def end(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.recording:
            raise Refused("not recording to this pool")
        self.recording.discard(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.uses[pool] -= 1

    def empty(self) -> None:
        for pool in [p for p, count in self.uses.items() if not count and p not in self.held]:
            del self.uses[pool]


class Stream:
    """A stream of one device."""

    current: Any = None

    def __init__(self, device: Any) -> None:
        self.device = device


class Graph:
    """``torch.cuda.CUDAGraph``."""

    books: Books

    def __init__(self) -> None:
        self.pool: tuple[int, int] | None = None
        self.ended = False

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
        self.pool = pool
        b.uses[pool] = b.uses.get(pool, 0) + 1
        b.recording.add(pool)

    def capture_end(self) -> None:
        assert self.pool is not None
        if self.books.invalid:
            self.books.invalid = False
            raise Refused("CUDA error: operation failed due to a previous error during capture")
        self.books.end(0, self.pool)
        self.ended = True

    def replay(self) -> None:
        assert self.ended

    def reset(self) -> None:
        if self.ended:
            assert self.pool is not None
            self.books.release(0, self.pool)
            self.ended = False


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
