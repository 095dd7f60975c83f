"""Results are fetched beside the next launch: nothing is read late or refilled early, and the card hardly waits."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.hpu import device_probe
from tests.hpu.conftest import run_in_pieces
from tests.hpu.emulator.test_staging import VOCAB, body, expected, inputs, vars_of
from trencadis.backends.cpu.host_padding import empty_inputs
from trencadis.backends.cuda.time_estimates.kernel_times import HostStep, simulate_timeline
from trencadis.backends.hpu.launches.hpu_host_arrays import HEAD_TYPES, convert_fields
from trencadis.backends.hpu.launches.input_and_output_copies import OutputSets
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import HeadTensors, HeadTensorsOut, OutOfDeviceMemory

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
    backend.card.queue.busy_until = time.monotonic() + 0.6  # events pass no earlier
    waiting = threading.Thread(target=pending.result)
    waiting.start()
    time.sleep(0.1)
    begun = time.perf_counter()
    backend.fill(programs[1], inputs(rng, 2, 0))
    took = time.perf_counter() - begun
    assert waiting.is_alive() and took < 0.2, f"{took:.2f} s"
    waiting.join()
    assert pending.done()


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("variant", ["greedy", "draw", "penalised", "full"])
def test_results_cost_no_launch_of_their_own(hpu: Callable[..., Any], lazy: bool, variant: str) -> None:
    """Outputs are stored where the launch after does not write, by the launch itself: a copy between two launches is
    one more recipe for the host to launch and for the card to run.
    """

    def reported(x: HeadTensors) -> HeadTensorsOut:
        out = typed(x)
        return out if variant == "full" else HeadTensorsOut(out.token, None, None, None, None)

    backend = hpu(lazy=lazy, vocab_size=VOCAB)
    program = backend.program(Bucket(Stage.SAMPLE, (2,), variant), reported)
    program.compile()
    program.capture()
    program.rehearse()
    clock, rng = backend.card.clock, np.random.default_rng(1)
    before = clock.between, clock.compiles
    waiting: deque[Any] = deque()
    for _ in range(5):
        x = inputs(rng, 2, 0)
        x = dataclasses.replace(x, masks=x.masks[:1], mask_row=np.zeros_like(x.mask_row))  # all that greedy has
        backend.fill(program, x)
        waiting.append((x, backend.fetch(program.replay(), 2)))
        if len(waiting) == 2:
            x, pending = waiting.popleft()
            np.testing.assert_array_equal(pending.result().token, expected(x).token)
    assert (clock.between, clock.compiles) == before


def test_a_late_error_is_the_results_and_not_the_next_launchs(hpu: Callable[..., Any]) -> None:
    """The launch that would overwrite a result waits for its fetch, whose error belongs to who reads that result."""
    backend = hpu(vocab_size=VOCAB, faults="late@step:3")
    program = backend.program(Bucket(Stage.SAMPLE, (2,), "full"), typed)
    program.compile()
    program.capture()
    rng = np.random.default_rng(1)
    made = []
    for _ in range(4):
        x = inputs(rng, 2, 0)
        backend.fill(program, x)
        made.append((x, backend.fetch(program.replay(), 2)))
    failed = 0
    for x, pending in made:
        try:
            np.testing.assert_array_equal(pending.result().token, expected(x).token)
        except OutOfDeviceMemory as error:
            failed += 1
            with pytest.raises(OutOfDeviceMemory, match="workspace"):
                pending.result()
            assert "workspace" in str(error)
    assert failed == 1


class Schedules:
    """Random schedules of Steps, one in flight, whose results another thread reads as late as depth 1 allows.

    ``variant``: of the programs; "": outputs are copied on the card where a replay would overwrite them.
    """

    def __init__(self, hpu: Callable[..., Any], lazy: bool, variant: str = "full") -> None:
        self.backend = hpu(lazy=lazy, vocab_size=VOCAB)

        def counted(x: HeadTensors) -> HeadTensorsOut:
            made: Any = [None if t is None else t + 0 for t in typed(x)]
            return HeadTensorsOut(*made)

        self.programs = [self.backend.program(Bucket(Stage.SAMPLE, (n,), variant), counted) for n in SIZES]
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


@pytest.mark.parametrize(("lazy", "variant", "count"), [(True, "full", 60), (True, "", 20), (False, "full", 15)])
def test_random_schedules_read_no_result_late(
    hpu: Callable[..., Any], lazy: bool, variant: str, count: int
) -> None:  # fmt: skip
    schedules = Schedules(hpu, lazy, variant)
    for seed in range(count):
        schedules.play(seed, threads=seed % 5 == 0)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("said", [False, True])
def test_copies_of_memory_that_is_not_pinned_block(hpu: Callable[..., Any], lazy: bool, said: bool) -> None:
    """Where a plug-in refuses pinned memory, uploads and fetches of ordinary memory; if they were said to be pinned,
    nothing would wait for them.
    """

    schedules = Schedules(partial(hpu, pinned=said), lazy)
    if not said:
        for seed in range(12):
            schedules.play(seed, threads=seed % 4 == 0)
        return
    with pytest.raises(AssertionError):
        for seed in range(12):
            schedules.play(seed, threads=False)


@pytest.mark.parametrize("mistake", ["", "no wait", "one set"])
def test_many_launches_of_a_program_wait_for_the_fetches_of_their_sets(
    hpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """A step that scores a long prompt launches one program several times; the card copies as late as it may."""
    backend = hpu(vocab_size=VOCAB)
    program = backend.program(Bucket(Stage.SAMPLE, (2,), "full"), typed)
    program.compile()
    program.capture()
    program.run()
    if mistake == "no wait":
        monkeypatch.setattr(OutputSets, "wait", lambda self: self.sets[self.turn])
    elif mistake == "one set":
        program.outputs.sets[1] = program.outputs.sets[0]
    rng, launched = np.random.default_rng(1), []
    for _ in range(3):
        x = inputs(rng, 2, 0)
        backend.fill(program, x)
        launched.append((x, backend.fetch(program.replay(), 2)))
    wrong = sum(not np.array_equal(pending.result().token, expected(x).token) for x, pending in launched)
    assert bool(wrong) is bool(mistake)


@pytest.mark.long
@pytest.mark.parametrize("lazy", [True, False])
def test_ten_thousand_schedules_read_no_result_late(hpu: Callable[..., Any], lazy: bool) -> None:
    schedules = Schedules(hpu, lazy)

    def play(seed: int) -> int:
        schedules.play(seed, threads=seed % 50 == 0)
        return 1

    run_in_pieces(f"schedules, lazy {lazy}", 10_000, play)


DEVICE_SECONDS = 6e-3


def drawn(x: HeadTensors) -> HeadTensorsOut:
    """A draw that costs nothing: its rows' slots."""
    return HeadTensorsOut((x.hidden_row + x.slot).to(torch.int32), None, None, None, None)


def host_steps(backend: Any, count: int) -> list[tuple[HostStep, float]]:
    """Runs ``count`` steps that decode and sample 256 rows; returns the host's seconds of each step, and the seconds
    that the card spends between its launches.

    The host's seconds are those before the launches are under way and after the result has arrived. They are CPU
    seconds of this thread, so that other programs of the machine do not count; the card's are those of the emulator's
    launch clock.
    """
    decode = backend.program(Bucket(Stage.DECODE, (256, device_probe.BLOCKS)), device_probe.echo)
    sample = backend.program(Bucket(Stage.SAMPLE, (256,), "greedy"), drawn)
    for program in (decode, sample):
        program.compile()
        program.capture()
    one: Any = empty_inputs(Stage.SAMPLE, 64)
    head = dataclasses.replace(one, **{
        f.name: np.zeros(256, values.dtype) for f in dataclasses.fields(one)
        if f.name != "masks" and (values := getattr(one, f.name)) is not None
    })  # fmt: skip
    steps, clock = [], backend.card.clock
    for number in range(count):
        x, between = device_probe.decode_inputs(number), clock.between
        begun = time.thread_time()
        backend.fill(decode, x)
        decode.replay()
        backend.fill(sample, head)
        pending = backend.fetch(sample.replay(), 256)
        launched = time.thread_time()
        backend.synchronize()
        waited = time.thread_time()
        pending.result()
        extra = (clock.between - between) * clock.rates.launch
        steps.append((HostStep(launched - begun, time.thread_time() - waited), extra))
    return steps


@pytest.mark.parametrize("lazy", [True, False])
def test_256_rows_leave_the_card_hardly_idle(
    hpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, lazy: bool
) -> None:
    """The host's own steps, as recorded here, against device steps of 6 ms: waited for in the launch, and beside it.

    What the card runs between launches counts as idle.
    """
    monkeypatch.setattr(device_probe, "ROWS", 256)
    backend = hpu(lazy=lazy, block_size=128, computes=False, dtype=torch.bfloat16, vocab_size=64)
    steps = sorted(host_steps(backend, 60), key=lambda one: sum(one[0]))[5:50]
    timed = [(step, DEVICE_SECONDS + extra) for step, extra in steps] * 4
    lines = [simulate_timeline(timed, depth) for depth in (1, 0)]
    beside, waited_for = (1 - line.steps * DEVICE_SECONDS / line.total for line in lines)
    print(f"host {1e3 * steps[20][0].before:.2f} + {1e3 * steps[20][0].after:.2f} ms, idle {beside:.2%}, "
          f"{waited_for:.2%} where the launching thread waits")  # fmt: skip
    assert beside <= 0.02 and waited_for > 2 * beside
