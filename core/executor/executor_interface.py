"""The interface of executors: Steps go in, their outputs come back in order."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from trencadis.core.progress import Warming
from trencadis.core.step import Step, StepOutput

if TYPE_CHECKING:
    from trencadis.core.backend import Pending


class Rank(Protocol):
    """Runs Steps; ``core.launches.model_runner.ModelRunner`` is one."""

    def execute(self, step: Step) -> Pending[StepOutput]: ...

    def warm(self) -> Warming | None:
        """Runs one piece of background warm-up; None if none is left."""
        ...

    def set_vocabulary(self, data: bytes | bytearray) -> None:
        """Takes a packed ``core.masks.vocabulary.Vocabulary`` and returns; a thread opens it."""
        ...

    def prepare(self, grammar: str) -> Future[str]:
        """Compiles a grammar in a thread; the result is what is wrong with it, or empty."""
        ...


class RankHandle(Protocol):
    """A rank that has started up.

    Attributes:
        depth: Steps in flight beyond the one whose result is awaited.
        overlaps: another thread than the one that launches may wait for results.
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
        """One piece of background warm-up on every rank; to be called with nothing in flight."""
        ...

    def set_vocabulary(self, data: bytes | bytearray) -> None:
        """Gives every rank a packed ``core.masks.vocabulary.Vocabulary``, before the first grammar."""
        ...

    def prepare(self, grammar: str) -> Pending[str]:
        """Every rank compiles a grammar beside its Steps; the result is what is wrong with it, or empty.

        A Step that opens a choice under a grammar that is not prepared waits for its compilation.
        """
        ...

    def close(self) -> None: ...
