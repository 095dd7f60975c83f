"""Finds this package's compiled kernels, and asks them what the CPU has.

The library is built with the package where there is a C compiler (setup.py), and loaded by ctypes: it is plain C, so
that one binary serves any torch. Which of its kernels serve says ``kernel_table``.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger("trencadis.engine")

VERSION = 9
"""``PANELS_VERSION`` of panels.h."""

FEATURES = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
"""What the library asks of the CPU and of the system, by bits of ``trencadis_cpu_features``."""

OPERATIONS = ("linear", "quantised_linear", "pack", "rowwise", "rotary", "decode_attention", "attention")
"""What the library counts launches of, by their numbers in panels.h."""

BUILD = "`pip install -e .` (or of a wheel for this machine) with a C compiler builds them"


class Found(NamedTuple):
    """The library and what the CPU has of ``FEATURES``, or why there is none."""

    library: Any
    features: frozenset[str]
    why: str


@cache
def found() -> Found:
    """Loads the library once a process."""
    return load(Path(__file__).parent)


def load(folder: Path) -> Found:
    """The library in ``folder``; a file that is missing, broken or of other sources is a reason and no error."""
    files = sorted(folder.glob("_panels*.so"))
    if not files:
        return Found(None, frozenset(), f"they are not built; {BUILD}")
    try:
        library = ctypes.CDLL(str(files[0]))
        version = library.trencadis_panels_version()
    except (OSError, AttributeError) as error:
        return Found(None, frozenset(), f"{files[0].name} does not load ({str(error)[:120]}); {BUILD}")
    if version != VERSION:
        return Found(None, frozenset(), f"{files[0].name} was built from other sources; {BUILD} again")
    library.trencadis_launches.restype = ctypes.c_uint64
    bits = library.trencadis_cpu_features()
    features = frozenset(name for number, name in enumerate(FEATURES) if bits >> number & 1)
    return Found(library, features, "" if features else "the CPU has no AVX2")


def count_launches(operation: str, kind: int) -> int:
    """How many launches of an operation of ``OPERATIONS`` kernels of this kind (by number) have served so far."""
    count: int = found().library.trencadis_launches(OPERATIONS.index(operation), kind)
    return count


@cache
def log_quantised_kernels(text: str) -> None:
    """Says once a process what multiplies quantised weights."""
    log.info("weights: integers are multiplied by %s", text)
