"""Every copy that a replay reads comes before it, nothing is written over while it may be read: by events alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.happens_before import Schedule, races
from trencadis.backends.cuda.backend import CudaPending, CudaProgram
from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinCall
from trencadis.backends.cuda.launches.input_buffers import StageBuffer
from trencadis.backends.cuda.runtime_protocol import Stream


@given(seed=st.integers(0, 2**32), depth=st.sampled_from([0, 1, 2]))
@settings(max_examples=50, deadline=None)
def test_random_schedules(seed: int, depth: int) -> None:
    assert Schedule(seed, depth=depth).run() == []


@pytest.mark.long
def test_ten_thousand_schedules() -> None:
    calls = launches = 0
    for seed in range(10_000):
        schedule = Schedule(seed, depth=seed % 3)
        assert schedule.run() == [], seed
        calls += len(schedule.calls)
        launches += schedule.runtime.counts["launch"] + schedule.runtime.counts["replay"]
    print(f"10000 schedules, {launches} launches, {calls} calls: no race")


def test_the_checker_knows_what_orders() -> None:
    write = TwinCall("host write", "host", writes=((0, 8),))
    copy = TwinCall("upload", "uploads", reads=((0, 8),), writes=((64, 72),))
    launch = TwinCall("launch", "programs", reads=((64, 72),))
    record, wait = TwinCall("record", "uploads", event=1), TwinCall("wait", "programs", event=1)
    assert races([write, copy, record, wait, launch]) == []
    assert len(races([write, copy, launch])) == 1
    assert len(races([write, record, wait, copy, launch])) == 1
    assert len(races([write, copy, record, wait, launch, write])) == 1
    assert races([write, copy, record, wait, launch, TwinCall("synchronize", "host"), write]) == []
    assert len(races([write, copy, record, wait, launch, launch])) == 1


Patch = tuple[type, str, Callable[..., Any]]


def sent(before: bool, wait: bool, part: int = 1) -> Callable[..., None]:
    """``StageBuffer.send`` with its parts in another order, or left out."""

    def send(self: Any, used: int, beside: Any = None) -> None:
        area, lane = self._staging[self._area], Stream.UPLOADS
        if wait:
            self.runtime.wait(lane, self.last_read)
        events = self._sent[self._area], self.written
        for event in events if before else ():
            self.runtime.record(event, lane)
        self.runtime.upload(self.flat[: used // part], area[: used // part])
        for event in () if before else events:
            self.runtime.record(event, lane)

    return send


def rash(self: Any, size: int, runtime: Any) -> None:
    """A room whose first copy need not come after its zeros."""
    roomy(self, size, runtime)
    self.last_read = runtime.event()


roomy = StageBuffer.__init__


def hasty(self: Any, size: int) -> Any:
    """``StageBuffer.host`` that waits for nothing."""
    self._area = 1 - self._area
    if self._staging[self._area] is None:
        self._staging[self._area] = self.runtime.allocate_pinned((self.bytes,), torch.uint8)
    return self.runtime.write(self._staging[self._area])


def begin(written: bool, fetched: bool, seen: bool = False) -> Callable[[Any], None]:
    """``CudaProgram._begin`` without some of its waits, or that says too early what was seen."""

    def _begin(self: Any) -> None:
        if written:
            self.runtime.wait(Stream.PROGRAMS, self.buffers.buffer.written)
        if fetched:
            self.runtime.wait(Stream.PROGRAMS, self._fetched)
        if seen:
            self.runtime.record(self.buffers.buffer.last_read, Stream.PROGRAMS)

    return _begin


def fetch(launched: bool, behind: bool) -> Callable[..., None]:
    """``CudaPending`` that does not wait for the launch, or tells nobody when it has read."""

    def __init__(self: Any, out: Any, rows: int, runtime: Any, fetched: Any) -> None:
        self._rows, self._runtime, self._done = rows, runtime, runtime.event()
        event = runtime.event()
        runtime.record(event, Stream.PROGRAMS)
        if launched:
            runtime.wait(Stream.DOWNLOADS, event)
        self._out, self._host = out, [None if t is None else self._copy(t) for t in out]
        runtime.record(self._done, Stream.DOWNLOADS)
        if behind:
            runtime.record(fetched, Stream.DOWNLOADS)

    return __init__


def forgetful(self: Any, inputs: Any) -> None:
    """A fill that is left out where the last one had as many tokens."""
    size = None if inputs is None else len(getattr(inputs, "tokens", getattr(inputs, "slot", ())))
    if size is None or size != getattr(self, "_size", None):
        self.buffers.fill(inputs)
    self._size = size


MISTAKES: dict[str, list[Patch]] = {
    "a launch does not wait for its copy": [(CudaProgram, "_begin", begin(False, True))],
    "a copy does not wait for the launch that reads": [(StageBuffer, "send", sent(before=False, wait=False))],
    "a room's first copy does not wait for its zeros": [(StageBuffer, "__init__", rash)],
    "a pinned area is written before its copy is done": [(StageBuffer, "host", hasty)],
    "a copy's events are recorded before it": [(StageBuffer, "send", sent(before=True, wait=True))],
    "half is copied": [(StageBuffer, "send", sent(before=False, wait=True, part=2))],
    "seen is recorded before the launch": [
        (CudaProgram, "_begin", begin(True, True, seen=True)), (CudaProgram, "_end", lambda self: None)
    ],
    "seen is recorded on another lane": [
        (CudaProgram, "_end", lambda self: self.runtime.record(self.buffers.buffer.last_read, Stream.DOWNLOADS))
    ],
    "seen is never recorded": [(CudaProgram, "_end", lambda self: None)],
    "a fetch does not wait for its launch": [(CudaPending, "__init__", fetch(launched=False, behind=True))],
    "the host reads before the fetch is done": [
        (CudaPending, "result", lambda self: type("Out", (), {"token": self._runtime.read(self._host[0])}))
    ],
    "a launch writes over what is being fetched": [(CudaProgram, "_begin", begin(True, False))],
    "nobody is told when a fetch has read": [(CudaPending, "__init__", fetch(launched=True, behind=False))],
    "a launch runs on what the last one was given": [(CudaProgram, "fill", forgetful)],
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, made in MISTAKES[name]:
        monkeypatch.setattr(owner, attribute, made)
    assert any(Schedule(seed).run() for seed in range(20))
