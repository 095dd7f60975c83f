"""Reads files that an operator names: a pipe would block the start, a device may never end, and neither is taken."""

from __future__ import annotations

import errno
import os
import stat

MOST = 64 << 20
"""Largest file that is read whole, in bytes."""


def check_regular(path: str | os.PathLike[str]) -> None:
    """Checks that ``path``, after links, is a regular file; does not read it.

    Raises:
        OSError: there is none, or it is a folder, pipe, socket or device.
    """
    _check_mode(os.stat(path).st_mode)


def _check_mode(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file")


def read_regular(path: str | os.PathLike[str], most: int = MOST) -> bytes:
    """Returns the bytes of a regular file; does not wait for the writer of a pipe.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than ``most`` bytes. ``strerror`` says why.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        _check_mode(found.st_mode)
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB")
        with open(handle, "rb", closefd=False) as file:
            data = file.read(most + 1)
    finally:
        os.close(handle)
    if len(data) > most:  # files of /proc have no size
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB")
    return data


def read_regular_text(path: str | os.PathLike[str], encoding: str = "utf-8", most: int = MOST) -> str:
    """Returns the text of a regular file, with line feeds alone as line ends.

    Raises:
        OSError: as ``read_regular``.
        UnicodeDecodeError: it is no text.
    """
    return read_regular(path, most).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
