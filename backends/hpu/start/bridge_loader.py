"""Opens a card: fills the bridge from the installed plug-in, or from the emulator if there is no Gaudi."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import trencadis.backends.hpu.start.environment as environment
from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.collectives import all_gather, all_reduce, receive, send
from trencadis.backends.hpu.oom_texts import is_out_of_memory
from trencadis.backends.hpu.optional_symbols import find_symbols
from trencadis.backends.hpu.start import capability, hpu_env, machine, software_stack
from trencadis.backends.hpu.start.pinned_memory import find_pinning
from trencadis.backends.hpu.start.product_probe import find_product
from trencadis.core.errors import StartupError
from trencadis.core.graphs.oom_errors import format_error

log = logging.getLogger("trencadis.engine")

EMULATED_CARDS = 8
"""Number of cards of an emulated machine, as of a real one."""

DEVICE = "hpu"
"""torch's device type of the plug-in; a stub without one keeps its tensors on the CPU."""

MISMATCHED = (ImportError, OSError, AssertionError, AttributeError, RuntimeError, ValueError)
"""Errors that a plug-in raises with a torch of another release: its own checks, its libraries, a missing symbol."""


def open_bridge(
    index: int = 0,
    environ: MutableMapping[str, str] | None = None,
    world: int = 1,
    rank: int = 0,
    named: bool = False,
) -> Bridge:
    """Opens the process's bridge: sets the environment first, then imports the plug-in.

    Args:
        index: the card, counted from 0 over the visible ones; in a group, the card of this rank.
        named: the user named the card by its number; False: the first one may be any that is free.

    Raises:
        StartupError: see ``capability.find``; a plug-in that cannot be used; fewer cards than ranks.
    """
    env = os.environ if environ is None else environ
    found = capability.find(env, index, world)
    settled = hpu_env.settle(env, index - rank, rank, world)
    env.update(settled.variables)
    for gone in settled.removed:
        env.pop(gone, None)
    with _with_rank_count(env, world):
        if found.real:
            return open_real(env, index, world, named)
        from trencadis.backends.hpu.emulator import emulated_bridge  # not needed for a real Gaudi

        emulated = emulated_bridge.bridge(env, index)
    check_cards(EMULATED_CARDS, index, world)
    return emulated


def check_cards(count: int, index: int, world: int) -> None:
    """Raises StartupError where a machine of ``count`` cards has none for rank or card ``index``."""
    if world > count:
        raise StartupError(f"--tensor-parallel-size {world} needs {world} cards and there are {count}.")
    if index >= count:
        raise StartupError(f"--device hpu: card {index} is asked for and there are {count}, from 0.")


def open_real(environ: MutableMapping[str, str], index: int = 0, world: int = 1, named: bool = False) -> Bridge:
    """Builds the bridge from the installed plug-in.

    Raises:
        StartupError: one line if the plug-in does not match this torch, or the card cannot be opened.
    """
    try:
        return _open_plugin(environ, index, world, named)
    except MISMATCHED as error:
        raise StartupError(environment.unusable_message(format_error(error), environ, software_stack.find())) from None


def _acquire_card(hpu: Any, index: int, world: int, named: bool) -> None:
    """Acquires card ``index`` for this process; raises StartupError if it cannot be opened.

    Args:
        named: the user asked for a card; False: the plug-in takes the first that is free, as on a shared host card 0
            may belong to another process.
    """
    try:
        if not hpu.is_available():
            raise StartupError("the Gaudi plug-in finds no free card: hl-smi shows who holds them")
        check_cards(hpu.device_count(), index, world)
        if named or index or world > 1:
            hpu.set_device(index)
        hpu.get_device_name()  # opens the card
    except RuntimeError as error:
        raise StartupError(
            f"card {index} cannot be opened ({format_error(error)}): hl-smi shows who holds it"
        ) from None


@contextmanager
def _without_rank_variables(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Hides the launcher's rank variables during the import, since the plug-in would choose a card by them."""
    hidden = {name: environ.pop(name) for name in machine.LAUNCHED if name in environ}
    try:
        yield
    finally:
        environ.update(hidden)


@contextmanager
def _with_rank_count(environ: MutableMapping[str, str], world: int) -> Iterator[None]:
    """Names the number of ranks in ``WORLD_SIZE`` while the card is opened.

    The plug-in then leaves some of the card's memory out of its pool, for HCCL's buffers
    (``PT_HCCL_MEMORY_ALLOWANCE_MB``); otherwise the pool takes everything, and a group of ranks cannot be made.
    """
    before = environ.get(machine.WORLD_SIZE)
    if world > 1 and before in (None, "", "1"):
        environ[machine.WORLD_SIZE] = str(world)
    try:
        yield
    finally:
        if before is not None:
            environ[machine.WORLD_SIZE] = before
        else:
            environ.pop(machine.WORLD_SIZE, None)


def _open_plugin(environ: MutableMapping[str, str], index: int, world: int, named: bool) -> Bridge:
    with _without_rank_variables(environ):
        core = import_module("habana_frameworks.torch.core")
        hpu: Any = import_module("habana_frameworks.torch.hpu")
        import_module("habana_frameworks.torch.distributed.hccl")  # registers the backend "hccl"
    is_lazy: Callable[[], bool] = import_module("habana_frameworks.torch.utils.internal").is_lazy
    wrong = environment.mode_conflict(environ, is_lazy())
    if wrong is not None:
        raise StartupError(wrong)
    wrap: Any = hpu.wrap_in_hpu_graph if is_lazy() else None
    machine.check_module(environ, machine.find(environ), index, world)
    _acquire_card(hpu, index, world, named or machine.VISIBLE in environ)
    kernels = _optional("habana_frameworks.torch.hpex.kernels")
    norms = _optional("habana_frameworks.torch.hpex.normalization")
    metrics = import_module("habana_frameworks.torch.hpu.metrics")
    optional = find_symbols(software_stack.plugin_version(), hpu.get_device_name())
    pinning = find_pinning()
    sdpa, rms = getattr(kernels, "FusedSDPA", None), getattr(norms, "FusedRMSNorm", None)
    return Bridge(
        label="hpu",
        device=torch.device(DEVICE),
        is_lazy=is_lazy,
        mark_step=core.mark_step,
        wrap_in_hpu_graph=lambda module: wrap(module, disable_tensor_cache=False),
        compile=_compile,
        compile_only=_compile_only,
        synchronize=hpu.synchronize,
        mem_get_info=hpu.mem_get_info,
        out_of_memory=is_out_of_memory,
        metric_localcontext=metrics.metric_localcontext,
        device_name=hpu.get_device_name,
        all_reduce=all_reduce,
        all_gather=all_gather,
        send=send,
        receive=receive,
        collective_backend="hccl",
        fused_sdpa=sdpa.apply if sdpa is not None else None,
        fused_rms_norm=rms.apply if rms is not None else None,
        apply_rotary=_rotary(kernels),
        sdpa_parts=optional.sdpa_parts,
        product=find_product(torch.device(DEVICE), None if is_lazy() else _compile),
        block_adjustment=optional.block_adjustment,
        cast_to_fp8_v2=optional.cast_to_fp8_v2,
        cast_from_fp8=optional.cast_from_fp8,
        fp8_gemm_v2=optional.fp8_gemm_v2,
        convert_from_uint4=optional.convert_from_uint4,
        experts=optional.experts,
        fp8_experts=optional.fp8_experts,
        fp8_top=optional.fp8_top,
        pin=pinning.pin,
        event=hpu.Event,
        pinned=pinning.pinned,
        notes=(pinning.note,) if pinning.note else (),
    )


def _optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


def _rotary(kernels: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    rotary, mode = getattr(kernels, "apply_rotary_pos_emb", None), getattr(kernels, "RotaryPosEmbeddingMode", None)
    if rotary is None or mode is None:
        return None
    found: Callable[..., Tensor] = rotary
    return lambda x, cos, sin: found(x, cos, sin, None, 0, mode.BLOCKWISE)


def _compile(function: Callable[..., Any], fullgraph: bool = True) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, backend="hpu_backend", fullgraph=fullgraph, dynamic=False)
    return compiled


@contextmanager
def _compile_only() -> Iterator[None]:
    """Enters the plug-in's compile-only mode, or nothing if it has none (KeyError for an unknown setting)."""
    config = _optional("habana_frameworks.torch.internal.bridge_config")
    with ExitStack() as stack:
        with suppress(AttributeError, KeyError):
            stack.enter_context(config.env_setting("PT_COMPILE_ONLY_MODE", True))
        yield
