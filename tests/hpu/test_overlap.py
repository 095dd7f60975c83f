"""Results are fetched beside the next launch: nothing is read late or refilled early, and the card hardly waits."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.hpu import device_probe
from tests.hpu.emulator.test_staging import VOCAB, body, expected, inputs, vars_of
from trencadis.backends.cuda.timing.time_report import HostStep, simulate_timeline
from trencadis.backends.hpu.policy import SERVING
from trencadis.backends.hpu.sampling_thresholds import HEAD_TYPES, convert_fields
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import HeadTensors, HeadTensorsOut

pytestmark = pytest.mark.part("gaudi")

SIZES = (2, 3, 8)


def typed(x: HeadTensors) -> HeadTensorsOut:
    """``body`` over inputs as they are packed in compile mode."""
    return body(convert_fields(x, HEAD_TYPES))


@pytest.mark.parametrize("lazy", [True, False])
def test_a_fetch_does_not_wait_for_its_launch(hpu: Callable[..., Any], lazy: bool) -> None:
    backend = hpu(lazy=lazy, vocab_size=VOCAB)
    program = backend.program(Bucket(Stage.SAMPLE, (2,), "full"), typed)
    program.compile()
    program.capture()
    program.run()  # the first launch that runs is waited for
    backend.fill(program, inputs(np.random.default_rng(1), 2, 0))
    pending = backend.fetch(program.replay(), 2)
    assert backend.card.queue.finished != backend.card.queue.submitted, "the copies are only queued"
    pending.result()
    assert pending.done() and SERVING.overlaps


@pytest.mark.parametrize("lazy", [True, False])
def test_a_thread_that_waits_for_a_result_holds_up_no_launch(hpu: Callable[..., Any], lazy: bool) -> None:
    """The plug-in holds its lock of events while it waits for one: who fills the next launch records one, too."""
    backend = hpu(lazy=lazy, vocab_size=VOCAB)
    programs = [backend.program(Bucket(Stage.SAMPLE, (2,), "full"), typed) for _ in range(2)]
    for program in programs:
        program.compile()
        program.run()
    rng = np.random.default_rng(1)
    backend.fill(programs[0], inputs(rng, 2, 0))
    pending = backend.fetch(programs[0].replay(), 2)
    backend.card.queue.work_for(0.6)
    waiting = threading.Thread(target=pending.result)
    waiting.start()
    time.sleep(0.1)
    begun = time.perf_counter()
    backend.fill(programs[1], inputs(rng, 2, 0))
    took = time.perf_counter() - begun
    assert waiting.is_alive() and took < 0.2, f"{took:.2f} s"
    waiting.join()
    assert pending.done()


class Schedules:
    """Random schedules of Steps, one in flight, whose results another thread reads as late as depth 1 allows."""

    def __init__(self, hpu: Callable[..., Any], lazy: bool) -> None:
        self.backend = hpu(lazy=lazy, vocab_size=VOCAB)

        def counted(x: HeadTensors) -> HeadTensorsOut:
            made: Any = [None if t is None else t + 0 for t in typed(x)]
            return HeadTensorsOut(*made)

        self.programs = [self.backend.program(Bucket(Stage.SAMPLE, (n,), "full"), counted) for n in SIZES]
        for program in self.programs:
            program.compile()
            program.capture()

    def play(self, seed: int, threads: bool) -> None:
        rng = np.random.default_rng(seed)
        self.backend.card.queue.dice = random.Random(seed)
        waiting: deque[list[Any]] = deque()
        for _ in range(int(rng.integers(2, 6))):
            if len(waiting) == 2:  # as many as the executor lets be in flight
                self.read(waiting.popleft(), threads)
            launched = []
            for _ in range(int(rng.integers(1, 4))):
                program = self.programs[int(rng.integers(len(SIZES)))]
                x = inputs(rng, int(rng.integers(1, program.bucket.dims[0] + 1)), 0)
                self.backend.fill(program, x)
                launched.append((x, self.backend.fetch(program.replay(), len(x.slot))))
            waiting.append(launched)
        while waiting:
            self.read(waiting.popleft(), threads)

    def read(self, step: list[Any], threads: bool) -> None:
        found: list[Any] = []

        def take() -> None:
            found.extend(vars_of(pending.result()) for _, pending in step)

        if threads:
            thread = threading.Thread(target=take)
            thread.start()
            thread.join()
        else:
            take()
        for (x, _), got_all in zip(step, found, strict=True):
            for got, want in zip(got_all, vars_of(expected(x)), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("lazy", [True, False])
def test_random_schedules_read_no_result_late(hpu: Callable[..., Any], lazy: bool) -> None:
    schedules = Schedules(hpu, lazy)
    for seed in range(60 if lazy else 15):
        schedules.play(seed, threads=seed % 5 == 0)


@pytest.mark.long
def test_ten_thousand_schedules_read_no_result_late(hpu: Callable[..., Any]) -> None:
    schedules = Schedules(hpu, True)
    for seed in range(10_000):
        schedules.play(seed, threads=seed % 50 == 0)


DEVICE_SECONDS = 6e-3


def host_steps(backend: Any, count: int) -> list[HostStep]:
    """The host's seconds before a launch of 256 rows is under way, and after its result is there: of this thread's
    own work, so that other programs of the machine do not count.
    """
    bucket = Bucket(Stage.DECODE, (256, device_probe.BLOCKS))
    program = backend.program(bucket, device_probe.echo)
    program.compile()
    program.capture()
    steps = []
    for number in range(count):
        x = device_probe.decode_inputs(number)
        begun = time.thread_time()
        backend.fill(program, x)
        pending = backend.fetch(program.replay(), 256)
        launched = time.thread_time()
        backend.synchronize()
        waited = time.thread_time()
        pending.result()
        steps.append(HostStep(launched - begun, time.thread_time() - waited))
    return steps


def test_256_rows_leave_the_card_hardly_idle(hpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own steps, as recorded here, against device steps of 6 ms: waited for in the launch, and beside it."""
    monkeypatch.setattr(device_probe, "ROWS", 256)
    backend = hpu(block_size=128, computes=False, dtype=torch.bfloat16)
    steps = sorted(host_steps(backend, 60), key=sum)[5:50]
    timed = [(step, DEVICE_SECONDS) for step in steps] * 4
    beside, waited_for = simulate_timeline(timed, depth=1), simulate_timeline(timed, depth=0)
    print(f"host {1e3 * steps[20].before:.2f} + {1e3 * steps[20].after:.2f} ms, idle {beside.idle:.2%}, "
          f"{waited_for.idle:.2%} where the launching thread waits")  # fmt: skip
    assert beside.idle <= 0.02 and waited_for.idle > 2 * beside.idle
