"""Paths and names that an operator, or who may load adapters, gives: what no system takes is one line.

A pipe in place of a file would block the start, a device may never end, and neither is read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from trencadis.core.errors import CONTROL, StartupError

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


def expand_path(text: str) -> Path:
    """Returns the path that a user has written, with ``~`` expanded; there may be no such file.

    Raises:
        StartupError: it cannot be a path here: a part is too long, it holds a zero byte, the home folder does not
            exist, or a folder above may not be searched.
    """
    shown = text[:120]
    try:
        path = Path(text).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        if error.errno == errno.ELOOP:
            return path
        raise StartupError(f"{shown}: {error.strerror}") from None
    except RuntimeError:
        raise StartupError(f"{shown}: there is no such home folder") from None
    except ValueError:
        raise StartupError(f"{shown}: a path holds no zero byte") from None
    return path


MOST_NAME = 256
"""Most characters of a name in the API."""


def check_name(name: str, what: str) -> None:
    """Checks a name that logs, metrics and answers will show; ``what`` begins the message.

    Raises:
        StartupError: it is empty, too long or holds control characters.
    """
    if not name.strip() or name != name.strip() or len(name) > MOST_NAME or CONTROL.search(name):
        raise StartupError(f"{what}: a name has 1 to {MOST_NAME} characters, none of them for control or at its ends")
