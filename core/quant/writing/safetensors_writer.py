"""Writes safetensors files whose tensors arrive one at a time, in any order; copies files that hold no weights.

The offsets of tensors are computed in advance.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from trencadis.core.checkpoint.weight_file_reader import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"


class TensorSlot(NamedTuple):
    """A tensor of a file to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """One file: the header is written first, tensors as they arrive; ``close`` checks that all have arrived."""

    def __init__(self, path: Path, slots: Sequence[TensorSlot]) -> None:
        # Larger dtypes first, so that every tensor is aligned to its dtype's size.
        ordered = sorted(slots, key=lambda s: -s.dtype.itemsize)
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._where: dict[str, tuple[int, TensorSlot]] = {}
        at = 0
        for slot in ordered:
            entries[slot.name] = {
                "dtype": NAMES[slot.dtype], "shape": list(slot.shape), "data_offsets": [at, at + slot.bytes],
            }  # fmt: skip
            self._where[slot.name] = at, slot
            at += slot.bytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._base, self._missing = 8 + len(header), set(self._where)
        self._file = path.open("wb")
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.truncate(self._base + at)

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor, which must match the header."""
        at, slot = self._where[name]
        assert tensor.dtype == slot.dtype and tuple(tensor.shape) == slot.shape, (name, tensor.dtype, tensor.shape)
        self._missing.discard(name)
        self._file.seek(self._base + at)
        if tensor.numel():
            self._file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Closes the file; asserts that every tensor has been written."""
        self._file.close()
        assert not self._missing, f"never written: {sorted(self._missing)[:3]}"

    def abandon(self) -> None:
        """Closes an incomplete file."""
        self._file.close()


class WeightFolder:
    """The weight files of a checkpoint, with an index if there are several.

    Args:
        files: file name -> its tensors.
    """

    def __init__(self, path: Path, files: Mapping[str, Sequence[TensorSlot]]) -> None:
        self._path, self._slots = path, files
        self._files = {name: TensorFile(path / name, slots) for name, slots in files.items()}
        self._owner = {slot.name: name for name, slots in files.items() for slot in slots}

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor to the file that has a slot for it."""
        self._files[self._owner[name]].put(name, tensor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *why: object) -> None:
        for file in self._files.values():
            if kind is None:
                file.close()
            else:
                file.abandon()
        if kind is None and (len(self._files) > 1 or "model.safetensors" not in self._files):
            total = sum(slot.bytes for slots in self._slots.values() for slot in slots)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self._owner.items()))}
            (self._path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
"""Suffixes of files that hold weights in some form and are not copied."""


def copy_other_files(source: Path, out: Path, without: Sequence[str]) -> None:
    """Copies every file and folder of ``source`` that holds no weights, except those ``without``, to ``out``."""
    for entry in sorted(source.iterdir()):
        if entry.name.startswith(".") or entry.name in (*without, INDEX) or _holds_weights(entry):
            continue
        if entry.is_dir():
            ignore = shutil.ignore_patterns(".*", *(f"*{end}" for end in OTHERS), "*.index.json")
            shutil.copytree(entry, out / entry.name, ignore=ignore)
        elif entry.is_file():
            shutil.copyfile(entry, out / entry.name)


def _holds_weights(entry: Path) -> bool:
    return entry.name.endswith((*OTHERS, *(f"{end}.index.json" for end in OTHERS)))
