"""The one table that says which kernel serves each operation: by CPU, type of values and number of rows.

``TRENCADIS_CPU_KERNELS`` names a row of ``KINDS``; unset or ``auto``, the last kind that this CPU can run serves. What
the table does not give to this package's own kernels is left to torch, whose products are oneDNN's.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType

from trencadis.backends.cpu.native import library
from trencadis.core import envs
from trencadis.core.errors import StartupError

VARIABLE = "TRENCADIS_CPU_KERNELS"

TORCH = "torch"
"""The kernels that torch brings serve everything."""

KINDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "avx2": frozenset({"avx2"}),
        "avx_vnni": frozenset({"avx2", "avx_vnni"}),
        "avx512": frozenset({"avx512"}),
        "avx512_vnni": frozenset({"avx512", "avx512_vnni"}),
        "amx": frozenset({"avx512", "avx512_vnni", "amx"}),
    }
)
"""Kind of kernels -> the features that it needs; later ones are faster where a CPU can run several."""

NUMBERS = {TORCH: 0, **{name: number for number, name in enumerate(KINDS, 1)}}
"""Kind -> its number in panels.h."""

FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"
"""Types of activations, by their names in torch."""

SHARED_ROWS = 128
"""Rows up to which own products of a weight that lies as oneDNN has it are faster: ``DENSE_ROWS`` of dense.h."""

ANY = 1 << 62
"""Any number of rows."""


class Op(Enum):
    """What the table chooses a kernel for, in the words of its line."""

    LINEAR = "products"
    QUANTISED_LINEAR = "8- and 4-bit weights"
    ATTENTION = "attention of prompts and images"
    DECODE_ATTENTION = "attention of decoding rows"
    ROTARY = "rotary"
    ROWWISE = "norms and gates"
    ARGMAX = "argmax"


@dataclass(frozen=True)
class KernelTable:
    """Which kernels serve.

    Args:
        kind: a key of ``KINDS``, or ``TORCH``.
        rows: (operation, type of activations) -> the most rows of one launch that own kernels take. What is missing is
            torch's. For a LINEAR of ``ANY`` rows, weights lie in this package's layout alone.
        bfloat16_pairs: attention and products multiply pairs of bfloat16, as AVX512_BF16 does.
        why: the reason for the choice, for the line at the start.
    """

    kind: str
    rows: Mapping[tuple[Op, str], int]
    bfloat16_pairs: bool
    why: str

    @property
    def number(self) -> int:
        """Number of the kind in panels.h; 0: torch."""
        return NUMBERS[self.kind]

    def most_rows(self, op: Op, dtype: str) -> int:
        """The most rows that an own kernel takes of an operation; 0: torch serves it."""
        return self.rows.get((op, dtype), 0)

    def serves(self, op: Op, dtype: str) -> bool:
        """True if an own kernel serves an operation on values of ``dtype``, for some number of rows."""
        return (op, dtype) in self.rows

    @property
    def needs_no_library(self) -> bool:
        """True if own products of any number of rows are as fast as oneDNN's, so that weights may lie as only they read
        them: oneDNN's lead with AVX-512 and AMX from 128 rows on."""
        return self.kind in ("avx2", "avx_vnni")

    def line(self, libraries: str = "torch's") -> str:
        """What was chosen and why, in one line; ``libraries``: what multiplies quantised weights in place of ours."""
        if self.kind == TORCH:
            return f"{libraries} kernels ({self.why})"
        parts = []
        for op in Op:
            served = [dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16) if self.serves(op, dtype)]
            if not served:
                continue
            limited = [dtype for dtype in served if self.most_rows(op, dtype) < ANY]
            free = [dtype for dtype in served if dtype not in limited]
            named = [f"of up to {self.most_rows(op, limited[0])} rows in {' and '.join(limited)}"] if limited else []
            if free and len(served) < 3:
                named.append(f"{'of any number ' if limited else ''}in {' and '.join(free)}")
            parts.append(" ".join([op.value, ", ".join(named)]).rstrip())
        return f"own kernels ({self.kind}; {self.why}): {', '.join(parts)}; torch's: the rest"


def shares_layout(dtype: str, features: Collection[str]) -> bool:
    """True if oneDNN keeps weights of ``dtype`` as own products read them, on a CPU with ``features``.

    Versions of oneDNN differ: where one keeps float32 otherwise, weights are found to have no name there (packing.py).
    """
    if dtype == BFLOAT16:
        return "avx512_bf16" in features and "amx" not in features
    return dtype == FLOAT32 and bool(features)


def table_of(
    kind: str,
    features: Collection[str],
    why: str = "as asked",
    every_row: bool = False,
    onednn: Collection[str] | None = None,
) -> KernelTable:
    """The table of one kind of kernels.

    Args:
        kind: a key of ``KINDS``, or ``TORCH``.
        features: what the CPU has, of ``library.FEATURES``. Where oneDNN keeps weights in a layout of its own (see
            ``shares_layout``), own products of such weights serve every number of rows or none.
        why: for ``KernelTable.why``.
        every_row: own products serve every number of rows, so that a row has the same bits beside any others.
        onednn: the features that oneDNN uses; None: all.
    """
    if kind == TORCH:
        return KernelTable(TORCH, MappingProxyType({}), False, why)
    rows: dict[tuple[Op, str], int] = {}
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        for op in (Op.QUANTISED_LINEAR, Op.ATTENTION, Op.DECODE_ATTENTION, Op.ROTARY, Op.ROWWISE, Op.ARGMAX):
            rows[op, dtype] = ANY
    del rows[Op.ROWWISE, FLOAT32]  # torch needs one pass for these as well
    theirs = features if onednn is None else onednn
    for dtype in (FLOAT32, BFLOAT16):
        rows[Op.LINEAR, dtype] = SHARED_ROWS if shares_layout(dtype, theirs) and not every_row else ANY
    if "amx" in KINDS[kind] and not every_row:
        # oneDNN's products on tiles are several times as fast as ours without, from a few rows on.
        del rows[Op.ATTENTION, BFLOAT16]
        rows.pop((Op.LINEAR, BFLOAT16), None)
    pairs = "avx512_bf16" in features and "avx512" in KINDS[kind]
    return KernelTable(kind, MappingProxyType(rows), pairs, why)


def available_kinds() -> tuple[str, ...]:
    """The kinds of own kernels that this CPU can run, the fastest last; none where they are not built."""
    have = library.load_library()
    return tuple(kind for kind, needs in KINDS.items() if needs <= have.features)


LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that keep oneDNN from using all of a CPU."""


def onednn_features() -> frozenset[str]:
    """``library.FEATURES`` of this CPU, without those of AVX-512 and AMX where a variable keeps oneDNN from them."""
    features = library.load_library().features
    limit = next((value.upper() for name in LIMITS if (value := os.environ.get(name))), "ALL")
    if limit in ("ALL", "DEFAULT") or "AMX" in limit:
        return features
    if "AVX10" in limit or "BF16" in limit or "FP16" in limit:
        return features - {"amx"}
    return features - ({"amx", "avx512_bf16"} if "AVX512" in limit else {"amx", "avx512_bf16", "avx512"})


@cache
def _chosen(kind: str, every_row: bool, why: str) -> KernelTable:
    return table_of(kind, library.load_library().features, why, every_row, onednn_features())


def chosen_table(every_row: bool = False) -> KernelTable:
    """The table that serves in this process, by ``TRENCADIS_CPU_KERNELS``.

    Raises:
        StartupError: the variable names kernels that cannot serve here.
    """
    asked, kinds, have = envs.get(VARIABLE) or "auto", available_kinds(), library.load_library()
    missing = have.why or "the CPU has no AVX2"
    left_out = f"; {library.report_left_out()}" if have.left_out and kinds else ""
    if asked == "auto":
        best = f"the best of this CPU{left_out}"
        return _chosen(kinds[-1], every_row, best) if kinds else _chosen(TORCH, every_row, missing)
    if asked == TORCH:
        return _chosen(TORCH, every_row, f"{VARIABLE} is {TORCH}" if kinds else f"own kernels: {missing}")
    if asked not in KINDS:
        raise StartupError(f"{VARIABLE}={asked!r} is none of auto, {TORCH}, {', '.join(KINDS)}.")
    if asked not in kinds:
        why = f"this CPU has {', '.join(kinds)}" if kinds else missing
        raise StartupError(f"{VARIABLE}={asked}: these kernels cannot serve: {why}.")
    return _chosen(asked, every_row, f"{VARIABLE} is {asked}{left_out}")


def line() -> str:
    """What was chosen for this CPU and why, in one line."""
    return chosen_table().line()
