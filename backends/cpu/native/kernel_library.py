"""Loads this package's compiled kernels and reads the CPU's features from them.

The library is built with the package if there is a C compiler (setup.py), and loaded by ctypes: it is plain C, so that
one binary works with any torch. ``kernel_choice_by_cpu`` decides which of its kernels are used.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trencadis.backends.cpu.native.ctypes_structs import find_difference

log = logging.getLogger("trencadis.engine")

VERSION = 19
"""``PANELS_VERSION`` of panels.h."""

FEATURES = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
"""Features of CPU and system that the library detects, by bits of ``trencadis_cpu_features``."""

NEEDS = {
    "avx2": {"panels_avx2", "dense_avx2"},
    "avx_vnni": {"panels_avx_vnni"},
    "avx512": {"panels_avx512", "dense_avx512"},
    "avx512_vnni": {"panels_avx512_vnni"},
    "avx512_bf16": {"panels_avx512_bf16"},
    "amx": {"panels_amx"},
}
"""Feature -> the sources, without suffix, whose kernels use it."""

OPERATIONS = (
    "linear", "quantised_linear", "pack", "rowwise", "rotary", "decode_attention", "attention", "convolution",
    "delta_rule", "adapters",
)  # fmt: skip
"""Operations whose launches the library counts, by their numbers in panels.h."""

BUILD = "`pip install -e .` (or of a wheel for this machine) with a C compiler builds them"


class LibraryStatus(NamedTuple):
    """The library and the CPU's ``FEATURES``, or the reason why there is none.

    Args:
        features: the CPU's features for which there are kernels.
        left_out: sources that the compiler rejected when the library was built.
        detected: the CPU's features, with or without kernels.
    """

    library: Any
    features: frozenset[str]
    why: str
    left_out: tuple[str, ...] = ()
    detected: frozenset[str] = frozenset()


@cache
def load_library() -> LibraryStatus:
    """Loads the library, once per process."""
    return open_library(Path(__file__).parent)


def open_library(folder: Path) -> LibraryStatus:
    """Opens the library in ``folder``; a file that is missing, broken or of other sources gives a reason instead of an
    error.
    """
    files = sorted(folder.glob("_panels*.so"))
    if not files:
        return LibraryStatus(None, frozenset(), f"they are not built; {BUILD}")
    try:
        library = ctypes.CDLL(str(files[0]))
        version = library.trencadis_panels_version()
    except (OSError, AttributeError) as error:
        return LibraryStatus(None, frozenset(), f"{files[0].name} does not load ({str(error)[:120]}); {BUILD}")
    if version != VERSION:
        return LibraryStatus(None, frozenset(), f"{files[0].name} was built from other sources; {BUILD} again")
    differs = find_difference(library)
    if differs:
        return LibraryStatus(
            None, frozenset(), f"{files[0].name} has another {differs} than this Python; {BUILD} again"
        )
    library.trencadis_launches.restype = ctypes.c_uint64
    library.trencadis_left_out.restype = ctypes.c_char_p
    missing = tuple(f"{name}.c" for name in library.trencadis_left_out().decode().split())
    bits = library.trencadis_cpu_features()
    detected = frozenset(name for number, name in enumerate(FEATURES) if bits >> number & 1)
    features = frozenset(
        name for name in detected if not any(f"{source}.c" in missing for source in NEEDS.get(name, ()))
    )
    why = "" if features else f"the C compiler refused {', '.join(missing)}" if bits else "the CPU has no AVX2"
    return LibraryStatus(library, features, why, missing, detected)


def report_left_out() -> str:
    """Returns the message about kernels that are missing from an installation; "": none are."""
    have = load_library()
    if have.left_out:
        return f"kernels are left out, since the C compiler refused {', '.join(have.left_out)}"
    return "" if have.library is not None else have.why


def main() -> None:
    """Prints a warning about missing kernels and the reason, after an installation."""
    said = report_left_out()
    if said:
        print(f"warning: {said}")


def count_launches(operation: str, kind: int) -> int:
    """Returns how many launches of an operation of ``OPERATIONS`` were done by kernels of this kind (by number)."""
    count: int = load_library().library.trencadis_launches(OPERATIONS.index(operation), kind)
    return count


@cache
def log_quantised_kernels(text: str) -> None:
    """Logs, once per process, the library that multiplies quantised weights."""
    log.info("weights: integers are multiplied by %s", text)


if __name__ == "__main__":
    main()
