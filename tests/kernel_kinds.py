"""The kinds of CPU kernels that a test can run here, and which kernel served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from trencadis.backends.cpu.native import dense_linear, kernel_choice_by_cpu, kernel_library, weight_packing
from trencadis.backends.cpu.native.kernel_choice_by_cpu import EMULATED, NUMBERS, TORCH, KernelTable, table_of

FEATURES = kernel_library.load_library().features

OWN = kernel_choice_by_cpu.available_kinds()
"""Own kernels that this CPU runs."""

EMULATIONS = (EMULATED,) if OWN and "panels_amx_emulated.c" not in kernel_library.load_library().left_out else ()
"""The kernels for tiles in plain C, which run on any CPU with own kernels."""

EVERY = (*OWN, *EMULATIONS, TORCH)
"""Own kernels, those of a CPU with AMX in plain C, and torch's."""


def table(kind: str) -> KernelTable:
    """The table of one of ``EVERY``."""
    return table_of(kind, FEATURES)


DENSE = OWN[-1] if OWN else ""
"""Own kernels that multiply weights of 16 and 32 bits; "" where this CPU runs none."""

WIDENED = "avx512, without pairs of bfloat16"
"""Kernels of a CPU with AVX-512 alone, on one that has more."""

DENSE_KINDS = (*OWN, *EMULATIONS, *((WIDENED,) if "avx512_bf16" in FEATURES else ()))
"""All kernels that multiply such weights and run here, for ``use``."""


def use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kernels of one of ``DENSE_KINDS`` serve in this process."""
    kernel_choice_by_cpu._chosen.cache_clear()
    monkeypatch.setenv(kernel_choice_by_cpu.VARIABLE, "avx512" if kind == WIDENED else kind)
    if kind == WIDENED:
        have = kernel_library.load_library()._replace(features=FEATURES - {"avx512_bf16"})
        monkeypatch.setattr(kernel_library, "load_library", lambda: have)


def dense_types() -> list[torch.dtype]:
    """Types of weights that kernels of the kind ``DENSE`` multiply."""
    if not DENSE:
        return []
    return [dtype for dtype in (torch.bfloat16, torch.float32) if dense_linear.most_rows(table(DENSE), dtype)]


def shared_types() -> list[torch.dtype]:
    """Those of ``dense_types`` whose layout is oneDNN's, so that both multiply one weight."""
    return [dtype for dtype in dense_types() if weight_packing.name_of(dtype, 64, 64) is not None]


@contextmanager
def served(operation: str, by: KernelTable, own: bool = True) -> Iterator[None]:
    """Asserts that launches of an operation were served by own kernels of this table (``own``), or by none at all."""
    if kernel_library.load_library().library is None:
        yield
        return
    kinds = range(1, len(NUMBERS))
    before = [kernel_library.count_launches(operation, kind) for kind in kinds]
    yield
    more = {
        kind
        for kind, count in zip(kinds, before, strict=True)
        if kernel_library.count_launches(operation, kind) > count
    }
    assert more == ({by.number} if own else set()), (operation, by.kind, more)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's threads inside of the block."""
    held = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(held)
