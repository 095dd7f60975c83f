"""Selects the attention library of ``--attention-backend``: found, checked and named, or an error with the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from trencadis.backends.cuda.shape_policy import FLASH_ATTN, FLASHINFER
from trencadis.core.device.backend import BackendConfig
from trencadis.core.errors import StartupError

HOPPER = 90
"""Architecture of FlashAttention 3."""

FLASH_3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
"""Modules in which its wheels put it."""

FLASH_2_BLOCK = 256
"""FlashAttention 2 takes pages of multiples of this many slots (csrc/flash_attn/flash_api.cpp, ``mha_varlen_fwd``)."""

OURS = "leave the flag out for this engine's own kernels"
REMEDIES = {
    FLASH_ATTN: "pip install flash-attn --no-build-isolation",
    FLASHINFER: "pip install flashinfer-python",
}


@dataclass(frozen=True)
class LibraryLimits:
    """Head sizes and features that a library supports; the engine's own kernels serve the rest.

    Args:
        heads: supported head sizes.
        windows: True if sliding windows are supported.
        unit: KV blocks must be multiples of this many slots.
    """

    heads: tuple[int, ...]
    windows: bool
    unit: int = 1


@dataclass(frozen=True)
class SelectedLibrary:
    """An attention library that is installed and usable.

    Args:
        kind: ``flash2``, ``flash3`` or ``flashinfer``.
        label: its name and version, for users.
        calls: its functions and classes by name.
    """

    kind: str
    label: str
    calls: dict[str, Callable[..., Any]]
    limits: LibraryLimits


EIGHTS = tuple(range(8, 257, 8))
FLASH_3_HEADS = tuple(range(8, 257, 8))
INFER_HEADS = (64, 128, 256)


def select_library(name: str, arch: int) -> SelectedLibrary:
    """Returns the library called ``name`` for a card of ``arch``.

    Raises:
        StartupError: it is not installed, cannot be imported, or is too old.
    """
    if name == FLASHINFER:
        module = _import_library(name, "flashinfer")
        prefill = _require_argument(module, name, "BatchPrefillWithPagedKVCacheWrapper", "plan", "disable_split_kv")
        decode = _require_argument(module, name, "BatchDecodeWithPagedKVCacheWrapper", "plan", "disable_split_kv")
        label = f"flashinfer {_version(module)}"
        return SelectedLibrary(
            "flashinfer", label, {"prefill": prefill, "decode": decode}, LibraryLimits(INFER_HEADS, False)
        )
    if arch == HOPPER and (third := _third()) is not None:
        return SelectedLibrary("flash3", f"flash-attn {_version(third, '3')}",
            {"attend": third.flash_attn_with_kvcache},
                      LibraryLimits(FLASH_3_HEADS, True))  # fmt: skip
    module = _import_library(name, "flash_attn")
    attend = _require_argument(module, name, "flash_attn_varlen_func", "", "block_table")
    label = f"flash-attn {_version(module)}"
    return SelectedLibrary("flash2", label, {"attend": attend}, LibraryLimits(EIGHTS, True, FLASH_2_BLOCK))


def _third() -> ModuleType | None:
    for name in FLASH_3:
        try:
            found = import_module(name)
        except ImportError:
            continue
        if hasattr(found, "flash_attn_with_kvcache"):
            return found
    return None


def _import_library(name: str, module: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == module:
            raise StartupError(
                f"--attention-backend {name}: {module} is not installed; {REMEDIES[name]}, or {OURS}"
            ) from None
        why = f"needs {error.name}"
    except Exception as error:  # a wheel for another torch or CUDA may raise anything
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise StartupError(f"--attention-backend {name}: {module} cannot be imported ({why}); reinstall it, or {OURS}")


def _require_argument(module: ModuleType, name: str, attribute: str, method: str, argument: str) -> Any:
    """Returns ``module.attribute``, after checking that it, or its ``method``, takes ``argument``; else raises
    StartupError.
    """
    found = getattr(module, attribute, None)
    call = getattr(found, method, None) if method else found
    if call is None or argument not in inspect.signature(call).parameters:
        raise StartupError(
            f"--attention-backend {name}: {module.__name__} {_version(module)} is too old: {attribute} lacks "
            f"{argument}; {REMEDIES[name]} --upgrade, or {OURS}"
        )
    return found


def _version(module: ModuleType, otherwise: str = "of an unknown version") -> str:
    return str(getattr(module, "__version__", "") or otherwise)


def check_blocks(found: SelectedLibrary, name: str, block_size: int) -> None:
    """Raises StartupError if the library does not support pages of ``block_size`` slots."""
    unit = found.limits.unit
    if block_size % unit:
        raise StartupError(
            f"--attention-backend {name}: {found.label} takes KV blocks of {unit} slots, not {block_size}; add "
            f"--block-size {unit}, or {OURS}"
        )


def unsupported_reason(found: SelectedLibrary, cfg: BackendConfig) -> str:
    """Returns why the library can serve no layer of a model; an empty string if it can."""
    if cfg.batch_invariant:
        return "--batch-invariant needs one order of summation for all launches"
    if cfg.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(cfg.dtype).removeprefix('torch.')}"
    if cfg.full_head_dim:
        return "heads of this model differ by layer"
    if cfg.head_dim and cfg.head_dim not in found.limits.heads:
        heads = found.limits.heads
        said = ", ".join(map(str, heads)) if len(heads) < 6 else f"multiples of {heads[0]} up to {heads[-1]}"
        return f"it takes heads of {said} values, not of {cfg.head_dim}"
    if not found.limits.windows and all(cfg.windows):
        return "every layer of this model sees a window of keys"
    return ""
