"""The host beside the device: one step after the other at a depth, and how long the device has nothing to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class HostStep(NamedTuple):
    """Seconds of the host for one step: until it is launched, and after its result has come."""

    before: float
    after: float


class Timeline(NamedTuple):
    """What came of some steps; seconds."""

    steps: int
    total: float
    busy: float
    longest: float  # the longest wait of the device

    @property
    def idle(self) -> float:
        """The share of the time in which the device waits for the host."""
        return 1 - self.busy / self.total if self.total else 0.0

    @property
    def step(self) -> float:
        """Seconds from one step's end to the next one's."""
        return self.total / max(self.steps, 1)


def run(steps: Iterable[tuple[HostStep, float]], depth: int = 1) -> Timeline:
    """Plays (host, device seconds) of steps that follow each other.

    The host launches a step, and takes the result of the one ``depth`` steps before it as soon as the device has that;
    the device begins a step when it was launched and the one before has ended. The time counts from the start of the
    first step on the device.
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
