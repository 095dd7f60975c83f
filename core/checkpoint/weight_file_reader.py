"""Checkpoint tensors by stored names: memory-mapped safetensors or PyTorch files, or random ones."""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from trencadis.core.checkpoint.pytorch_bin import read_bin
from trencadis.core.checkpoint.weight_prefetch import PagePopulator
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject
from trencadis.core.weight_files import files_of

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_HEADER = 100_000_000
DUMMY_STD = 0.02
DUMMY_POOL = 1_000_003  # odd and prime, so that rows of a matrix differ


class DummyWeights:
    """A checkpoint of random weights: it provides any name in any shape, with the same values for the same seed.

    Values are generated once and repeated from an offset that depends on the name, so that even billions cost only a
    copy.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.pool = torch.empty(DUMMY_POOL).normal_(0.0, DUMMY_STD, generator=generator)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    nbytes = 0

    def forget(self) -> None:
        """Does nothing, because nothing is mapped."""

    def make(self, name: str, shape: tuple[int, ...], valued: bool = True) -> Tensor:
        """Returns float32 [shape]: normal values of deviation 0.02, norms around 1.

        Not ``valued``: on the meta device.
        """
        if not valued:
            return torch.empty(shape, device="meta")
        values = torch.empty(shape)
        flat, start = values.view(-1), zlib.crc32(name.encode()) % DUMMY_POOL
        for done in range(0, flat.numel(), DUMMY_POOL):
            part = flat[done : done + DUMMY_POOL]
            first = min(len(part), DUMMY_POOL - start)
            part[:first] = self.pool[start : start + first]
            part[first:] = self.pool[: len(part) - first]
        norm = "norm" in name or name.endswith("ln_q.weight")
        return values.add_(1) if norm and not name.endswith(".bias") else values


class MappedWeights:
    """A checkpoint folder as (stored name, tensor) pairs.

    Tensors are views of mapped files, so any order is equally fast.
    """

    def __init__(self, path: Path, load_format: str = "auto", populate: bool = True) -> None:
        self.files, self.populate = files_of(path, load_format), populate
        self.maps: list[mmap.mmap] = []
        self._populating: PagePopulator | None = None

    @property
    def nbytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.stat().st_size for file in self.files)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for file in self.files:
            yield from read_file(file, self.maps)
        if self.populate:
            self._populating = PagePopulator(self.maps)
            return
        for data in self.maps:  # only some rows of each weight are read, so disable read-ahead
            data.madvise(mmap.MADV_RANDOM)

    def forget(self) -> None:
        """Releases the pages read so far: packed weights are copies, and other views read their pages again."""
        if self._populating is not None:
            self._populating.end()
        for data in self.maps:
            data.madvise(mmap.MADV_DONTNEED)
        self.maps.clear()


def open_weights(
    path: Path, *, load_format: str = "auto", seed: int = 0, populate: bool = True
) -> DummyWeights | MappedWeights:
    """Opens the tensors of a checkpoint folder, or creates random ones.

    Args:
        load_format: see ``files_of``; dummy: random weights.
        populate: True if the files will be read completely.
    """
    return DummyWeights(seed) if load_format == "dummy" else MappedWeights(path, load_format, populate)


UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, RuntimeError
)  # fmt: skip
"""What a header raises that was not written for a tensor: shapes beyond all numbers, a list in the place of a name."""


def read_file(file: Path, maps: list[mmap.mmap]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of one file, mapped copy-on-write, so that pages are read when first used.

    Raises:
        StartupError: it is not a safetensors file, or, with the suffix .bin, not written by torch.save.
    """
    return read_bin(file, maps, DTYPES) if file.suffix == ".bin" else _read_safetensors(file, maps)


def _read_safetensors(file: Path, maps: list[mmap.mmap]) -> Iterator[tuple[str, Tensor]]:
    try:
        with file.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ValueError("no header")
            header = json.loads(f.read(length))
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        maps.append(data)
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, _view(name, entry, data, 8 + length, size)
    except UNREADABLE as error:
        raise StartupError(f"{file} is not a readable safetensors file ({str(error)[:200]})") from None


def _view(name: str, entry: JsonObject, data: mmap.mmap, base: int, size: int) -> Tensor:
    dtype, shape = DTYPES.get(entry["dtype"]), [int(d) for d in entry["shape"]]
    if dtype is None:
        raise ValueError(f"{name} has type {entry['dtype']}")
    begin, end = entry["data_offsets"]
    count = 1
    for d in shape:
        count *= d
    if min([begin, *shape]) < 0 or end - begin != count * dtype.itemsize or base + end > size:
        raise ValueError(f"{name} reaches beyond the file or does not fill its shape")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    offset = base + begin
    if offset % dtype.itemsize:
        raw = torch.frombuffer(bytearray(data[offset : base + end]), dtype=dtype)
        return raw.view(shape)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).view(shape)
