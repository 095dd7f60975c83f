"""Joins results of Steps that run on several pipeline stages.

The last stage provides the sampled tokens, both provide the statistics of their launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from trencadis.core.step import StepOutput


class StageOutputs:
    """Joins the results of rank 0 with those of the last stage; a Step is complete when both have arrived.

    Args:
        settle: called with a Step's future and its result.
    """

    def __init__(self, settle: Callable[[Future[StepOutput], StepOutput], None]) -> None:
        self._settle = settle
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[StepOutput]] = {}
        self._first: dict[int, StepOutput] = {}
        self._last: dict[int, StepOutput] = {}

    def expect(self, number: int, future: Future[StepOutput]) -> None:
        """Registers the future of a Step's result; called before the Step is sent."""
        with self._lock:
            self._waiting[number] = future

    def from_first(self, output: StepOutput) -> None:
        """Takes the output of rank 0."""
        with self._lock:
            self._first[output.number] = output
        self._join(output.number)

    def from_last(self, output: StepOutput) -> None:
        """Takes the output of the last stage."""
        with self._lock:
            self._last[output.number] = output
        self._join(output.number)

    def _join(self, number: int) -> None:
        with self._lock:
            if number not in self._first or number not in self._last:
                return
            first, last = self._first.pop(number), self._last.pop(number)
            future = self._waiting.pop(number)
        self._settle(future, join_outputs(first, last))


def join_outputs(first: StepOutput, last: StepOutput) -> StepOutput:
    """Returns the last stage's output with the statistics of both; each kind of launch is listed once."""
    seen = {s.bucket.stage for s in first.stats}
    last.stats = [*first.stats, *(s for s in last.stats if s.bucket.stage not in seen)]
    return last
