"""The interface of executors: Steps are submitted, their outputs come back in the same order; and a thread for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from trencadis.core.buckets import Bucket
from trencadis.core.request import AdapterRef
from trencadis.core.startup_progress_and_warmup_pacing import Warming
from trencadis.core.step import DraftRow, Step
from trencadis.core.step_output import StepOutput

if TYPE_CHECKING:
    from trencadis.core.device.backend import Pending


class Rank(Protocol):
    """Runs Steps; ``core.launches.model_runner.ModelRunner`` is one."""

    def execute(self, step: Step) -> Pending[StepOutput]: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """Returns what the rank's draft model or head expects to follow each row."""
        ...

    def warm(self) -> Warming | None:
        """Runs one unit of background warm-up or of a change of plan; returns None if none is left."""
        ...

    def change_plan(self, version: int, buckets: Sequence[Bucket]) -> None:
        """Begins the change to a plan with these buckets, which ``warm`` then runs piece by piece."""
        ...

    def set_vocabulary(self, data: bytes | bytearray) -> None:
        """Takes a packed ``grammar_tokenizer_and_vocabulary.Vocabulary`` and returns; a thread decodes it."""
        ...

    def prepare(self, grammar: str) -> Future[str]:
        """Compiles a grammar in a thread; the result is an error message, or empty."""
        ...

    def load_adapter(self, ref: AdapterRef, drop: tuple[str, ...]) -> Future[str]:
        """Reads an adapter in a thread and forgets those with the digests ``drop``; the result is an error message, or
        empty.
        """
        ...


class RankHandle(Protocol):
    """A rank that has started up.

    Attributes:
        depth: Steps in flight in addition to the one whose result is awaited.
        overlaps: a thread other than the launching one may wait for results.
    """

    @property
    def rank(self) -> Rank: ...

    @property
    def depth(self) -> int: ...

    @property
    def overlaps(self) -> bool: ...


class Executor(Protocol):
    """The ranks of one engine. ``submit`` never waits for a Step to finish unless the depth is 0."""

    depth: int

    def submit(self, step: Step) -> Pending[StepOutput]: ...

    def warm(self) -> Pending[Warming | None]:
        """Runs one unit of background warm-up, or of a change of plan, on every rank.

        Must be called with nothing in flight.
        """
        ...

    def change_plan(self, version: int, buckets: Sequence[Bucket]) -> Pending[None]:
        """Begins a change of plan on every rank; must be called with nothing in flight."""
        ...

    def set_vocabulary(self, data: bytes | bytearray) -> None:
        """Sends a packed ``grammar_tokenizer_and_vocabulary.Vocabulary`` to every rank; must precede the first
        grammar.
        """
        ...

    def prepare(self, grammar: str) -> Pending[str]:
        """Compiles a grammar on every rank while Steps continue; the result is an error message, or empty.

        A Step that starts a choice with an unprepared grammar waits for its compilation.
        """
        ...

    def load_adapter(self, ref: AdapterRef, drop: tuple[str, ...]) -> Pending[str]:
        """Has every rank read an adapter while Steps continue, and forget those with the digests ``drop``.

        The result is an error message, or empty.
        """
        ...

    def close(self) -> None: ...


class SerialThread:
    """Runs functions in order on a daemon thread, so that a stuck device call does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def put(self, work: Callable[[], object]) -> None:
        """Queues ``work``, which must not raise."""
        self._queue.put(work)

    def end(self, patience: float) -> None:
        """Ends the thread after all queued functions; waits for it at most ``patience`` seconds."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
