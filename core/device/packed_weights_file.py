"""Keeps packed weights in a file, which the next start maps instead of packing again. Torch-free.

A file belongs to one rank, one checkpoint and one set of flags that affect weights. It begins with a line that names
the format, eight bytes with the length of a JSON header, and the header: the state of the checkpoint's files, and for
each piece its description, offset and size. Pieces follow in the order in which weights are packed.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import logging
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trencadis.core.buckets import align_up
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonMapping
from trencadis.core.operator_files import expand_path
from trencadis.core.weight_files import files_of

log = logging.getLogger("trencadis.engine")

FORMAT = b"trencadis packed weights, 1\n"
START = 4096
"""Alignment of the first piece."""

STEP = 64
"""Alignment of the other pieces: a cache line."""

MOST = 64 << 20
"""Limit in bytes of the header, and of one write."""


PART = ".part"
"""How the name of a file ends that is being written."""


class KeptPiece(NamedTuple):
    """Bytes [start, start + size) of a file; ``what`` describes them."""

    what: str
    start: int
    size: int


@dataclass(frozen=True)
class PackedFile:
    """The file of one rank's packed weights, and the checkpoint files that they were packed from.

    ``sources``: name, size and modification time of each file, in whole seconds, because container images keep no
    fractions.
    """

    path: Path
    sources: tuple[tuple[str, int, int], ...]

    def read(self) -> tuple[mmap.mmap, list[KeptPiece]] | None:
        """Maps the file copy-on-write and returns it with its pieces.

        Returns None if there is no file, or if it is incomplete or belongs to another state of the checkpoint.
        """
        try:
            handle = open_private(self.path, os.O_RDONLY)
            try:
                data = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
            finally:
                os.close(handle)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s is not read: %s", self.path, error)
            return None
        try:
            return data, self._pieces(data)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            data.close()
            log.info("%s is not used: %s", self.path, str(error)[:200])
            return None

    def _pieces(self, data: mmap.mmap) -> list[KeptPiece]:
        """Returns the pieces that the header lists; raises ValueError, TypeError or KeyError if it is invalid."""
        at = len(FORMAT) + 8
        if data[: len(FORMAT)] != FORMAT:
            raise ValueError("it is of another format")
        length = int.from_bytes(data[len(FORMAT) : at], "little")
        if not 0 < length <= min(MOST, len(data) - at):
            raise ValueError("its header is cut off")
        header = json.loads(data[at : at + length])
        if header["sources"] != [list(source) for source in self.sources]:
            raise ValueError("the checkpoint has changed since")
        pieces = [KeptPiece(*piece) for piece in header["pieces"]]
        if not all(_is_inside(piece, at + length, len(data)) for piece in pieces):
            raise ValueError("it does not hold what its header says")
        return pieces

    def write(self, pieces: Sequence[tuple[str, memoryview]]) -> bool:
        """Writes the file atomically; returns True if it was written.

        If several processes try, one of them writes. Errors are logged and otherwise ignored.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            locked = self.path.with_name(f"{self.path.name}.lock")
            lock = open_private(locked, os.O_CREAT | os.O_RDWR)
        except OSError as error:
            log.warning("packed weights are not kept: %s", error)
            return False
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                log.info("packed weights: another process writes %s", self.path)
                return False
            try:
                self._replace(pieces)
            finally:
                locked.unlink(missing_ok=True)
            return True
        except OSError as error:
            log.warning("packed weights are not kept: %s", error)
            return False
        finally:
            os.close(lock)

    def _replace(self, pieces: Sequence[tuple[str, memoryview]]) -> None:
        """Writes a file of a name that nobody can have prepared, and moves it to its place; the lock is held.

        Raises:
            OSError: nothing was changed.
        """
        for left in self.path.parent.glob(f"{glob.escape(self.path.name)}.*{PART}"):
            left.unlink()  # of a process that was killed while it wrote
        handle, part = tempfile.mkstemp(PART, f"{self.path.name}.", self.path.parent)
        try:
            self._write(handle, pieces)
            os.replace(part, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
        finally:
            os.close(handle)

    def _write(self, handle: int, pieces: Sequence[tuple[str, memoryview]]) -> None:
        header, offsets = self._header(pieces)
        free = shutil.disk_usage(self.path.parent).free
        size = offsets[-1] + len(pieces[-1][1])
        if size > free:
            raise OSError(f"{self.path.parent} has {free / 1e9:.2f} GB free, they take {size / 1e9:.2f}")
        _put(handle, memoryview(header), 0)
        for start, (_, data) in zip(offsets, pieces, strict=True):
            _put(handle, data, start)
        os.fsync(handle)

    def _header(self, pieces: Sequence[tuple[str, memoryview]]) -> tuple[bytes, list[int]]:
        """Returns the file's first bytes, and the offset of each piece."""
        sizes, header_size = [len(data) for _, data in pieces], START
        while True:  # the header holds offsets, which depend on its length
            offsets, at = list[int](), header_size
            for size in sizes:
                offsets.append(at)
                at = align_up(at + size, STEP)
            listed = [[what, start, size] for (what, _), start, size in zip(pieces, offsets, sizes, strict=True)]
            text = json.dumps({"sources": self.sources, "pieces": listed}).encode()
            made = FORMAT + len(text).to_bytes(8, "little") + text
            if len(made) <= header_size:
                return made, offsets
            header_size = align_up(len(made), START)


def open_private(path: Path, flags: int) -> int:
    """Opens a file that no other user can have put there, or be changing through another name.

    The last part of ``path`` is not followed if it is a symbolic link, and a FIFO is not waited for.

    Args:
        flags: of ``os.open``; a file that is created can be read by this user alone.

    Returns:
        A file descriptor.

    Raises:
        OSError: it cannot be opened, or is not a regular file with one name, of this user or of root.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(handle)
    why = ""
    if not stat.S_ISREG(found.st_mode):
        why = "it is not a regular file"
    elif found.st_uid not in (os.geteuid(), 0):
        why = f"it belongs to the user {found.st_uid}"
    elif found.st_nlink > 1:
        why = "it has more than one name (hard links)"
    if why:
        os.close(handle)
        raise PermissionError(f"{path}: {why}")
    return handle


def _is_inside(piece: KeptPiece, first: int, end: int) -> bool:
    """Returns True if a piece is aligned and lies between ``first`` and ``end``."""
    if not (isinstance(piece.start, int) and isinstance(piece.size, int) and piece.size > 0):
        return False
    return first <= piece.start <= end - piece.size and piece.start % STEP == 0


def _put(handle: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done : done + MOST], at + done)


def packed_file(config: EngineConfig, rank: int = 0) -> PackedFile | None:
    """Returns the file of a rank's weights in ``--packed-weights-dir``; None without that flag, or if weights are
    random.

    Returns None for an invalid checkpoint, too; loading reports the error.
    """
    folder, model = config.packed_weights_dir, Path(config.model)
    if not folder or config.load_format == "dummy" or not model.is_dir():
        return None
    model = model.resolve()
    try:
        found = [(file.name, file.stat()) for file in files_of(model, config.load_format)]
    except (StartupError, OSError):
        return None
    label = model.parent.parent.name if model.parent.name == "snapshots" else model.name  # the hub's cache
    number = hashlib.sha256(json.dumps(_packing_key(config, model, rank), sort_keys=True).encode()).hexdigest()[:16]
    path = expand_path(folder) / f"{label}-{number}.packed"
    return PackedFile(path, tuple((file, info.st_size, int(info.st_mtime)) for file, info in found))


def _packing_key(config: EngineConfig, model: Path, rank: int) -> JsonMapping:
    """Returns everything that distinguishes sets of packed weights."""
    return {
        "model": str(model),
        "load_format": config.load_format,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "overrides": config.hf_overrides,
        "rank": [rank, config.tensor_parallel_size, config.pipeline_parallel_size, config.pipeline_layer_partition],
    }
