"""Cache of packed weights: maps those of an earlier start from a file; if some must be packed, writes all to the
file.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from trencadis.backends.cpu.native.weight_packing import Pages
from trencadis.core.checkpoint.prefetch import READERS, PagePopulator
from trencadis.core.device.packed_weights import KeptPiece, PackedFile

log = logging.getLogger("trencadis.engine")


class CachedPages(Pages):
    """``Pages`` that first returns packed weights from a cache file, in the order in which they were packed."""

    def __init__(self, file: PackedFile) -> None:
        super().__init__()
        self.file = file
        self.writing: threading.Thread | None = None
        self._all: list[tuple[str, Tensor]] = []
        self._mapped: list[int] = []
        self._data: mmap.mmap | None = None
        self._pieces: Iterator[KeptPiece] = iter(())
        found = file.read()
        if found is not None:
            self._data, self._pieces = found[0], iter(found[1])
        self._populating = None if self._data is None else PagePopulator([self._data], READERS)

    @property
    def has_cache(self) -> bool:
        """True while every request so far matched the cached file."""
        return self._data is not None

    def next_cached(self, what: str, size: int) -> Tensor | None:
        piece = next(self._pieces, None) if self._data is not None else None
        if piece is None or (piece.what, piece.size) != (what, size):
            self._data = None
            return None
        self._mapped.append(size)
        return torch.frombuffer(self._data, dtype=torch.uint8, count=size, offset=piece.start)

    def reject_cache(self) -> None:
        log.warning("%s holds other weights than the checkpoint: they are packed anew", self.file.path)
        self._mapped.pop()
        self._data = None

    def record(self, what: str, memory: Tensor) -> None:
        self._all.append((what, memory))

    def finish(self) -> int:
        """Waits for reads of the file; if weights were packed anew, writes the file in a background thread."""
        if self._populating is not None:
            self._populating.wait()
        made, self._all = self._all, []
        if len(made) > len(self._mapped):
            self.writing = threading.Thread(target=self._write, args=(made,), name="keep-weights", daemon=True)
            self.writing.start()
        elif not made:
            log.info("--packed-weights-dir has no effect: this start packs no weight in a layout that can be kept")
        return sum(self._mapped)

    def _write(self, made: list[tuple[str, Tensor]]) -> None:
        begun, size = time.perf_counter(), sum(len(memory) for _, memory in made)
        if self.file.write([(what, memory.numpy().data) for what, memory in made]):
            seconds = time.perf_counter() - begun
            log.info("packed weights: %.2f GB kept in %s, in %.1f s", size / 1e9, self.file.path, seconds)
