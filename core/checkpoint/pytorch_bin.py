"""Tensors of a ``pytorch_model.bin``: views of the mapped archive that torch.save writes. Nothing is unpickled.

The archive's directory is read here: entries are stored uncompressed, so that they can be mapped. It follows PKWARE's
APPNOTE 6.3, with the 64-bit records of archives above 4 GiB. Python's ``zipfile`` is not used because it reads a
directory of any length and accepts entries that share bytes.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.core.checkpoint.state_dict_pickle import MAX_PICKLE, Storage, StoredTensor, tensors
from trencadis.core.errors import StartupError

MAX_DIRECTORY = 4 << 20
MAX_ENTRIES = 20_000
MAX_COMMENT = 0xFFFF
NONE32, NONE16 = 0xFFFFFFFF, 0xFFFF
"""Markers in a field whose value is stored in a 64-bit record."""

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ENCRYPTED = 1
_EXTRA64 = 1


class ArchiveEntry(NamedTuple):
    """Bytes [start, start + size) of the file; ``crc`` is the CRC-32 from the directory."""

    start: int
    size: int
    crc: int


def entries(data: mmap.mmap) -> dict[str, ArchiveEntry]:
    """Returns the entries of an archive by name.

    Raises:
        ValueError: the data is no archive or damaged, or an entry is compressed, encrypted, duplicated, shares bytes
            with another or has a name that leads out of the folder.
    """
    extent, size, count = _directory(data)
    found: dict[str, ArchiveEntry] = {}
    taken: list[tuple[int, int]] = []
    at, end = extent, extent + size
    for _ in range(count):
        name, header, entry, at = _central(data, at, end)
        if name in found:
            raise ValueError(f"it holds {name[:80]!r} twice")
        start = _data_start(data, header, name, extent)
        if start + entry.size > extent:
            raise ValueError(f"{name[:80]!r} is cut off")
        found[name] = ArchiveEntry(start, entry.size, entry.crc)
        taken.append((header, start + entry.size))
    taken.sort()
    if any(after[0] < before[1] for before, after in pairwise(taken)):
        raise ValueError("its entries share bytes")
    return found


class _Directory(NamedTuple):
    """The central directory: its offset and size in bytes, and its number of entries."""

    offset: int
    size: int
    entries: int


class _DirectoryEntry(NamedTuple):
    """An entry of the directory: its name, the offset of its local header, its size and CRC, and the offset of the next
    entry.
    """

    name: str
    header: int
    entry: ArchiveEntry
    following: int


def _directory(data: mmap.mmap) -> _Directory:
    """Finds the central directory."""
    end = data.rfind(b"PK\x05\x06", max(0, len(data) - MAX_COMMENT - _END.size))
    if end < 0 or end + _END.size > len(data):
        raise ValueError("its directory is missing: the file is cut off, or no zip archive")
    _, disk, first, _, count, size, extent, _ = _END.unpack_from(data, end)
    locator = end - _LOCATOR.size
    if NONE32 in (size, extent) or count == NONE16:
        mark, _, at, _ = _LOCATOR.unpack_from(data, locator) if locator >= 0 else (b"", 0, 0, 0)
        if mark != b"PK\x06\x07" or at + _END64.size > locator:
            raise ValueError("its directory is damaged")
        mark, _, _, _, disk, first, _, count, size, extent = _END64.unpack_from(data, at)
        if mark != b"PK\x06\x06":
            raise ValueError("its directory is damaged")
    if disk or first or extent + size > end:
        raise ValueError("its directory is damaged")
    if count > MAX_ENTRIES or size > MAX_DIRECTORY:
        raise ValueError(f"it has {count} entries; at most {MAX_ENTRIES} are read")
    return _Directory(extent, size, count)


def _central(data: mmap.mmap, at: int, end: int) -> _DirectoryEntry:
    """Reads the directory entry at ``at``."""
    if at + _CENTRAL.size > end:
        raise ValueError("its directory is damaged")
    mark, _, _, flags, method, _, _, crc, packed, size, named, extra, comment, _, _, _, header = _CENTRAL.unpack_from(
        data, at
    )
    text = at + _CENTRAL.size
    following = text + named + extra + comment
    if mark != b"PK\x01\x02" or following > end:
        raise ValueError("its directory is damaged")
    name = data[text : text + named].decode("utf-8", "backslashreplace")
    if name.startswith("/") or "\\" in name or ".." in name.split("/"):
        raise ValueError(f"{name[:80]!r} leads out of the folder")
    size, packed, header = _wide(data[text + named : text + named + extra], [size, packed, header])
    if method or packed != size:
        raise ValueError(f"{name[:80]!r} is compressed; torch.save stores entries as they are")
    if flags & _ENCRYPTED:
        raise ValueError(f"{name[:80]!r} is encrypted")
    return _DirectoryEntry(name, header, ArchiveEntry(0, size, crc), following)


def _wide(extra: bytes, fields: list[int]) -> list[int]:
    """Returns ``fields`` with the marked ones replaced by values of the 64-bit extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        held = extra[at + 4 : at + 4 + length]
        at += 4 + length
        if kind == _EXTRA64:
            values = list(struct.unpack(f"<{len(held) // 8}Q", held[: len(held) // 8 * 8]))
            fields = [values.pop(0) if f == NONE32 and values else f for f in fields]
    return fields


def _data_start(data: mmap.mmap, header: int, name: str, limit: int) -> int:
    """Returns the offset of an entry's bytes, after its local header, whose name must equal the directory's."""
    if header + _LOCAL.size > limit:
        raise ValueError(f"{name[:80]!r} is cut off")
    mark, *_, named, extra = _LOCAL.unpack_from(data, header)
    text = header + _LOCAL.size
    if mark != b"PK\x03\x04" or data[text : text + named].decode("utf-8", "backslashreplace") != name:
        raise ValueError(f"{name[:80]!r} has another name where it is stored")
    return int(text + named + extra)


PICKLE = "/data.pkl"
CONVERT = "take the model as safetensors, or convert it where its author is trusted"


def read_bin(file: Path, maps: list[mmap.mmap], types: dict[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of one file, mapped copy-on-write. Tensors that share a storage also share it here.

    Args:
        types: safetensors' dtype names -> torch dtypes.

    Raises:
        StartupError: the file is damaged, or torch.save did not write it from a state dict; one line.
    """
    try:
        with file.open("rb") as f:
            if f.read(2) != b"PK":
                raise ValueError(f"torch.save wrote it before version 1.6, or it is no archive; {CONVERT}")
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        maps.append(data)
        found = entries(data)
        root = _root(found)
        _check_order(data, found.get(f"{root}/byteorder"))
        storages = _Storages(data, found, root)
        for name, stored in tensors(_pickle(data, found[root + PICKLE])).items():
            yield name, _view(name, stored, storages.bytes_of(stored.storage, types), types[stored.dtype])
    except (OSError, ValueError, RuntimeError) as error:
        raise StartupError(f"{file} is not a readable PyTorch file: {error}") from None


class _Storages:
    """The storages of one archive as bytes; each is checked and mapped once."""

    def __init__(self, data: mmap.mmap, found: dict[str, ArchiveEntry], root: str) -> None:
        self.data, self.found, self.root = data, found, root
        self._made: dict[str, Tensor] = {}

    def bytes_of(self, storage: Storage, types: dict[str, torch.dtype]) -> Tensor:
        """Returns uint8 [bytes of the storage], aligned for every dtype."""
        entry = self.found.get(f"{self.root}/data/{storage.key}")
        if entry is None:
            raise ValueError(f"it lacks the storage {storage.key[:80]!r}")
        width = types[storage.dtype].itemsize if storage.dtype else 1
        if entry.size != storage.elements * width:
            raise ValueError(f"storage {storage.key[:80]!r} has {entry.size} bytes, not {storage.elements} x {width}")
        if storage.key not in self._made:
            self._made[storage.key] = self._map_storage(storage.key, entry)
        return self._made[storage.key]

    def _map_storage(self, key: str, entry: ArchiveEntry) -> Tensor:
        if not entry.size:
            return torch.empty(0, dtype=torch.uint8)
        with memoryview(self.data)[entry.start : entry.start + entry.size] as held:
            _check_sum(f"storage {key[:80]!r}", held, entry)
            # torch.save aligns storages to 64 bytes, but other programs that write archives do not.
            if entry.start % 8:
                return torch.frombuffer(bytearray(held), dtype=torch.uint8)
        return torch.frombuffer(self.data, dtype=torch.uint8, count=entry.size, offset=entry.start)


def _root(found: dict[str, ArchiveEntry]) -> str:
    """Returns the folder inside the archive that holds everything."""
    roots = [n.removesuffix(PICKLE) for n in found if n.endswith(PICKLE) and n.count("/") == 1]
    if len(roots) != 1:
        raise ValueError("it holds no data.pkl, so torch.save did not write it")
    return roots[0]


def _check_order(data: mmap.mmap, entry: ArchiveEntry | None) -> None:
    """Checks that numbers are little-endian; files of older versions have no entry for it and always are."""
    if entry is not None and data[entry.start : entry.start + min(entry.size, 16)] != b"little":
        raise ValueError("its numbers are not little-endian")


def _pickle(data: mmap.mmap, entry: ArchiveEntry) -> bytes:
    if entry.size > MAX_PICKLE:
        raise ValueError(f"its data.pkl has {entry.size} bytes; at most {MAX_PICKLE} are read")
    held = data[entry.start : entry.start + entry.size]
    _check_sum("data.pkl", held, entry)
    return held


def _check_sum(what: str, held: bytes | memoryview, entry: ArchiveEntry) -> None:
    """Raises ValueError if the checksum differs; 0 means that torch wrote none."""
    if entry.crc and zlib.crc32(held) != entry.crc:
        raise ValueError(f"{what} is damaged (its checksum differs); fetch the file again")


def _view(name: str, stored: StoredTensor, held: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor as a view with its strides.

    Raises ValueError if it exceeds its storage or repeats elements.
    """
    count, last = 1, stored.offset
    for size, stride in zip(stored.shape, stored.strides, strict=True):
        count *= size
        last += (size - 1) * stride
    if count == 0:
        return torch.empty(stored.shape, dtype=dtype)
    elements = held.numel() // dtype.itemsize
    if last >= elements:
        raise ValueError(f"{name[:80]!r} reaches beyond its storage")
    if count > elements:
        raise ValueError(f"{name[:80]!r} repeats the elements of its storage")
    return held[: elements * dtype.itemsize].view(dtype).as_strided(stored.shape, stored.strides, stored.offset)
