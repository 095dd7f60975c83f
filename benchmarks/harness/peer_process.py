"""Another engine's process under another Python, which answers a line of JSON with a line of JSON."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

MISSING = "unproven"


class PeerMissing(Exception):
    """The other Python cannot run its engine; the text says how it ended."""


class PeerProcess:
    """A process that sleeps while others are measured; its first line has ``start`` (seconds) and ``version``.

    Args:
        words: the command.
        hints: signal -> what to try where it ends the process.

    Raises:
        PeerMissing: the process ends before its first line.
    """

    def __init__(self, words: Sequence[str], hints: dict[signal.Signals, str] | None = None) -> None:
        self.figures, self._hints = dict[str, list[float]](), hints or {}
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise PeerMissing(f"{words[0]}: {error.strerror}") from None
        said = self._read()
        self.start, self.version = float(said["start"]), str(said["version"])

    def ask(self, **requested: Any) -> dict[str, Any]:
        """Sends one question and returns its answer.

        Raises:
            PeerMissing: the process ends before it answers.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(requested) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerMissing(self._how_it_ended()) from None
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def note(self, figure: str, seconds: float) -> None:
        """Adds a measurement to ``figures``, in milliseconds."""
        self.figures.setdefault(figure, []).append(1000 * seconds)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # engines print lines of their own, too
                found: dict[str, Any] = json.loads(line)
                return found
        raise PeerMissing(self._how_it_ended())

    def _how_it_ended(self) -> str:
        """Returns the exit status or the signal of the ended process, the last line that it wrote, and a hint."""
        said = self._process.communicate()[1].strip().splitlines()
        return describe_end(self._process.returncode, said[-1] if said else "", self._hints)


def describe_end(code: int, said: str, hints: dict[signal.Signals, str]) -> str:
    """Returns how a process ended: ``code`` is its exit status, or minus the number of the signal that ended it."""
    if code >= 0:
        return f"it ended with status {code}" + (f": {said}" if said else "")
    number = signal.Signals(-code)
    hint = f"; {hints[number]}" if number in hints else ""
    return f"it died by {number.name}" + (f" after {said!r}" if said else "") + hint
