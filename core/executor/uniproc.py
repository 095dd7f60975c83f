"""One rank in this process: inline at depth 0, on a thread of its own above."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from trencadis.core.progress import Warming
from trencadis.core.step import Step, StepOutput

if TYPE_CHECKING:
    from trencadis.core.backend import Pending


class Rank(Protocol):
    """What runs Steps; ``core.runner.Runner`` is one."""

    def execute(self, step: Step) -> Pending[StepOutput]: ...

    def warm(self) -> Warming | None: ...


T = TypeVar("T")


@dataclass(slots=True)
class Submitted(Generic[T]):
    """Work that runs on the executor's thread."""

    future: Future[T]

    def done(self) -> bool:
        """Whether ``result`` would not wait."""
        return self.future.done()

    def result(self) -> T:
        """Waits for it; raises what it raised."""
        return self.future.result()


class Uniproc:
    """Runs Steps strictly one after another, ``depth`` of them beyond the one whose result is awaited."""

    def __init__(self, rank: Rank, depth: int) -> None:
        self.depth = depth
        self._rank = rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank") if depth else None

    def submit(self, step: Step) -> Pending[StepOutput]:
        """Starts ``step``; Steps run in the order of their submission."""
        if self._thread is None:
            return self._rank.execute(step)
        return Submitted(self._thread.submit(lambda: self._rank.execute(step).result()))

    def warm(self) -> Pending[Warming | None]:
        """One piece of background warm-up, on the thread that runs Steps."""
        if self._thread is None:
            done: Future[Warming | None] = Future()
            done.set_result(self._rank.warm())
            return Submitted(done)
        return Submitted(self._thread.submit(self._rank.warm))

    def close(self) -> None:
        """Ends the thread once its Steps have run."""
        if self._thread is not None:
            self._thread.shutdown()
