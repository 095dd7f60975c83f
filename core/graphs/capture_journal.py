"""Reports each capture to the parent process, so that a bucket whose capture kills the engine is skipped next time.

Nothing is written to disk: the engine reports to its parent before and after each capture. If an engine dies during a
capture, the parent passes the bucket to the next engine. Other ranks report to the engine, which names the bucket if
one of them dies. Each pipeline stage has its own graphs, so stages after the first prefix the bucket with their stage
number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

ReportCapture = Callable[[str, bool], None]
"""Called with the bucket, and True before its capture, False after it."""


class CaptureJournal:
    """Reports the captures of one engine.

    Args:
        skip: printed names of buckets in whose capture an earlier engine died.
        tell: called before and after every capture, even if it raises.
        stage: number of this pipeline stage.
    """

    def __init__(
        self, skip: Iterable[str] = (), tell: ReportCapture = lambda bucket, begun: None, stage: int = 0
    ) -> None:
        self._skip, self._report, self._stage = frozenset(skip), tell, stage

    def skips(self, bucket: object) -> bool:
        """Returns True if this bucket must not be captured."""
        return self._name(bucket) in self._skip

    @contextmanager
    def capture(self, bucket: object) -> Iterator[None]:
        """Reports the capture that runs inside the ``with`` block."""
        name = self._name(bucket)
        self._report(name, True)
        try:
            yield
        finally:
            self._report(name, False)

    def _name(self, bucket: object) -> str:
        return f"stage {self._stage} {bucket}" if self._stage else str(bucket)
