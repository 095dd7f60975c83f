"""The output file: one line for each line of the input, in the same order, so that it also records a run's progress."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from trencadis.core.errors import StartupError
from trencadis.server.cli import batch_lines


class _Written(msgspec.Struct):
    id: str
    custom_id: str | None


_WRITTEN = msgspec.json.Decoder(_Written)


class ResultFile:
    """Writes lines in the order of their numbers; those that come early wait in memory. Every line is written to the
    system at once, so a process that is killed leaves whole lines and at most one incomplete one, which ``resume`` cuts
    off.

    Args:
        resume: keep the lines that the file has.

    Raises:
        StartupError: the file cannot be written.
    """

    def __init__(self, path: Path, resume: bool = False) -> None:
        self.path = path
        self.next = 0
        """Number of the line that is written next."""
        self.early: dict[int, bytes] = {}
        self.early_bytes = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if resume else os.O_TRUNC)
        try:
            self._fd = os.open(path, flags, 0o666)
            self._end = _cut_torn_line(self._fd) if resume else 0
            os.lseek(self._fd, self._end, os.SEEK_SET)
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}.") from None

    def read_custom_ids(self) -> Iterator[str | None]:
        """Yields the ``custom_id`` of each line that the file had; afterwards ``next`` is the number of lines.

        Raises:
            StartupError: a line is not a batch's output.
        """
        if not self._end:
            return
        with self.path.open("rb") as file:
            for line in file:
                try:
                    found = _WRITTEN.decode(line)
                except msgspec.MsgspecError:
                    where = f"line {self.next + 1} of {self.path}"
                    raise StartupError(
                        f"{where} is no line of a batch's output; --resume cannot go on there."
                    ) from None
                self.next += 1
                yield found.custom_id

    def write(self, number: int, line: bytes) -> None:
        """Writes a line once all lines before it are written.

        Raises:
            OSError: it cannot be written, for example because the disk is full.
        """
        self.early[number] = line
        self.early_bytes += len(line)
        while (found := self.early.pop(self.next, None)) is not None:
            self.early_bytes -= len(found)
            self.next += 1
            left = memoryview(found)
            while left:
                left = left[os.write(self._fd, left) :]

    def close(self, sync: bool = True) -> None:
        """Closes the file; ``sync`` waits until it is on the disk."""
        if sync and os.path.isfile(self.path):
            os.fsync(self._fd)
        os.close(self._fd)


def _cut_torn_line(fd: int) -> int:
    """Cuts off a last line without an end; returns the size of the file after that."""
    end = os.lseek(fd, 0, os.SEEK_END)
    at = end
    while at:
        begin = max(0, at - batch_lines.PIECE)
        found = os.pread(fd, at - begin, begin).rfind(b"\n")
        if found >= 0:
            at = begin + found + 1
            break
        at = begin
    if at < end:
        os.ftruncate(fd, at)
    return at
