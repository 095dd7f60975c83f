"""The table of which kernel is used for each operation: by CPU, dtype and number of rows.

``TRENCADIS_CPU_KERNELS`` names a row of ``KINDS``; unset or ``auto``, the last kind that this CPU can run is used.
Operations without an entry are left to torch, whose products are oneDNN's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property
from types import MappingProxyType

from trencadis.backends.cpu.native import kernel_library
from trencadis.core import envs
from trencadis.core.errors import StartupError

VARIABLE = "TRENCADIS_CPU_KERNELS"

TORCH = "torch"
"""Kind that uses torch's kernels for everything."""

KINDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "avx2": frozenset({"avx2"}),
        "avx_vnni": frozenset({"avx2", "avx_vnni"}),
        "avx512": frozenset({"avx512"}),
        "avx512_vnni": frozenset({"avx512", "avx512_vnni"}),
        "amx": frozenset({"avx512", "avx512_vnni", "amx"}),
    }
)
"""Kind of kernels -> the CPU features that it needs, from the slowest to the fastest."""

EMULATED = "amx_emulated"
"""Kind for tests: the kernels of ``amx`` with the instructions of tiles in plain C, for CPUs with AVX2. Never chosen by
``auto``.
"""

TILED = frozenset({"amx", EMULATED})
"""Kinds that multiply by tiles."""

NUMBERS = {TORCH: 0, **{name: number for number, name in enumerate((*KINDS, EMULATED), 1)}}
"""Kind -> its number in panels.h."""

FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"
"""Dtypes of activations, by their names in torch."""

SHARED_ROWS = 128
"""Number of rows up to which own products of a weight in oneDNN's layout are faster: ``DENSE_ROWS`` of dense.h."""

ANY = 1 << 62
"""Stands for any number of rows."""

TILED_ROWS = ANY
"""Number of rows up to which own products of bfloat16 by tiles are used. oneDNN needs a second copy of each weight for
more rows.
"""


class Op(Enum):
    """The operations that the table chooses a kernel for; the values are used in its log line."""

    LINEAR = "products"
    QUANTISED_LINEAR = "8- and 4-bit weights"
    ATTENTION = "attention of prompts and images"
    WINDOWS = "attention in windows"
    DECODE_ATTENTION = "attention of decoding rows"
    ROTARY = "rotary"
    ROWWISE = "norms and gates"
    ARGMAX = "argmax"
    CONVOLUTION = "causal convolutions"
    DELTA_RULE = "the delta rule"
    ADAPTERS = "adapters"


@dataclass(frozen=True)
class KernelTable:
    """The choice of kernels.

    Args:
        kind: a key of ``KINDS``, ``EMULATED`` or ``TORCH``.
        rows: (operation, dtype of activations) -> the most rows of one launch that own kernels take. Missing entries
        are left to torch. For a LINEAR of ``ANY`` rows, weights are stored only in this package's layout; for one of
        fewer, in oneDNN's too if it is another one.
        bfloat16_pairs: attention and products multiply pairs of bfloat16, as AVX512_BF16 does.
        why: the reason for the choice, for the line at the start.
        measured: the choice includes what was measured on this CPU, see ``kernel_trial``.
    """

    kind: str
    rows: Mapping[tuple[Op, str], int]
    bfloat16_pairs: bool
    why: str
    measured: bool = False

    @cached_property
    def number(self) -> int:
        """Number of the kind in panels.h; 0: torch."""
        return NUMBERS[self.kind]

    def most_rows(self, op: Op, dtype: str) -> int:
        """Returns the most rows that an own kernel takes of an operation; 0: torch does it."""
        return self.rows.get((op, dtype), 0)

    def serves(self, op: Op, dtype: str) -> bool:
        """Returns True if an own kernel does an operation on values of ``dtype``, for some number of rows."""
        return (op, dtype) in self.rows

    def by_tiles(self, op: Op, dtype: str) -> bool:
        """Returns True if own kernels multiply by tiles in an operation on values of ``dtype``."""
        tiled = op == Op.QUANTISED_LINEAR or (op == Op.LINEAR and dtype == BFLOAT16)
        return tiled and self.kind in TILED and self.serves(op, dtype)

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits: equal for equal choices, whatever their reasons."""
        rows = sorted((op.name, dtype, most) for (op, dtype), most in self.rows.items())
        return hashlib.sha256(repr((self.kind, rows, self.bfloat16_pairs)).encode()).hexdigest()[:8]

    @property
    def needs_no_library(self) -> bool:
        """True if own products of any number of rows are as fast as oneDNN's.

        Then weights need no layout that oneDNN reads. With AVX-512 and AMX oneDNN is faster from 128 rows on.
        """
        return self.kind in ("avx2", "avx_vnni")

    def line(self, libraries: str = "torch's") -> str:
        """Returns the choice and its reason in one line; ``libraries``: name of the library for quantised weights
        without own kernels.
        """
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
            tiled = [dtype for dtype in served if self.by_tiles(op, dtype)]
            if tiled:
                named.append("by tiles" if tiled == served else f"{' and '.join(tiled)} by tiles")
            parts.append(" ".join([op.value, ", ".join(named)]).rstrip())
        how = f"table {self.digest}, {'measured' if self.measured else 'built in'}"
        return f"own kernels ({self.kind}; {self.why}; {how}): {', '.join(parts)}; torch's: the rest"


def shares_layout(dtype: str, features: Collection[str]) -> bool:
    """Returns True if oneDNN packs weights of ``dtype`` in the layout of own products, on a CPU with ``features``.

    Versions of oneDNN differ: if one packs float32 otherwise, ``weight_packing.name_of`` finds no layout name.
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
    tiled_rows: int = TILED_ROWS,
) -> KernelTable:
    """Builds the table of one kind of kernels.

    Args:
        kind: a key of ``KINDS``, ``EMULATED`` or ``TORCH``.
        features: CPU features, of ``kernel_library.FEATURES``. If oneDNN packs weights in a layout of its own (see
        ``shares_layout``), own products of such weights take every number of rows or none.
        why: for ``KernelTable.why``.
        every_row: own products take every number of rows, so that a row has the same bits with any other rows.
        onednn: the features that oneDNN uses; None: all.
        tiled_rows: the most rows of own products by tiles in bfloat16, unless ``every_row``.
    """
    if kind == TORCH:
        return KernelTable(TORCH, MappingProxyType({}), False, why)
    rows: dict[tuple[Op, str], int] = {}
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        for op in (
            Op.QUANTISED_LINEAR,
            Op.ATTENTION,
            Op.WINDOWS,
            Op.DECODE_ATTENTION,
            Op.ROTARY,
            Op.ROWWISE,
            Op.ARGMAX,
            Op.CONVOLUTION,
            Op.DELTA_RULE,
            Op.ADAPTERS,
        ):
            rows[op, dtype] = ANY
    del rows[Op.ROWWISE, FLOAT32]  # torch needs only one pass for these too
    theirs = features if onednn is None else onednn
    for dtype in (FLOAT32, BFLOAT16):
        rows[Op.LINEAR, dtype] = SHARED_ROWS if shares_layout(dtype, theirs) and not every_row else ANY
    if kind in TILED:
        rows[Op.LINEAR, BFLOAT16] = ANY if every_row else tiled_rows
    if kind in TILED and not every_row:
        del rows[Op.ATTENTION, BFLOAT16], rows[Op.WINDOWS, BFLOAT16]  # torch's attention multiplies by tiles
    pairs = "avx512_bf16" in features and "avx512" in KINDS.get(kind, ())
    return KernelTable(kind, MappingProxyType(rows), pairs, why)


def with_choice(table: KernelTable, dtype: str, rows: int, pairs: int, windows: int) -> KernelTable:
    """Returns a table with what was measured for ``dtype``, as in ``kernel_trial.KernelChoice``. Kernels that the table
    has are left out or limited, none is added.
    """
    made = dict(table.rows)
    if (Op.LINEAR, dtype) in made:
        made[Op.LINEAR, dtype] = min(made[Op.LINEAR, dtype], rows) if made[Op.LINEAR, dtype] < ANY else ANY
    if not windows:
        made.pop((Op.WINDOWS, dtype), None)
    both = table.bfloat16_pairs and bool(pairs)
    return replace(table, rows=MappingProxyType(made), bfloat16_pairs=both, measured=True)


def available_kinds() -> tuple[str, ...]:
    """Returns the kinds of own kernels that this CPU can run, the fastest last; none if they are not built."""
    have = kernel_library.load_library()
    return tuple(kind for kind, needs in KINDS.items() if needs <= have.features)


LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that limit the CPU features that oneDNN uses."""


def onednn_features() -> frozenset[str]:
    """Returns ``kernel_library.FEATURES`` of this CPU, without AVX-512 and AMX if a variable forbids them to oneDNN.

    It uses tiles also where own kernels for them are not built.
    """
    have = kernel_library.load_library()
    features = have.features | (have.detected & {"amx"})
    limit = next((value.upper() for name in LIMITS if (value := os.environ.get(name))), "ALL")
    if limit in ("ALL", "DEFAULT") or "AMX" in limit:
        return features
    if "AVX10" in limit or "BF16" in limit or "FP16" in limit:
        return features - {"amx"}
    return features - ({"amx", "avx512_bf16"} if "AVX512" in limit else {"amx", "avx512_bf16", "avx512"})


@cache
def _chosen(kind: str, every_row: bool, why: str) -> KernelTable:
    return table_of(kind, kernel_library.load_library().features, why, every_row, onednn_features())


def chosen_table(every_row: bool = False) -> KernelTable:
    """Returns the table that this process uses, by ``TRENCADIS_CPU_KERNELS``.

    Raises:
        StartupError: the variable names kernels that cannot run here.
    """
    asked, kinds, have = envs.get(VARIABLE) or "auto", available_kinds(), kernel_library.load_library()
    missing = have.why or "the CPU has no AVX2"
    left_out = f"; {kernel_library.report_left_out()}" if have.left_out and kinds else ""
    if asked == "auto":
        best = f"the best of this CPU{left_out}"
        return _chosen(kinds[-1], every_row, best) if kinds else _chosen(TORCH, every_row, missing)
    if asked == TORCH:
        return _chosen(TORCH, every_row, f"{VARIABLE} is {TORCH}" if kinds else f"own kernels: {missing}")
    if asked == EMULATED and "avx2" in kinds and "panels_amx_emulated.c" not in have.left_out:
        return _chosen(EMULATED, every_row, f"{VARIABLE} is {EMULATED}")
    if asked not in NUMBERS:
        raise StartupError(f"{VARIABLE}={asked!r} is none of auto, {', '.join(NUMBERS)}.")
    if asked not in kinds:
        why = f"this CPU has {', '.join(kinds)}" if kinds else missing
        raise StartupError(f"{VARIABLE}={asked}: these kernels cannot serve: {why}.")
    return _chosen(asked, every_row, f"{VARIABLE} is {asked}{left_out}")


def line() -> str:
    """Returns the kernels chosen for this CPU and the reason, in one line."""
    return chosen_table().line()
