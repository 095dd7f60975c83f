"""Reports each capture to the parent process, so that a bucket whose capture kills the engine is skipped next time.

Nothing is written to disk: the engine tells its parent before and after each capture, and the parent passes the
buckets in whose capture an engine died to the next engine. Other ranks tell the engine, which passes it on where one of
them dies. Pipeline stages have graphs of their own, so that later ones name their stage with the bucket.
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
        tell: called before and after every capture, also if it ends with an exception.
        stage: of the pipeline.
    """

    def __init__(
        self, skip: Iterable[str] = (), tell: ReportCapture = lambda bucket, begun: None, stage: int = 0
    ) -> None:
        self._skip, self._report, self._stage = frozenset(skip), tell, stage

    def skips(self, bucket: object) -> bool:
        """Whether this bucket must stay compiled."""
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
