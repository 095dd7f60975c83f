"""Executor for one rank in this process: runs Steps inline at depth 0, else on a separate thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from trencadis.core.buckets import Bucket
from trencadis.core.executor.executor_interface import Rank
from trencadis.core.request import AdapterRef
from trencadis.core.startup_progress_and_warmup_pacing import Warming
from trencadis.core.step import DraftRow, Step
from trencadis.core.step_output import StepOutput

if TYPE_CHECKING:
    from trencadis.core.device.backend import Pending


T = TypeVar("T")


@dataclass(slots=True)
class SubmittedWork(Generic[T]):
    """Work that runs on the executor's thread."""

    future: Future[T]

    def done(self) -> bool:
        """Returns True if ``result`` would not block."""
        return self.future.done()

    def result(self) -> T:
        """Waits for the result; raises the work's exception."""
        return self.future.result()


@dataclass(slots=True)
class LaunchedStep:
    """A Step launched on the executor's thread, whose result the caller's thread waits for."""

    future: Future[Pending[StepOutput]]

    def done(self) -> bool:
        """Returns True if ``result`` would not block."""
        return self.future.done() and self.future.result().done()

    def result(self) -> StepOutput:
        """Waits for the launches, then for their outputs; raises the exception of either."""
        return self.future.result().result()


class UniprocExecutor:
    """Runs Steps in order, with up to ``depth`` submitted in addition to the one whose result is awaited.

    Args:
        overlaps: the caller's thread waits for results, so that the executor's thread can prepare the next Step while
            the device runs this one. False: the executor's thread waits for each Step itself.
    """

    def __init__(self, rank: Rank, depth: int, overlaps: bool = False) -> None:
        self.depth, self._overlaps = depth, overlaps
        self._rank = rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank") if depth else None

    def submit(self, step: Step) -> Pending[StepOutput]:
        """Submits ``step``; Steps run in order."""
        if self._thread is None:
            return self._rank.execute(step)
        if self._overlaps:
            return LaunchedStep(self._thread.submit(self._rank.execute, step))
        return SubmittedWork(self._thread.submit(lambda: self._rank.execute(step).result()))

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """Returns what the rank's draft model expects to follow each row, after the Steps in flight."""
        if self._thread is None:
            return self._rank.propose(rows)
        return self._thread.submit(self._rank.propose, rows).result()

    def warm(self) -> Pending[Warming | None]:
        """Runs one unit of background warm-up on the thread that runs Steps."""
        if self._thread is None:
            done: Future[Warming | None] = Future()
            done.set_result(self._rank.warm())
            return SubmittedWork(done)
        return SubmittedWork(self._thread.submit(self._rank.warm))

    def change_plan(self, version: int, buckets: Sequence[Bucket]) -> Pending[None]:
        """Begins a change of plan on the thread that runs Steps."""
        if self._thread is None:
            done: Future[None] = Future()
            self._rank.change_plan(version, buckets)
            done.set_result(None)
            return SubmittedWork(done)
        return SubmittedWork(self._thread.submit(self._rank.change_plan, version, buckets))

    def set_vocabulary(self, data: bytes | bytearray) -> None:
        """Passes a packed ``grammar_tokenizer_and_vocabulary.Vocabulary`` to the rank; must precede the first
        grammar.
        """
        self._rank.set_vocabulary(data)

    def prepare(self, grammar: str) -> Pending[str]:
        """Compiles a grammar on the rank while Steps continue."""
        return SubmittedWork(self._rank.prepare(grammar))

    def load_adapter(self, ref: AdapterRef, drop: tuple[str, ...]) -> Pending[str]:
        """Has the rank read an adapter while Steps continue."""
        return SubmittedWork(self._rank.load_adapter(ref, drop))

    def close(self) -> None:
        """Ends the thread once its Steps have run."""
        if self._thread is not None:
            self._thread.shutdown()
