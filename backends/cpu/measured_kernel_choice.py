"""Measures which kernels are fastest on this CPU, once, and keeps the choice in a file for later starts.

One process measures: rank 0 of the first engine that needs the choice. The other ranks get it over their group, and
replicas wait for the file. A file of another CPU, library or number of threads is not used; without a file that can be
written nothing is measured, so that all engines of a machine use one table.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cpu.native import dense_linear, kernel_library
from trencadis.backends.cpu.native.kernel_choice_by_cpu import (
    SHARED_ROWS,
    TORCH,
    VARIABLE,
    KernelTable,
    Op,
    with_choice,
)
from trencadis.backends.cpu.native.quantised_weight_panels import DTYPE_NAMES
from trencadis.backends.cpu.ops import CpuOps, is_packable
from trencadis.core import envs
from trencadis.core.device.backend import Segments
from trencadis.core.vision_config import WINDOW_SLOTS

log = logging.getLogger("trencadis.engine")

FORMAT = 1
"""Version of the file."""

SECONDS = 0.5
"""Most seconds that the measurement takes; what is not measured by then stays as in the built-in table."""

RESERVE = 0.1
"""Seconds of them that are kept for the candidate that is being measured as the time ends."""

WAIT = 5.0
"""Seconds for which a replica waits for another one that measures."""

GAIN = 1.05
"""How many times as fast a candidate must be to replace the built-in choice."""

ROWS = (SHARED_ROWS, 64, 32)
"""Candidates for the most rows of own products, the built-in one first."""

SIZE = 1024
"""Inputs and outputs of the weight whose products are measured."""

WINDOWS, HEADS, HEAD_SIZE = 8, 16, 80
"""Windows of a vision tower's launch, and its heads."""

UNCHANGED = (1 << 31) - 1
"""What ranks other than 0 contribute to the minimum over the ranks."""


class KernelChoice(NamedTuple):
    """What is measured, as integers, which ranks exchange.

    Args:
        rows: the most rows of own products of a weight that oneDNN can multiply too.
        pairs: 1: products and attention multiply pairs of bfloat16.
        windows: 1: own attention inside windows; 0: torch's.
    """

    rows: int
    pairs: int
    windows: int


def choice_of(table: KernelTable, dtype: str) -> KernelChoice:
    """Returns the choice that a table holds."""
    rows = min(table.most_rows(Op.LINEAR, dtype), UNCHANGED)
    return KernelChoice(rows, int(table.bfloat16_pairs), int(table.serves(Op.WINDOWS, dtype)))


def describe_machine(threads: int, dtype: str) -> dict[str, object]:
    """Returns what a measurement is valid for: it is compared with that of a file."""
    return {
        "format": FORMAT,
        "cpu": read_cpu_model(),
        "features": sorted(kernel_library.load_library().features),
        "torch": torch.__version__,
        "kernels": kernel_library.VERSION,
        "threads": threads,
        "dtype": dtype,
    }


def name_file(folder: Path, machine: dict[str, object]) -> Path:
    """Returns the file of a measurement. Its name is that of the machine, so that another CPU or version is measured
    anew.
    """
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:8]
    return folder / f"cpu-kernels-{machine['dtype']}-{machine['threads']}-{digest}.json"


def read_cpu_model() -> str:
    """Returns the name of the CPU's model; "": unknown."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return ""


def choose_table(table: KernelTable, dtype: torch.dtype, threads: int, folder: Path | None) -> KernelTable:
    """Returns ``table`` with the choice of the file in ``folder``, which is measured and written if there is none.

    The built-in table is returned without a folder, if the file cannot be used, or if kernels were requested by
    ``TRENCADIS_CPU_KERNELS``.
    """
    name = DTYPE_NAMES.get(dtype, "")
    requested = envs.get(VARIABLE) or "auto"
    if folder is None or table.kind == TORCH or requested != "auto" or not name:
        return table
    machine = describe_machine(threads, name)
    file = name_file(folder, machine)
    try:
        with lock_file(file):
            found = read_choice(file, machine)
            if found is None:
                found = measure(table, dtype)
                write_choice(file, machine, found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("cpu: the built-in kernel table is used, since %s cannot be: %s", file, str(error)[:200])
        return table
    return with_choice(table, name, *found)


@contextmanager
def lock_file(file: Path) -> Iterator[None]:
    """Holds a lock beside ``file``, so that one process measures.

    Raises:
        OSError: the folder cannot be written, or the lock is held for more than ``WAIT`` seconds.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        ends = time.monotonic() + WAIT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends:
                    raise TimeoutError("another process measures and does not end") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def read_choice(file: Path, machine: dict[str, object]) -> KernelChoice | None:
    """Returns the choice of a file; None if there is no file.

    Raises:
        ValueError: the file is cut short, or of another machine or version.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("machine"), dict):
        raise ValueError("it is no measurement of kernels")
    for key, value in machine.items():
        if found["machine"].get(key) != value:
            raise ValueError(f"it was measured with another {key}; delete it to measure again")
    choice = KernelChoice(*(found["choice"][key] for key in KernelChoice._fields))
    if not all(type(value) is int for value in choice) or choice.rows < 0 or not {*choice[1:]} <= {0, 1}:
        raise ValueError("it holds values that are no choice")
    return choice


def write_choice(file: Path, machine: dict[str, object], choice: KernelChoice) -> None:
    """Writes a file, which replaces one that is there.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({"machine": machine, "choice": choice._asdict()}, indent=1)
    handle, made = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(made, file)
    except OSError:
        with suppress(OSError):
            os.unlink(made)
        raise


def measure(table: KernelTable, dtype: torch.dtype) -> KernelChoice:
    """Measures the candidates for engines of ``dtype``, in at most ``SECONDS``."""
    begun = time.perf_counter()
    ends, name = begun + SECONDS - RESERVE, DTYPE_NAMES[dtype]
    choice = choice_of(table, name)
    with torch.inference_mode():
        if choice.windows:
            choice = choice._replace(windows=int(not _is_faster(*_windows(table, dtype), ends)))
        if dtype in dense_linear.UNITS and is_packable(dtype):
            choice = _measure_products(table, dtype, choice, ends)
    log.info("cpu: kernels were measured in %.2f s: %s", time.perf_counter() - begun, describe_choice(choice))
    return choice


def describe_choice(choice: KernelChoice) -> str:
    """Returns a choice in words."""
    pairs, windows = ("pairs" if choice.pairs else "no pairs"), ("own" if choice.windows else "torch's")
    rows = "any number of" if choice.rows >= UNCHANGED else f"up to {choice.rows}"
    return f"own products of {rows} rows, {pairs} of bfloat16, {windows} attention in windows"


def _measure_products(table: KernelTable, dtype: torch.dtype, choice: KernelChoice, ends: float) -> KernelChoice:
    """Returns ``choice`` with the measured use of pairs and number of rows of own products."""
    weight, name = torch.randn(SIZE, SIZE).to(dtype), DTYPE_NAMES[dtype]
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    if choice.pairs and dtype == torch.bfloat16:
        x, plain = weight[:32].contiguous(), replace(table, bfloat16_pairs=False)
        ours, others = (dense_linear.panels_of(packed, weight, None, one) for one in (table, plain))
        if ours is not None and others is not None:
            first, second = (_caller(dense_linear.product, x, panels) for panels in (ours, others))
            choice = choice._replace(pairs=int(not _is_faster(first, second, ends)))
    table = replace(table, bfloat16_pairs=bool(choice.pairs))
    panels = dense_linear.panels_of(packed, weight, None, table)
    if choice.rows != SHARED_ROWS or panels is None or table.most_rows(Op.LINEAR, name) != SHARED_ROWS:
        return choice
    for rows in ROWS:
        x = torch.randn(rows, SIZE).to(dtype)
        theirs = _caller(torch.ops.mkldnn._linear_pointwise.default, x, packed, None, "none", [], "")
        if not _is_faster(_caller(dense_linear.product, x, panels), theirs, ends):
            return choice._replace(rows=rows)
    return choice._replace(rows=ROWS[-1] // 2)


def _caller(call: Callable[..., Tensor], *args: Any) -> Callable[[], Tensor]:
    return lambda: call(*args)


def _windows(table: KernelTable, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Returns attention inside windows by own kernels, and by torch's."""
    name, ours, theirs = DTYPE_NAMES[dtype], CpuOps(), CpuOps()
    ours.table, theirs.table = table, with_choice(table, name, *choice_of(table, name)._replace(windows=0))
    q, k, v = torch.randn(3, WINDOWS * WINDOW_SLOTS, HEADS, HEAD_SIZE).to(dtype)
    whole = torch.full((WINDOWS,), WINDOW_SLOTS, dtype=torch.int32)
    segments = Segments(torch.zeros(WINDOWS, dtype=torch.int32), whole)
    first, second = (_caller(ops.attend_windows, q, k, v, segments, HEAD_SIZE**-0.5) for ops in (ours, theirs))
    return first, second


def _is_faster(built_in: Callable[[], Tensor], other: Callable[[], Tensor], ends: float, repeats: int = 7) -> bool:
    """Returns True if ``other`` is ``GAIN`` times as fast: by the least seconds of calls that take turns; False if the
    time ends before.
    """
    least = [float("inf"), float("inf")]
    for number in range(repeats + 1):
        for side, call in enumerate((built_in, other)):
            if time.perf_counter() > ends:
                return False
            begun = time.perf_counter()
            call()
            if number:  # the first call makes kernels and loads the weight
                least[side] = min(least[side], time.perf_counter() - begun)
    return least[0] > GAIN * least[1]
