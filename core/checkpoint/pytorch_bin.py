"""Tensors of a ``pytorch_model.bin``: views of the mapped archive that torch.save writes. Nothing is unpickled."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from trencadis.core.checkpoint.pickle_reader import MAX_PICKLE, Storage, StoredTensor, tensors
from trencadis.core.checkpoint.zip_directory import ArchiveEntry, entries
from trencadis.core.errors import StartupError

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
