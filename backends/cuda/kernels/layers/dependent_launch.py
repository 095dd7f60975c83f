"""Dependent launches: a kernel may start while the one before it still runs, and waits before it reads that kernel's
results.

From sm_90 on (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"). Weights, which no
kernel writes, are fetched into the L2 cache before the wait. A kernel lets the next one start only after its own wait,
so code ahead of a wait runs when all launches but the last are done.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from trencadis.backends.cuda.kernels import tile_sizes
from trencadis.backends.cuda.kernels.gpu_platform import in_use
from trencadis.core import envs

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton for other cards, whose kernels never wait
    gdc_launch_dependents = gdc_wait = None

LEAST = 90


def possible(device: torch.device) -> bool:
    """True if kernels on ``device`` use programmatic dependent launch, which the interpreter, other cards and some
    drivers cannot, and which TRENCADIS_CUDA_DEPENDENT_LAUNCHES=0 turns off.
    """
    able = in_use().runs_ptx and not knobs.runtime.interpret and tile_sizes.arch_of(device) >= LEAST
    return able and _is_wanted() and not _Driver.refuses


class _Driver:
    """The driver of this process' card."""

    refuses = False


def refuse() -> None:
    """Turns dependent launches off in this process."""
    _Driver.refuses = True


@cache
def _is_wanted() -> bool:
    return envs.get_bool("TRENCADIS_CUDA_DEPENDENT_LAUNCHES")


def options(dependent: bool) -> dict[str, Any]:
    """Returns the launch options of a dependent launch."""
    return {"launch_pdl": True} if dependent else {}


@triton.jit
def wait():
    """Waits until everything that earlier launches wrote is visible and their inputs may be overwritten."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def fetch(pointers):
    """Prefetches the lines at ``pointers`` to the L2 cache; does not wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _probe_kernel(out):
    wait()
    tl.store(out, 1)


def probe(out: Tensor) -> None:
    """Starts one dependent launch, which writes 1 to the int32 ``out``."""
    _probe_kernel[(1,)](out, num_warps=1, **options(True))
