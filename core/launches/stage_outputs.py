"""Results of Steps that run on several pipeline stages: the last stage has what was drawn, each what it launched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from trencadis.core.step import StepOutput


class StageOutputs:
    """Joins the results of rank 0 with those of the last stage; a Step is over when both are there.

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
        """Before a Step is sent: ``future`` gets its result."""
        with self._lock:
            self._waiting[number] = future

    def from_first(self, output: StepOutput) -> None:
        """Rank 0 has run the Step."""
        with self._lock:
            self._first[output.number] = output
        self._join(output.number)

    def from_last(self, output: StepOutput) -> None:
        """The last stage has run it."""
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
    """The last stage's output with the launches of both, each stage of launches once."""
    seen = {s.bucket.stage for s in first.stats}
    last.stats = [*first.stats, *(s for s in last.stats if s.bucket.stage not in seen)]
    return last
