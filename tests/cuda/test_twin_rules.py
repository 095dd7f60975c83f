"""Rules of a card that the twin keeps: each is broken once, and the twin says so."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.thread_streams import watch_threads
from trencadis.backends.cuda.cpu_twin.cuda_rules import CaptureError
from trencadis.backends.cuda.cpu_twin.twin_runtime import DeviceError, TwinFaults, TwinRuntime, parse
from trencadis.backends.cuda.runtime_protocol import Stream
from trencadis.backends.cuda.shape_policy import WORKSPACE
from trencadis.backends.cuda.time_estimates.meta_launch_recorder import check_grid
from trencadis.core.errors import StartupError

STATIC = torch.zeros(4)


@pytest.fixture
def runtime() -> TwinRuntime:
    return TwinRuntime()


def captured(runtime: TwinRuntime, body: Any, inputs: Any = None, name: str = "DECODE(1)", pool: str = "DECODE") -> Any:
    """A graph of ``body``, whose kernels ran before."""
    runtime.launch(name, lambda inputs: None, inputs, STATIC)
    return runtime.capture(pool, name, body, inputs, STATIC)


def test_another_alignment_is_another_kernel(runtime: TwinRuntime) -> None:
    memory = torch.from_numpy(np.zeros(256, np.uint8))
    begin = -memory.data_ptr() % 16
    for shift in (0, 16, 4):
        runtime.launch("A", lambda x: None, memory[begin + shift : begin + shift + 64].view(torch.int32), STATIC)
    assert runtime.compilations() == 2


def test_a_kernel_that_never_ran_is_not_captured(runtime: TwinRuntime) -> None:
    with pytest.raises(CaptureError, match="its first launch loads kernels"):
        runtime.capture("DECODE", "DECODE(1)", lambda x: None, None, STATIC)
    captured(runtime, lambda x: None)


def test_a_capture_takes_streams_by_events_of_its_own(runtime: TwinRuntime) -> None:
    outside, inside, back = (runtime.event() for _ in range(3))
    runtime.record(outside, Stream.UPLOADS)
    target, source = torch.zeros(4), torch.ones(4)

    def forked(joined: bool) -> Any:
        def body(inputs: Any) -> None:
            runtime.record(inside, Stream.PROGRAMS)
            runtime.wait(Stream.WEIGHTS, inside)
            runtime.upload_weights(target, source)
            if joined:
                runtime.record(back, Stream.WEIGHTS)
                runtime.wait(Stream.PROGRAMS, back)

        return body

    captured(runtime, forked(True))
    with pytest.raises(CaptureError, match="work of weights that is not joined"):
        captured(runtime, forked(False))
    with pytest.raises(CaptureError, match="recorded outside it"):
        captured(runtime, lambda x: runtime.wait(Stream.PROGRAMS, outside))
    with pytest.raises(CaptureError, match="recorded within a capture"):
        runtime.wait(Stream.DOWNLOADS, inside)


def test_work_behind_the_join_is_not_joined(runtime: TwinRuntime) -> None:
    inside, back = runtime.event(), runtime.event()
    target, source = torch.zeros(4), torch.ones(4)

    def body(inputs: Any) -> None:
        runtime.record(inside, Stream.PROGRAMS)
        runtime.wait(Stream.WEIGHTS, inside)
        runtime.record(back, Stream.WEIGHTS)
        runtime.upload_weights(target, source)
        runtime.wait(Stream.PROGRAMS, back)

    with pytest.raises(CaptureError, match="not joined"):
        captured(runtime, body)


@pytest.mark.parametrize("what", ["synchronize", "host_wait", "buffer", "pinned"])
def test_a_capture_lets_nothing_wait(runtime: TwinRuntime, what: str) -> None:
    event = runtime.event()
    runtime.record(event, Stream.PROGRAMS)
    calls = {
        "synchronize": runtime.synchronize, "host_wait": lambda: runtime.host_wait(event),
        "buffer": lambda: runtime.buffer(64), "pinned": lambda: runtime.allocate_pinned((64,), torch.uint8),
    }  # fmt: skip
    with pytest.raises(CaptureError, match="waits within a capture"):
        captured(runtime, lambda x: calls[what]())
    runtime.synchronize()


def test_memory_that_is_given_back_is_locked_once(runtime: TwinRuntime) -> None:
    """A graph waits for the device, too."""
    for _ in range(3):
        area = runtime.allocate_pinned((100,), torch.float32)
        del area
    assert runtime.counts["implicit wait"] == 1
    held = [runtime.allocate_pinned((100,), torch.float32) for _ in range(3)]
    assert runtime.counts["implicit wait"] == 3 and len(held) == 3
    captured(runtime, lambda x: None)
    assert runtime.counts["implicit wait"] == 4


def test_a_lost_device_stays_lost(runtime: TwinRuntime) -> None:
    runtime.faults = parse("error@launch:1")
    event = runtime.event()
    for call in (
        lambda: runtime.launch("A", lambda x: None, None, STATIC), lambda: runtime.host_wait(event),
        runtime.synchronize, lambda: runtime.download(torch.zeros(1), torch.zeros(1)),
    ):  # fmt: skip
        with pytest.raises(DeviceError, match="illegal memory access"):
            call()


def test_results_come_late(runtime: TwinRuntime) -> None:
    runtime.faults = TwinFaults(late=2)
    event = runtime.event()
    assert runtime.is_complete(event), "an event that was never recorded"
    runtime.record(event, Stream.DOWNLOADS)
    assert [runtime.is_complete(event) for _ in range(4)] == [False, False, True, True]
    runtime.record(event, Stream.DOWNLOADS)
    runtime.host_wait(event)
    assert runtime.is_complete(event)
    assert parse("late:3, oom@capture:2").late == 3
    with pytest.raises(StartupError, match="late:N"):
        parse("late:0")


def test_a_graph_writes_over_what_another_one_left(runtime: TwinRuntime) -> None:
    """Graphs of a pool share their workspace: what one returned is gone when the other one ran."""
    source = torch.ones(4)
    one, other = (
        captured(runtime, lambda x, n=n: source + n, name=f"DECODE({n})")
        for n in (1, 2)  # type: ignore[misc]
    )
    elsewhere = captured(runtime, lambda x: source + 3, name="PREFILL(1)", pool="PREFILL")
    runtime.replay(one)
    runtime.replay(elsewhere)
    assert one.out.tolist() == [2] * 4
    runtime.replay(other)
    assert one.out.isnan().all() and other.out.tolist() == [3] * 4


def test_a_graph_reads_nothing_in_the_workspace_of_another_one(runtime: TwinRuntime) -> None:
    """Its address would be fixed, and the other graph's pool gives that memory to whatever it captures next."""
    source, held = torch.ones(4), torch.zeros(4)
    one = captured(runtime, lambda x: source + 1)
    runtime.replay(one)
    for pool in ("DECODE", "SAMPLE"):
        with pytest.raises(CaptureError, match=r"SAMPLE\(1\) reads what DECODE\(1\) returned"):
            captured(runtime, lambda x: one.out[:2] + 1, name="SAMPLE(1)", pool=pool)
    runtime.launch("host", lambda x: held.copy_(one.out), None, STATIC)
    captured(runtime, lambda x: held + 1, name="SAMPLE(1)", pool="SAMPLE")


def test_what_a_graph_returned_ends_with_it(runtime: TwinRuntime) -> None:
    source = torch.ones(4)
    one = captured(runtime, lambda x: (source + 1, source.int() + 1))
    runtime.replay(one)
    out = one.out
    assert out[0].tolist() == [2] * 4
    runtime.release(one)
    assert out[0].isnan().all() and set(out[1].tolist()) == {85}


def test_products_take_a_workspace_from_their_pool(runtime: TwinRuntime) -> None:
    """Once for all graphs of the pool, and not for graphs without a product."""
    source = torch.ones(4, 4)
    taken = []
    for number, body in enumerate((lambda x: source + 1, lambda x: source @ source, lambda x: source @ source)):
        before = runtime.accounted.taken
        captured(runtime, body, name=f"DECODE({number})")
        taken.append((runtime.accounted.taken - before) // WORKSPACE)
    assert taken == [0, 1, 0]


def test_a_grid_has_limits() -> None:
    check_grid(((1 << 31) - 1, 65_535, 65_535))
    with pytest.raises(ValueError, match=r"rope: 65536 programs along axis 1"):
        check_grid((1, 65_536), "rope")


def in_a_thread(call: Any, name: str = "rank") -> None:
    thread = threading.Thread(target=call, name=name)
    thread.start()
    thread.join()


def test_another_thread_begins_on_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the runtime have streams of their own there; torch's own calls on the device's memory have none."""
    with watch_threads(monkeypatch) as found:
        runtime = TwinRuntime()
        area, host = runtime.buffer(64), torch.ones(64, dtype=torch.uint8)

        def clear() -> None:
            area.zero_()

        def step() -> None:
            runtime.upload(area, host)
            runtime.launch("A", lambda inputs: area.add_(1), None, STATIC)
            runtime.on_uploads(clear, [area])
            graph = captured(runtime, lambda inputs: area + 1)
            runtime.replay(graph)
            runtime.download(host, area)
            area[:8].view(torch.int32), host.add_(1)

        step()
        area.add_(1)
        in_a_thread(step)
        assert not found
        in_a_thread(clear, "results")
    assert found == {"aten.zero_ on the default stream of thread results"}
