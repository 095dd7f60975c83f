"""Selects the attention library of ``--attention-backend``: found, checked and named, or an error with the remedy.

FLASH_ATTN is FlashAttention 3 on Hopper where it is installed, else the package flash-attn (2), else the copy of
version 2 within torch (``torch.nn.attention.varlen``), where that reads paged keys: from torch 2.13 on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from trencadis.backends.cuda.shape_policy import FLASH_3, FLASH_ATTN, FLASHINFER
from trencadis.core.device.backend import BackendConfig
from trencadis.core.errors import StartupError

HOPPER = 90
"""Architecture of FlashAttention 3."""

FLASH_2_BLOCK = 256
"""FlashAttention 2 takes pages of multiples of this many slots (csrc/flash_attn/flash_api.cpp, ``mha_varlen_fwd``)."""

TORCH_VARLEN = "torch.nn.attention.varlen"

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
        kind: ``flash2``, ``flash3``, ``torch`` or ``flashinfer``.
        label: its name and version, for users.
        calls: its functions and classes by name.
    """

    kind: str
    label: str
    calls: dict[str, Callable[..., Any]]
    limits: LibraryLimits


EIGHTS = tuple(range(8, 257, 8))
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
    if (third := find_flash_3(arch)) is not None:
        return third
    try:
        module = _import_library(name, "flash_attn")
        attend = _require_argument(module, name, "flash_attn_varlen_func", "", "block_table")
    except StartupError:
        if (within_torch := _find_torch_varlen()) is not None:
            return within_torch
        raise
    label = f"flash-attn {_version(module)}"
    return SelectedLibrary("flash2", label, {"attend": attend}, LibraryLimits(EIGHTS, True, FLASH_2_BLOCK))


def find_flash_3(arch: int) -> SelectedLibrary | None:
    """Returns FlashAttention 3, or None where it is not installed or the card is not a Hopper."""
    module = _third() if arch == HOPPER else None
    if module is None:
        return None
    label = f"flash-attn {_version(module, '3')}"
    return SelectedLibrary("flash3", label, {"attend": module.flash_attn_with_kvcache}, LibraryLimits(EIGHTS, True))


def _find_torch_varlen() -> SelectedLibrary | None:
    """Returns torch's own FlashAttention 2, or None where torch was built without it or takes no pages."""
    if not torch.backends.cuda.is_flash_attention_available():
        return None
    try:
        call = import_module(TORCH_VARLEN).varlen_attn
        taken = inspect.signature(call).parameters
    except (ImportError, AttributeError, ValueError):
        return None
    if not {"block_table", "seqused_k", "enable_gqa"} <= {*taken}:
        return None
    label = f"varlen_attn of torch {torch.__version__}"
    return SelectedLibrary("torch", label, {"attend": call}, LibraryLimits(EIGHTS, True, FLASH_2_BLOCK))


def has_bounded_fa3(wrapper: object) -> bool:
    """Returns True if FlashInfer's FlashAttention-3 kernels take page ids as they are.

    Earlier versions keep 64 MiB of key offsets for each wrapper, of which there is one for each bucket; the method
    ``workspace_size`` came after them.
    """
    return hasattr(wrapper, "workspace_size")


def _third() -> ModuleType | None:
    for name in FLASH_3:
        try:
            found = import_module(name)
        except Exception:  # a wheel for another torch or CUDA may raise anything
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
