"""Reports each capture to the parent process, so that a bucket whose capture kills the engine is skipped next time.

Nothing is written to disk: the engine tells its parent before and after each capture, and the parent passes the
buckets in whose capture an engine died to the next engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Tell = Callable[[str, bool], None]
"""Called with the bucket, and True before its capture, False after it."""


class Journal:
    """Reports the captures of one engine.

    Args:
        skip: printed names of buckets in whose capture an earlier engine died.
        tell: called before and after every capture, also if it ends with an exception.
    """

    def __init__(self, skip: Iterable[str] = (), tell: Tell = lambda bucket, begun: None) -> None:
        self._skip, self._tell = frozenset(skip), tell

    def skips(self, bucket: object) -> bool:
        """Whether this bucket must stay compiled."""
        return str(bucket) in self._skip

    @contextmanager
    def capture(self, bucket: object) -> Iterator[None]:
        """Reports the capture that runs inside the ``with`` block."""
        self._tell(str(bucket), True)
        try:
            yield
        finally:
            self._tell(str(bucket), False)
