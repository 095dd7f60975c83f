"""Packs weights for oneDNN and for own products, in one pass from the checkpoint's tensors.

oneDNN's own packing needs another copy of the joined and converted rows, on pages of 4 KB, whose first touch takes
longer than the copy. Here panels are in huge pages, and a tensor of oneDNN's layout is made around them. The serialised
description of that layout is read from oneDNN once and tested: if the description of another shape does not follow from
it, oneDNN packs. A later start maps the packed weights of an earlier one from a file.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cpu.native import dense_linear, kernel_threads
from trencadis.backends.cpu.native.ctypes_structs import PackCall
from trencadis.backends.cpu.native.kernel_choice_by_cpu import ANY, KernelTable
from trencadis.backends.cpu.native.quantised_weight_panels import TYPES
from trencadis.core import envs
from trencadis.core.buckets import align_up
from trencadis.core.checkpoint import weight_prefetch
from trencadis.core.checkpoint.weight_prefetch import READERS, PagePopulator
from trencadis.core.device.packed_weights_file import KeptPiece, PackedFile

VARIABLE = "TRENCADIS_CPU_HUGE_PAGES"

HUGE = 2 << 20
"""Bytes of a huge page."""

CHUNK = 64 << 20
"""Bytes of address space that are reserved at a time; pages are added as they are written."""

MKLDNN = 3
"""``c10::Layout::Mkldnn``."""

SHAPES = ((200, 130), (448, 1000), (65, 34))
"""Shapes that the description of a layout is read from and tested with."""

SIZES, FILLED, STRIDE = 8, 112, 320
"""Offsets of a layout's two sizes, of the padded sizes, and of the stride between panels, as serialised."""


class Pages:
    """Allocator of huge pages: returns pieces of a chunk, and frees a chunk when none of its pieces is in use.

    Shared by all engines of a process, and by the threads that load them.
    """

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._at = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        """Allocates uint8 [size] at a multiple of 64 bytes; zeros without pages yet."""
        with self._lock:
            return self._allocate(size)

    def _allocate(self, size: int) -> Tensor:
        if self._chunk is None or self._at + size > len(self._chunk):
            self._chunk, self._at = mmap.mmap(-1, max(CHUNK, align_up(size, HUGE)), flags=mmap.MAP_PRIVATE), 0
            if hasattr(mmap, "MADV_HUGEPAGE") and envs.get_bool(VARIABLE):
                with suppress(OSError):  # the kernel may lack huge pages
                    self._chunk.madvise(mmap.MADV_HUGEPAGE)
        found = torch.frombuffer(self._chunk, dtype=torch.uint8, count=size, offset=self._at)
        self._at += align_up(size, 64)
        return found

    @property
    def has_cache(self) -> bool:
        """True if packed weights may be taken from a cache file."""
        return False

    def finish(self) -> int:
        """Ends loading; returns the bytes of weights that came from the cache."""
        return 0

    def next_cached(self, what: str, size: int) -> Tensor | None:
        """Returns the next packed weight of an earlier start, uint8 [size]; None if there is none, or it is another
        one.
        """
        return None

    def reject_cache(self) -> None:
        """Discards what ``next_cached`` returned: it does not match the checkpoint's weight."""

    def record(self, what: str, memory: Tensor) -> None:
        """Records a weight that was packed or taken from the cache: uint8 [size]."""


pages = Pages()


class PackedPanels(NamedTuple):
    """A weight in panels of 64 outputs.

    Args:
        memory: uint8, the panels.
        tensor: float32 or bfloat16 [outputs, inputs] of oneDNN's layout around ``memory``; None if oneDNN's layout
        differs on this CPU, so that only own products can be used.
    """

    memory: Tensor
    tensor: Tensor | None


def pack_rows(
    parts: Sequence[Tensor], widths: Sequence[int], inputs: int, dtype: torch.dtype, table: KernelTable,
    pages: Pages = pages, own_layout: bool = False,
) -> PackedPanels | None:  # fmt: skip
    """Packs the rows of ``parts`` [rows, up to ``inputs``], one part below the other, into panels.

    Args:
        widths: rows of each part, including zeros below it.
        inputs: values of a row, including zeros after it.
        table: which kernels are used.
        pages: allocator, which may already have the packed weight.
        own_layout: packs also if oneDNN, which multiplies some numbers of rows, cannot read the panels.

    Returns:
        The packed weight, or None if oneDNN must pack.
    """
    outputs, first, most = sum(widths), parts[0], dense_linear.most_rows(table, dtype)
    if not most or inputs % 2 or first.dtype not in TYPES:
        return None
    if any(t.dtype != first.dtype or t.shape[1] != first.shape[1] or t.stride(1) != 1 or not len(t) for t in parts):
        return None
    named = name_of(dtype, outputs, inputs) if outputs >= dense_linear.PANEL else None
    if named is None and most < ANY and not (table.needs_no_library or own_layout):
        return None
    depth = align_up(inputs, dense_linear.UNITS[dtype])
    panels = align_up(outputs, dense_linear.PANEL) // dense_linear.PANEL
    rows, at, begins = np.zeros(panels * dense_linear.PANEL, np.int64), 0, list[int]()
    for tensor, width in zip(parts, widths, strict=True):
        step = tensor.stride(0) * tensor.element_size()
        rows[at : at + len(tensor)] = tensor.data_ptr() + np.arange(len(tensor), dtype=np.int64) * step
        begins.append(at // dense_linear.PANEL)
        at += width
    call = PackCall(0, 0, first.shape[1], depth, TYPES[first.dtype], TYPES[dtype])
    size = panels * dense_linear.PANEL * depth * dtype.itemsize
    row_bytes = first.shape[1] * first.element_size()
    what = f"{str(dtype).removeprefix('torch.')} [{outputs}, {inputs}]"
    memory = pages.next_cached(what, size)
    if memory is not None and not _matches_rows(memory, call, rows, row_bytes, {*begins, panels - 1}, table.number):
        pages.reject_cache()
        memory = None
    if memory is None:
        memory = pages.take(size)
        _pack(call, rows, memory, table.number)
    pages.record(what, memory)
    return PackedPanels(memory, None if named is None else wrap_memory(memory, outputs, inputs, dtype, named))


def _pack(call: PackCall, rows: NDArray[np.int64], memory: Tensor, kind: int) -> None:
    """Packs the rows at the addresses ``rows`` [panels * PANEL] into panels in ``memory``; address 0: a row of
    zeros.
    """
    call.rows, call.out = rows.ctypes.data, memory.data_ptr()
    kernel_threads.calls().pack(
        ctypes.addressof(call), len(rows) // dense_linear.PANEL, kind, kernel_threads.launch_threads()
    )


def _matches_rows(
    memory: Tensor, call: PackCall, rows: NDArray[np.int64], length: int, panels: Collection[int], kind: int
) -> bool:
    """Returns True if the given ``panels`` in ``memory`` are those of ``rows``, of ``length`` bytes each.

    Comparing all panels would take as long as packing does.
    """
    count = len(rows) // dense_linear.PANEL
    held = memory.view(count, -1)
    for panel in panels:
        made, some = torch.empty_like(held[panel]), rows[panel * dense_linear.PANEL : (panel + 1) * dense_linear.PANEL]
        if some[0]:
            weight_prefetch.advise_needed(int(some[0]), int(some.max()) + length)
        _pack(call, some, made, kind)
        if not torch.equal(made, held[panel]):
            return False
    return True


@cache
def name_of(dtype: torch.dtype, outputs: int, inputs: int) -> bytes | None:
    """Returns oneDNN's description of panels of a shape; None if it is not known."""
    names = _names(dtype)
    return None if names is None else _describe_shape(names, dtype, outputs, inputs)


@cache
def _names(dtype: torch.dtype) -> bytes | None:
    """Returns the description of the first of ``SHAPES``, if those of the others follow from it and tensors can be made
    of it.
    """
    if _maker() is None:
        return None
    try:
        known = [_description(torch.ops.mkldnn._reorder_linear_weight(torch.zeros(s, dtype=dtype))) for s in SHAPES]
        if any(_describe_shape(known[0], dtype, *shape) != name for shape, name in zip(SHAPES, known, strict=True)):
            return None
        weight = torch.arange(SHAPES[2][0] * SHAPES[2][1], dtype=torch.float32).view(SHAPES[2]).to(dtype)
        theirs = torch.ops.mkldnn._reorder_linear_weight(weight)
        size = torch.ops.mkldnn._nbytes(theirs)
        raw: Any = (ctypes.c_uint8 * size).from_address(torch.ops.mkldnn.data_ptr(theirs))
        memory = torch.frombuffer(raw, dtype=torch.uint8).clone()
        ours = wrap_memory(memory, *SHAPES[2], dtype, known[2])
        x = torch.ones((3, SHAPES[2][1]), dtype=dtype)
        same = [torch.ops.mkldnn._linear_pointwise.default(x, w, None, "none", [], "") for w in (theirs, ours)]
        return known[0] if torch.equal(*same) else None
    except (AttributeError, RuntimeError, TypeError, IndexError):
        return None


def _description(packed: Tensor) -> bytes:
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())


def _describe_shape(known: bytes, dtype: torch.dtype, outputs: int, inputs: int) -> bytes:
    """Returns the layout description ``known``, rewritten for another shape."""
    held, depth = bytearray(known), align_up(inputs, dense_linear.UNITS[dtype])
    for at, values in (
        (SIZES, (outputs, inputs)),
        (FILLED, (align_up(outputs, dense_linear.PANEL), depth)),
        (STRIDE, (dense_linear.PANEL * depth,)),
    ):
        for i, value in enumerate(values):
            held[at + 8 * i : at + 8 * i + 8] = value.to_bytes(8, "little")
    return bytes(held)


@cache
def _maker() -> Any:
    """Returns torch's function that makes a tensor around memory; None if this torch has none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        make = library.aoti_torch_create_tensor_from_blob_v2
        _ = library.aoti_torch_dtype_float32, torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
        library.aoti_torch_delete_tensor_object.argtypes = (ctypes.c_void_p,)
    except (OSError, AttributeError):
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    make.argtypes = (pointer, size, pointer, pointer, size, number, number, number, pointer, number, pointer, size)
    make.restype = number
    return library


def wrap_memory(memory: Tensor, outputs: int, inputs: int, dtype: torch.dtype, name: bytes) -> Tensor:
    """Makes a tensor of oneDNN's layout over ``memory``, which it keeps alive.

    Raises:
        RuntimeError: torch cannot make it.
    """
    library, found = _maker(), ctypes.c_void_p()
    sizes, strides = (ctypes.c_int64 * 2)(outputs, inputs), (ctypes.c_int64 * 2)(inputs, 1)
    code = getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        memory.data_ptr(), 2, sizes, strides, 0, code, 0, -1, ctypes.byref(found), MKLDNN, name, len(name)
    )
    if failed:
        raise RuntimeError("torch makes no tensor around packed weights")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    made: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(found, None, None))
    if sys.getrefcount(made) > 2:  # torch 2.13 copies the tensor at ``found``, which holds the memory, too
        library.aoti_torch_delete_tensor_object(found)
    made.room = memory  # type: ignore[attr-defined]
    return made


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
