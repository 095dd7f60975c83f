"""Progress of a batch: a bar on a terminal, otherwise a log line now and then."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

log = logging.getLogger("trencadis.server")
LINE_EVERY = 30.0


class BatchProgress:
    """Counts answers.

    Args:
        total: lines of the input.
        bar: show a bar if there is a terminal.
    """

    def __init__(self, total: int, bar: bool = True) -> None:
        self.total, self.done, self.before, self.failed = total, 0, 0, 0
        self._begun = self._said = time.monotonic()
        self._wanted = bar and sys.stderr.isatty()
        self._bar: Any = None

    def begin(self, done: int) -> None:
        """Starts the clock; ``done`` lines were answered by an earlier run."""
        self.done = self.before = done
        self._begun = self._said = time.monotonic()
        if self._wanted:
            from tqdm import tqdm

            self._bar = tqdm(total=self.total, initial=done, desc="Running batch", unit="req", dynamic_ncols=True)

    def add_answer(self, good: bool) -> None:
        """Counts one more answered line."""
        self.done += 1
        self.failed += not good
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self.failed} failed" if self.failed else "", refresh=False)
            self._bar.update(1)
        elif time.monotonic() - self._said >= LINE_EVERY:
            self._said = time.monotonic()
            log.info("%s", self.format_line())

    def format_line(self) -> str:
        """Returns the progress in one line."""
        seconds = max(time.monotonic() - self._begun, 1e-6)
        rate = (self.done - self.before) / seconds
        left = f", {(self.total - self.done) / rate:.0f} s left" if rate and self.total > self.done else ""
        return f"batch: {self.done} of {self.total} lines, {self.failed} failed, {rate:.1f}/s{left}"

    def close(self) -> None:
        """Ends the progress bar."""
        if self._bar is not None:
            self._bar.close()
