"""The CPU twin of the runtime: makes the same calls at once and records them with the memory that they touch."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from trencadis.backends.cuda.cpu_twin.cuda_rules import (
    SIZE,
    CaptureError,
    CaptureOrder,
    PinnedBlocks,
    ThreadStreams,
    TwinMemory,
)
from trencadis.backends.cuda.cpu_twin.twin_recording import LaunchReads, TwinRecording
from trencadis.backends.cuda.runtime_protocol import Array, CudaEvent, Graph, Stream
from trencadis.backends.cuda.shape_policy import WORKSPACE
from trencadis.backends.fault_injection_hooks import STEP, Hooks
from trencadis.core.device.backend import Body, Memory, OutOfDeviceMemory
from trencadis.core.errors import StartupError
from trencadis.core.graphs.graph_manager import WallStopwatch

HOST = "host"
CALL = 128
"""Bytes per call of a graph: an assumption, like the twin's total memory."""

T = TypeVar("T")
Region = tuple[int, int]
"""A range of addresses, [begin, end)."""


@dataclass(frozen=True, slots=True)
class TwinCall:
    """One call of a runtime: where it runs, what it reads and writes, and the event it records or waits for."""

    kind: str
    stream: str
    name: str = ""
    event: int = 0
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()


class TwinEvent:
    """An event, identified by its number; ``asks``: how often it is asked for until it says that it is complete."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.recorded, self.asks = False, 0
        self.graph = False
        """True if it was last recorded within a capture."""


class TwinGraph:
    """A recording, its outputs, the static memory that it reads, and the bytes that it takes itself."""

    def __init__(
        self, name: str, pool: str, recording: TwinRecording, out: Any, static: Tensor, calls: Sequence[TwinCall] = ()
    ) -> None:
        self.name, self.pool, self.recording, self.out, self.static, self.calls = (
            name,
            pool,
            recording,
            out,
            static,
            calls,
        )
        self.nodes = CALL * len(recording.steps)
        self.own = self.nodes + recording.kept

    def list_outputs(self) -> list[Tensor]:
        """Returns the outputs that lie in the workspace of the graph's pool."""
        return [t for t in leaves(self.out) if id(t) in self.recording.temporary]


@dataclass
class TwinFaults:
    """Failures to inject, by (kind of call, its number from 1); and the share of a graph's bytes that its release gives
    back.
    """

    fails: dict[tuple[str, int], BaseException] = field(default_factory=dict)
    returned: float = 1.0
    leaks: int = 0
    """Bytes that a failed capture does not give back."""
    late: int = 0
    """Number of times that ``is_complete`` answers False for an event that the host has not waited for."""


FORMS = "oom@KIND:N, error@KIND:N, crash@KIND:N, late:N"
ENTRY = re.compile(r"(oom|error|crash)@(capture|launch|replay|upload|download):([1-9]\d*)")


LATE = re.compile(r"late:[1-9]\d*")


class DeviceError(RuntimeError):
    """Raised when the device is lost: none of its memory can be trusted from then on."""


def parse(text: str) -> TwinFaults:
    """Parses ``oom@capture:3,error@replay:200``: calls of a kind are counted from 1; ``crash`` ends the process.

    Raises:
        StartupError: an entry has another form.
    """
    faults = TwinFaults()
    for entry in filter(None, (e.strip() for e in text.split(","))):
        if LATE.fullmatch(entry):
            faults.late = int(entry.partition(":")[2])
            continue
        found = ENTRY.fullmatch(entry)
        if found is None:
            raise StartupError(f"TRENCADIS_CUDA_TWIN_FAULTS: {entry!r} is none of {FORMS}")
        what, kind, number = found.groups()
        faults.fails[kind, int(number)] = {
            "oom": OutOfDeviceMemory("CUDA out of memory (injected)"),
            "error": DeviceError("CUDA error: an illegal memory access was encountered (injected)"),
            "crash": SystemExit(),
        }[what]
    return faults


class TwinRuntime:
    """Implements ``Runtime`` on CPU tensors. A pool of graphs is charged for its largest launch once, as on a card.

    Args:
        graphs: True if launches can be captured.
        interprets: True if Triton interprets the kernels.
        record: the list that calls are appended to; None records nothing.
        size: bytes of memory of the simulated card.
    """

    standing: ClassVar[TwinFaults | None] = None
    """Faults of every runtime made from now on; set by tests of whole start-ups."""

    def __init__(
        self,
        graphs: bool = True,
        interprets: bool = False,
        label: str = "cuda (twin)",
        record: list[TwinCall] | None = None,
        size: int = SIZE,
    ) -> None:
        self.device = torch.device("cpu")
        self.label, self.graphs, self.interprets = label, graphs, interprets
        self.processors = 132
        self.accounted = TwinMemory(size)
        self.memory: Memory = self.accounted
        self.faults = self.standing or parse(os.environ.get("TRENCADIS_CUDA_TWIN_FAULTS", ""))
        self.hooks = Hooks(run_out=self.run_out)
        self._failing: tuple[str, ...] = ()
        self.calls = record
        self.counts: Counter[str] = Counter()
        self.pools: dict[str, list[TwinGraph]] = {}
        self._work: dict[str, int] = {}
        self._released: Counter[str] = Counter()
        self._fresh: dict[str, TwinGraph] = {}
        """Pool -> the graph that was replayed last."""
        self._kept_tensors: list[Tensor] = []
        self._shapes: set[tuple[str, ...]] = set()
        self._inner: list[TwinCall] | None = None
        """Calls of a launch that is being captured, which every replay repeats."""
        self._watched: dict[int, Tensor] = {}
        self._uploading_weights = False
        self._events = 0
        self._order: CaptureOrder | None = None
        """Streams and events of the capture in progress."""
        self._capturing_thread = 0
        self._pinned = PinnedBlocks()
        self.streams = ThreadStreams()
        self.held: dict[int, int] = {}
        """Addresses of memory of the device: end by begin."""
        self._lost: DeviceError | None = None
        """The error that lost the device; from then on every call raises it."""

    # Memory

    def buffer(self, size: int) -> Tensor:
        """Returns zeros; the host backs the pages as they are written."""
        self._note_implicit_wait("memory of the device")
        array = np.zeros(size, np.uint8)
        self.accounted.take(size)
        weakref.finalize(array, self.accounted.release, size)
        made = torch.from_numpy(array)
        self.held[made.data_ptr()] = made.data_ptr() + size
        weakref.finalize(array, self.held.pop, made.data_ptr(), None)
        self._call("zeros", Stream.PROGRAMS.value, writes=(made,))
        return made

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        array = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        if self._pinned.take(array):
            self._note_implicit_wait("page-locked memory")
        return torch.from_numpy(array).view(dtype).view(tuple(shape))

    def _note_implicit_wait(self, what: str) -> None:
        """Counts a call that waits for all of the card's work before it returns.

        It orders nothing for the checker of order: torch's allocators leave it out where they have memory.
        """
        self.counts["implicit wait"] += 1
        if self._captured is not None:
            self._captured.wait_on_host(f"allocating {what}")

    def write(self, area: Tensor) -> Array:
        self._call("host write", HOST, writes=(area,))
        return area.numpy()

    def read(self, area: Tensor) -> Array:
        self._call("host read", HOST, reads=(area,))
        return area.numpy()

    # Order

    def event(self) -> TwinEvent:
        self._events += 1
        return TwinEvent(self._events)

    def start_stopwatch(self) -> WallStopwatch:
        """Starts a stopwatch of wall time: the twin runs launches as they come."""
        return WallStopwatch()

    def record(self, event: CudaEvent, stream: Stream) -> None:
        assert isinstance(event, TwinEvent)
        if self._captured is not None:
            self._captured.record(event.number, stream.value)
        event.recorded, event.asks = True, self.faults.late
        event.graph = self._captured is not None and self._captured.owns(event.number)
        self._call("record", stream.value, event=event)

    def wait(self, stream: Stream, event: CudaEvent) -> None:
        """Makes ``stream`` wait.

        Raises:
            CaptureError: a capture waits for what is outside it, or the other way round.
        """
        assert isinstance(event, TwinEvent)
        if self._captured is not None:
            self._captured.wait(event.number, stream.value, event.recorded)
        elif event.graph:
            raise CaptureError(f"{stream.value} waits for an event that was recorded within a capture")
        self._call("wait", stream.value, event=event)

    @property
    def _captured(self) -> CaptureOrder | None:
        """The capture that binds the calling thread: a card captures in mode ``thread_local``, in which other threads
        may wait.
        """
        return self._order if threading.get_ident() == self._capturing_thread else None

    def host_wait(self, event: CudaEvent) -> None:
        assert isinstance(event, TwinEvent)
        if self._captured is not None:
            self._captured.wait_on_host("an event")
        event.asks = 0
        self._call("wait", HOST, event=event)

    def is_complete(self, event: CudaEvent) -> bool:
        """Returns True if the work before ``event`` is done: at once, or after ``TwinFaults.late`` questions."""
        assert isinstance(event, TwinEvent)
        complete = not event.asks
        event.asks -= not complete
        return complete

    def synchronize(self) -> None:
        if self._captured is not None:
            self._captured.wait_on_host("the device")
        self._call("synchronize", HOST)

    # Copies and launches

    def upload(self, target: Tensor, source: Tensor) -> None:
        self._call("upload", Stream.UPLOADS.value, reads=(source,), writes=(target,))
        with self.streams.on(Stream.UPLOADS.value):
            target.copy_(source)

    def download(self, target: Tensor, source: Tensor) -> None:
        self._call("download", Stream.DOWNLOADS.value, reads=(source,), writes=(target,))
        with self.streams.on(Stream.DOWNLOADS.value):
            target.copy_(source)

    def on_uploads(self, call: Callable[[], None], writes: Sequence[Tensor]) -> None:
        """Runs ``call()``; later reads of ``writes`` by a launch are recorded."""
        self._call("upload", Stream.UPLOADS.value, writes=writes)
        for t in writes:
            self._watched[t.data_ptr()] = max(self._watched.get(t.data_ptr(), t), t, key=Tensor.numel)
        with self.streams.on(Stream.UPLOADS.value):
            call()

    def upload_weights(self, target: Tensor, source: Tensor) -> None:
        """Copies weights; later reads of ``target`` by a launch are recorded."""
        self._call("weights", Stream.WEIGHTS.value, reads=(source,), writes=(target,))
        before = self._watched.get(target.data_ptr(), target)
        self._watched[target.data_ptr()] = max(before, target, key=Tensor.numel)
        self._uploading_weights = True
        with self.streams.on(Stream.WEIGHTS.value):
            target.copy_(source)
        self._uploading_weights = False

    def note_read(self, t: Tensor) -> None:
        """Records a read if ``t`` is in memory that uploads fill."""
        at = t.data_ptr()
        for begin, area in () if self._uploading_weights else self._watched.items():
            if begin <= at < begin + area.nbytes:
                self._call("read", Stream.PROGRAMS.value, reads=(area,))

    def launch(self, name: str, body: Body, inputs: object, static: Tensor) -> Any:
        self._shapes.add(kernel_key(name, inputs))
        with self.streams.on(Stream.PROGRAMS.value), torch.no_grad(), self._watch_reads():
            out = body(inputs)
        self._call("launch", Stream.PROGRAMS.value, name, reads=(static,), writes=leaves(out))
        return out

    def on_captures(self, call: Callable[[], T]) -> T:
        return call()

    def capture(self, pool: str, name: str, body: Body, inputs: object, static: Tensor) -> TwinGraph:
        """Records a launch.

        Raises:
            CaptureError: it does what a capture does not permit; a kernel that never ran is one of these, since its
                module is loaded at its first launch.
        """
        self._call("capture", HOST, name)
        if kernel_key(name, inputs) not in self._shapes:
            raise CaptureError(
                f"{name}: its first launch loads kernels, which a capture does not permit: run it before"
            )
        self._inner, self._order = [], CaptureOrder()
        self._capturing_thread = threading.get_ident()
        try:
            with (
                self.streams.on(Stream.PROGRAMS.value), torch.no_grad(), TwinRecording() as recording,
                self._watch_reads(),
            ):  # fmt: skip
                out = body(inputs)
            self._order.end()
            self._check_inputs(name, recording)
        finally:
            inner, self._inner, self._order = self._inner, None, None
        recording.close(out)
        self._note_implicit_wait("a graph")
        graph = TwinGraph(name, pool, recording, out, static, inner)
        asked = recording.bytes + (WORKSPACE if recording.multiplies else 0)
        work = max(asked - self._work.get(pool, 0), 0)
        self.accounted.take(graph.own + work)
        self._work[pool] = self._work.get(pool, 0) + work
        self.pools.setdefault(pool, []).append(graph)
        return graph

    def replay(self, graph: Graph) -> None:
        """Replays a graph and records writes of the outputs of every graph of its pool, since they may share memory."""
        assert isinstance(graph, TwinGraph)
        written = [t for g in self.pools[graph.pool] for t in leaves(g.out)]
        self._call("replay", Stream.PROGRAMS.value, graph.name, reads=(graph.static,), writes=written)
        if self.calls is not None:
            self.calls += graph.calls
        with self.streams.on(Stream.PROGRAMS.value):
            self._overwrite_others(graph)
            graph.recording.replay()
        self._fresh[graph.pool] = graph

    def _overwrite_others(self, graph: TwinGraph) -> None:
        """Writes over the outputs of the graph that its pool replayed last: they may lie in this one's workspace."""
        last = self._fresh.get(graph.pool)
        if last is None or last is graph or last not in self.pools[graph.pool]:
            return
        own = {t.untyped_storage().data_ptr() for t in leaves(graph.out)}
        _overwrite(t for t in last.list_outputs() if t.untyped_storage().data_ptr() not in own)

    def _check_inputs(self, name: str, recording: TwinRecording) -> None:
        """Checks what a capture reads.

        Raises:
            CaptureError: it reads what another graph returned.
        """
        for graph in (g for graphs in self.pools.values() for g in graphs):
            if recording.reads(graph.list_outputs()):
                raise CaptureError(
                    f"{name} reads what {graph.name} returned: that lies in the workspace of its pool, which other "
                    "graphs write to"
                )

    def _watch_reads(self) -> AbstractContextManager[object]:
        return nullcontext() if self.calls is None else LaunchReads(self.note_read)

    def release(self, graph: Graph) -> None:
        """Releases a graph as a card does: its nodes at once; the pool's memory, including outputs, with the last
        graph.
        """
        assert isinstance(graph, TwinGraph)
        self.pools[graph.pool].remove(graph)
        _overwrite(graph.list_outputs())
        back = graph.nodes
        self._released[graph.pool] += graph.own - graph.nodes
        if not self.pools[graph.pool]:
            back += self._released.pop(graph.pool) + self._work.pop(graph.pool)
        self.accounted.release(int(back * self.faults.returned))

    def run_out(self, kind: str) -> None:
        """Makes the next ``capture``, or the next launch or replay of a ``step``, run out of memory."""
        self._failing = ("launch", "replay") if kind == STEP else (kind,)

    def release_bytes(self, count: int) -> None:
        self.accounted.release(count)

    def compilations(self) -> int:
        """Returns the distinct shapes launched so far; a card would compile or tune for each."""
        return len(self._shapes)

    def _call(
        self, kind: str, stream: str, name: str = "", event: CudaEvent | None = None,
        reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        if self._lost is not None and kind not in ("record", "host read", "host write"):
            raise self._lost
        self.counts[kind] += 1
        if self._captured is not None and kind in WORK:
            self._captured.add_work(stream)
        if kind in self._failing:
            self._failing = ()
            raise OutOfDeviceMemory(f"CUDA out of memory (twin): {kind} {name} (injected)")
        failure = self.faults.fails.get((kind, self.counts[kind]))
        if failure is not None:
            if isinstance(failure, SystemExit):
                os.kill(os.getpid(), signal.SIGKILL)
            self.accounted.taken += self.faults.leaks if kind == "capture" else 0
            if isinstance(failure, DeviceError):
                self._lost = failure
            raise failure
        if self.calls is not None:
            # Tensors are kept alive while calls are recorded, so that equal addresses mean the same memory.
            self._kept_tensors += [*reads, *writes]
            number = event.number if isinstance(event, TwinEvent) else 0
            (self.calls if self._inner is None else self._inner).append(
                TwinCall(kind, stream, name, number, tuple(map(_region, reads)), tuple(map(_region, writes)))
            )


WORK = ("zeros", "upload", "weights", "download", "launch", "replay")
"""Kinds of calls that queue work on a stream."""

DIVISIBLE = 16
"""Bytes by which a pointer is divisible or not: Triton compiles a kernel for either."""


def kernel_key(name: str, inputs: object) -> tuple[str, ...]:
    """Returns what the kernels of a launch are compiled for: shapes, types and the divisibility of addresses."""
    kinds = ((tuple(t.shape), t.dtype, t.data_ptr() % DIVISIBLE == 0) for t in leaves(inputs))
    return name, *map(str, kinds)


def _overwrite(tensors: Iterable[Tensor]) -> None:
    """Writes over what a card may give to others."""
    with torch.no_grad():
        for t in tensors:
            t.fill_(torch.nan if t.is_floating_point() else 85)


def leaves(tree: object) -> list[Tensor]:
    """Returns the tensors of nested tuples."""
    return [t for t in tree_flatten(tree)[0] if isinstance(t, Tensor)]


def _region(t: Tensor) -> Region:
    return t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()
