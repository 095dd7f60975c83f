"""Which capture is going on, told to whoever outlives this process; a crash in one is skipped at the next start.

Nothing is written to disk: the engine tells its parent before and after each capture, and the parent passes the
buckets in whose capture an engine died to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Tell = Callable[[str, bool], None]
"""(bucket, whether its capture begins or has ended)."""


class Journal:
    """Captures of one engine.

    Args:
        skip: buckets, as they print, in whose capture an earlier engine died.
        tell: called before and after every capture; a failure that is an exception ends a capture as well.
    """

    def __init__(self, skip: Iterable[str] = (), tell: Tell = lambda bucket, begun: None) -> None:
        self._skip, self._tell = frozenset(skip), tell

    def skips(self, bucket: object) -> bool:
        """Whether this bucket must stay compiled."""
        return str(bucket) in self._skip

    @contextmanager
    def capture(self, bucket: object) -> Iterator[None]:
        """Around one capture."""
        self._tell(str(bucket), True)
        try:
            yield
        finally:
            self._tell(str(bucket), False)
