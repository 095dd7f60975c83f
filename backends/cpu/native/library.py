"""Finds this package's compiled kernels, and says which of them serve.

The library is built with the package where there is a C compiler (``[[tool.setuptools.ext-modules]]``), and loaded by
ctypes: it is plain C, so that one binary serves any torch. What the CPU has is asked at run time.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trencadis.core import envs
from trencadis.core.errors import StartupError

log = logging.getLogger("trencadis.engine")

VARIABLE = "TRENCADIS_CPU_KERNELS"

VERSION = 7
"""``PANELS_VERSION`` of panels.h."""

TORCH = "torch"
"""The kernels that torch brings serve."""

KINDS = {"avx2": 1, "avx_vnni": 2, "avx512_vnni": 3}
"""Name -> number in panels.h; later ones are faster."""

BUILD = "`pip install -e .` (or of a wheel for this machine) with a C compiler builds them"


class Found(NamedTuple):
    """The library and what the CPU can run of it, or why there is none."""

    library: Any
    kinds: tuple[str, ...]
    why: str


@cache
def found() -> Found:
    """Loads the library once a process."""
    return load(Path(__file__).parent)


def load(folder: Path) -> Found:
    """The library in ``folder``; a file that is missing, broken or of other sources is a reason and no error."""
    files = sorted(folder.glob("_panels*.so"))
    if not files:
        return Found(None, (), f"they are not built; {BUILD}")
    try:
        library = ctypes.CDLL(str(files[0]))
        version = library.trencadis_panels_version()
    except (OSError, AttributeError) as error:
        return Found(None, (), f"{files[0].name} does not load ({str(error)[:120]}); {BUILD}")
    if version != VERSION:
        return Found(None, (), f"{files[0].name} was built from other sources; {BUILD} again")
    bits = library.trencadis_panels_kinds()
    kinds = tuple(name for name, number in KINDS.items() if bits >> number & 1)
    return Found(library, kinds, "" if kinds else "the CPU has no AVX2")


def serving() -> str:
    """The kind of kernels that multiply quantised weights: a key of ``KINDS``, or ``TORCH``.

    Raises:
        StartupError: the variable names kernels that cannot serve here.
    """
    asked, have = envs.get(VARIABLE) or "auto", found()
    if asked == TORCH:
        return TORCH
    if asked == "auto":
        return have.kinds[-1] if have.kinds else TORCH
    if asked not in KINDS:
        raise StartupError(f"{VARIABLE}={asked!r} is none of auto, {TORCH}, {', '.join(KINDS)}.")
    if asked not in have.kinds:
        why = have.why or f"this CPU has {', '.join(have.kinds)}"
        raise StartupError(f"{VARIABLE}={asked}: these kernels cannot serve: {why}.")
    return asked


def line(libraries: str = "torch's") -> str:
    """What multiplies quantised weights on this CPU, and why no own kernels do; ``libraries``: those of torch."""
    kind, have = serving(), found()
    if kind != TORCH:
        return f"own kernels ({kind})"
    return f"{libraries} kernels ({f'{VARIABLE} is {TORCH}' if have.kinds else 'own kernels: ' + have.why})"


@cache
def tell(text: str) -> None:
    """Says once a process what multiplies."""
    log.info("weights: integers are multiplied by %s", text)
