"""Timeline of host and device: steps that follow each other at a given depth, and the idle time of the device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trencadis.backends.cuda.time_estimates.kernel_times import CardTimes, KernelTimes, RecordedKernel, time_of

STEPS = 200
"""Number of steps that ``step_time`` simulates."""

AFTER = 0.25
"""Share of the host's work that waits for the result of a step: update, and the work after it."""


class HostStep(NamedTuple):
    """Seconds of the host for one step: before its launch, and after its result has arrived."""

    before: float
    after: float


class Timeline(NamedTuple):
    """Result of simulating some steps; seconds."""

    steps: int
    total: float
    busy: float
    longest: float  # longest idle time of the device

    @property
    def idle(self) -> float:
        """Share of the time in which the device waits for the host."""
        return 1 - self.busy / self.total if self.total else 0.0

    @property
    def step(self) -> float:
        """Mean seconds from the end of one step to the end of the next."""
        return self.total / max(self.steps, 1)


def simulate_timeline(steps: Iterable[tuple[HostStep, float]], depth: int = 1) -> Timeline:
    """Simulates steps that follow each other, given as (host, device seconds).

    The host launches a step, and takes the result of the one ``depth`` steps before it as soon as that is done; the
    device begins a step once it is launched and the one before has ended. The time counts from the start of the first
    step on the device.
    """
    host = free = begun = busy = longest = 0.0
    ended: list[float] = []
    taken: list[HostStep] = []
    for index, (work, device) in enumerate(steps):
        host += work.before
        start = max(host, free)
        if index:
            longest = max(longest, start - free)
        else:
            begun = start
        free, busy = start + device, busy + device
        ended.append(free)
        taken.append(work)
        if index >= depth:
            host = max(host, ended[index - depth]) + taken[index - depth].after
    return Timeline(len(ended), free - begun, busy, longest)


def step_time(
    kernels: Sequence[RecordedKernel], rows: int, on: CardTimes, depth: int = 1
) -> tuple[KernelTimes, Timeline]:
    """Returns (the device's seconds, the timeline of host and device over several steps)."""
    device = time_of(list(kernels), on)
    host = on.host_step(rows)
    work = HostStep(host * (1 - AFTER), host * AFTER)
    return device, simulate_timeline(((work, device.total + on.graph) for _ in range(STEPS)), depth)
