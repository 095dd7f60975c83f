"""Calls of torch that a card would run on the default stream, found on the twin: a thread that has made no stream
current works there, and no event or stream of the runtime is ordered with it.

``with watch_threads(monkeypatch) as found:`` notes every call on memory of a twin's device that comes from outside the
runtime in any thread but the one that made it, whatever starts the thread. ``found`` has a line for each kind of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trencadis.backends.cuda.cpu_twin.cuda_rules import DEFAULT_STREAM
from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinRuntime

NO_KERNEL = ("view", "_unsafe_view", "reshape", "slice", "select", "detach", "alias", "as_strided", "split", "t")
"""Calls that start no kernel and may not be marked as views."""


class StreamWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes calls of one thread on memory of a twin's device while the thread's stream is the default one."""

    def __init__(self, runtimes: list[TwinRuntime], found: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runtimes, self._found = runtimes, found

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not getattr(func, "is_view", False) and name not in NO_KERNEL:
            tensors = [x for x in tree_leaves((args, kwargs or {}, out)) if isinstance(x, Tensor)]
            for runtime in self._runtimes:
                if runtime.streams.current == DEFAULT_STREAM and any(is_held(runtime, t) for t in tensors):
                    self._found.add(f"aten.{name} on the default stream of thread {threading.current_thread().name}")
        return out


def is_held(runtime: TwinRuntime, t: Tensor) -> bool:
    """True if a tensor lies in memory of the runtime's device."""
    at = t.data_ptr()
    return any(begin <= at < end for begin, end in list(runtime.held.items()))


@contextmanager
def watch_threads(patch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Watches this thread and all that start from now on, on every runtime that is made from now on."""
    runtimes, found = list[TwinRuntime](), set[str]()
    make, run = TwinRuntime.__init__, threading.Thread.run

    def made(self: TwinRuntime, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        runtimes.append(self)

    def watched(self: threading.Thread) -> None:
        with StreamWatch(runtimes, found):
            run(self)

    patch.setattr(TwinRuntime, "__init__", made)
    patch.setattr(threading.Thread, "run", watched)
    with StreamWatch(runtimes, found):
        yield found
