"""Opens a card: fills the bridge from the installed plug-in, or from the emulator if there is no Gaudi.

Operations that only some releases or cards have get one signature each. They are derived from the bridge's public
source (``hpu_ops/backend/sdpa_gen.cpp``, ``hpex/kernels/FusedSDPA.py``) and from their use in vLLM's Gaudi plugin
(``extension/utils.py``, ``extension/ops.py``, ``extension/features.py``).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from importlib import import_module
from io import StringIO
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trencadis.backends.hpu.collectives import all_gather, all_reduce, receive, send
from trencadis.backends.hpu.habana_bridge import AttentionPart, Bridge, is_out_of_memory
from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection, gaudi_mode_and_env, hpu_process_setup
from trencadis.backends.hpu.start.kernel_cases import drop_wrong_kernels
from trencadis.core.errors import StartupError, format_error

ADJUSTMENT_SINCE = (1, 22, 0, 494)

FP8_TOP = (240.0, 448.0)
"""Largest e4m3 value on a Gaudi 2, whose largest exponent is reserved for non-finite values, and on a Gaudi 3."""


FP8_EXPERTS = "fp8_fused_weights_dynamic"
"""The form of ``mixture_of_experts`` that rounds what is between its two products by itself, for each token."""


class OptionalSymbols(NamedTuple):
    """Optional fields of ``habana_bridge.Bridge``; None if the plug-in or the card lacks one."""

    sdpa_parts: Callable[..., AttentionPart] | None
    block_adjustment: Callable[..., Tensor] | None
    cast_to_fp8_v2: Callable[..., Tensor] | None
    cast_from_fp8: Callable[..., Tensor] | None
    fp8_gemm_v2: Callable[..., Tensor] | None
    fp8_top: float
    convert_from_uint4: Callable[..., Tensor] | None = None
    experts: Callable[..., Tensor] | None = None
    fp8_experts: Callable[..., Tensor] | None = None


def find_symbols(version: str | None, card: str) -> OptionalSymbols:
    """Returns the symbols that plug-in ``version`` (``1.24.1.35``; None: unknown) offers on ``card`` (``GAUDI3``)."""
    ops, build = torch.ops.hpu, tuple(int(n) for n in re.findall(r"\d+", version or "")[:4])
    if len(build) < 4:  # a release without a build number counts as its last build
        build = (*build, *(0, 0, 0, 1 << 30)[len(build) :])
    third = "gaudi3" in (card or "").lower().replace(" ", "")
    adjusts = build >= ADJUSTMENT_SINCE and third
    casts = hasattr(ops, "cast_to_fp8_v2") and hasattr(ops, "cast_from_fp8")
    return OptionalSymbols(
        sdpa_parts if hasattr(ops, "sdpa_recomp_fwd") else None,
        block_adjustment if adjusts and hasattr(ops, "block_softmax_adjustment") else None,
        cast_to_fp8_v2 if casts else None,
        cast_from_fp8 if casts else None,
        fp8_gemm_v2 if casts and hasattr(ops, "fp8_gemm_v2") else None,
        FP8_TOP[third],
        convert_from_uint4 if hasattr(ops, "convert_from_uint4") else None,
        mixture_of_experts if hasattr(ops, "mixture_of_experts") else None,
        mixture_of_fp8_experts if casts and hasattr(getattr(ops, "mixture_of_experts", None), FP8_EXPERTS) else None,
    )


def sdpa_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, mode: str
) -> AttentionPart:
    """Computes attention of q [B, h, S, d] over k and v [B, g, T, d], which may be a part of a row's keys.

    ``mask`` is boolean and broadcasts to [B, 1, S, T]. A causal call takes multiples of 1024 queries and keys, or its
    statistics are wrong.
    """
    rows, heads, count, d = q.shape
    groups = k.shape[1]
    fewer = groups not in (1, heads)
    if fewer:
        q = q.reshape(rows, groups, heads // groups, count, d)
        k, v = k[:, :, None], v[:, :, None]
        mask = None if mask is None else mask[:, None]
    found = torch.ops.hpu.sdpa_recomp_fwd(q, k, v, mask, 0.0, scale, is_causal, True, mode, None, "right")
    return AttentionPart(*(t.reshape(rows, heads, count, -1) for t in found[:3]))


def block_adjustment(high: Tensor, total: Tensor, rows: Tensor, count: int, shape: list[int]) -> Tensor:
    """Returns the factor of each block over its row's sum, of ``shape``: exp(high - M) / sum of exp(high - M) * total,
    with M the largest ``high`` of the row.

    Args:
        high, total: [B, g, h / g, 1, 1], the blocks' largest scores and sums of exponentials.
        rows: int32 [B], the row of each block, below ``count``; -1: the block belongs to no row.
    """
    found: Tensor = torch.ops.hpu.block_softmax_adjustment(high, total, rows, count, shape)
    return found


def mixture_of_experts(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor]
) -> Tensor:
    """Returns [n, hidden]: the sum of each token's ``chosen`` experts, int64 [n, top], weighted by ``shares`` [n, top].

    Args:
        gate_up, down: [2 x inner, hidden] and [hidden, inner] of each expert; the activation is SiLU.
    """
    found: Tensor = torch.ops.hpu.mixture_of_experts.fused_weights(
        x, chosen, shares, list(gate_up), list(down), True, "silu", 0, len(down) - 1
    )
    return found


def mixture_of_fp8_experts(
    x: Tensor, scale: Tensor, chosen: Tensor, shares: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor],
    gate_up_scale: Sequence[Tensor], down_scale: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Returns what ``mixture_of_experts`` does, for e4m3 codes of x and of the weights, in the dtype of ``shares``.

    Args:
        scale: float32 [n, 1]; what a code of ``x`` is multiplied by.
        gate_up_scale, down_scale: float32 [2 x inner] and [hidden] of each expert.
    """
    form = getattr(torch.ops.hpu.mixture_of_experts, FP8_EXPERTS)
    found: Tensor = form(
        x, chosen, shares, list(gate_up), list(down), scale, list(gate_up_scale), list(down_scale), True, "silu", 0,
        len(down) - 1,
    )  # fmt: skip
    return found


def cast_to_fp8_v2(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Returns float8_e4m3fn codes of x (bfloat16 or float32) times ``scale``, which broadcasts to it, rounded to
    nearest.
    """
    found: Tensor = torch.ops.hpu.cast_to_fp8_v2(x, scale, False, False, torch.float8_e4m3fn)[0]
    return found


def cast_from_fp8(codes: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Returns the values of 8-bit floats, times ``scale``, in ``dtype``."""
    found: Tensor = torch.ops.hpu.cast_from_fp8(codes, scale, dtype)
    return found


def fp8_gemm_v2(
    a: Tensor, b: Tensor, dtype: torch.dtype, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiplies a [n, k] by b [m, k] transposed, both e4m3, to [n, m] of ``dtype`` (bfloat16 or float32).

    Args:
        a_scale: float32 [n, 1]; what a code of ``a`` is multiplied by.
        b_scale: float32 [m].
    """
    found: Tensor = torch.ops.hpu.fp8_gemm_v2(a, False, b, True, None, dtype, a_scale, b_scale, bias, False)
    return found


def convert_from_uint4(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [k, m] of ``dtype``: (code - zero) times the scale of its group of rows.

    Args:
        codes: int32 [k, m / 8], the first of eight columns in the lowest bits.
        scale: [groups, m]; groups divide k.
        zero: int32 [groups, m / 8].
    """
    found: Tensor = torch.ops.hpu.convert_from_uint4(codes, scale, zero, dtype)
    return found


log = logging.getLogger("trencadis.engine")

Pin = Callable[[Tensor], Tensor]

REFUSED = "hpu: pinned memory is refused ({why}); copies go through ordinary memory and block"


class Pinning(NamedTuple):
    """How host memory for copies is made.

    Args:
        pin: returns a copy of a host tensor in memory for copies.
        pinned: True if that memory is pinned, so that copies need not block.
        note: a line for the user; "" if there is nothing to say.
    """

    pin: Pin
    pinned: bool = True
    note: str = ""


def find_pinning(device: str = "hpu") -> Pinning:
    """Tries the ways of pinning memory and returns the first that works: ``pin_memory("hpu")``, ``pin_memory()``, else
    ordinary memory.
    """
    ways: tuple[Pin, ...] = (lambda tensor: tensor.pin_memory(device), lambda tensor: tensor.pin_memory())
    why = ""
    for way in ways:
        try:
            made = way(torch.arange(4, dtype=torch.int32))
            if made.tolist() == [0, 1, 2, 3]:
                return Pinning(way)
            why = why or "it holds other values"
        except (RuntimeError, TypeError, NotImplementedError, AssertionError, ValueError) as error:
            why = why or next(iter(str(error).splitlines()), type(error).__name__)[:120]
    return Pinning(lambda tensor: tensor.detach().clone(), False, REFUSED.format(why=why))


Product = Callable[[Tensor, Tensor], Tensor]

EXACT = 1e-5
"""Largest error as a share of the largest value: a product that was rounded to bfloat16 is off by about 2e-3."""


def multiply_by_dtype(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies bfloat16 [B, S, d] and [B, d, T] by ``bmm(out_dtype=)``, which newer releases of torch have."""
    found: Tensor = torch.bmm(a, b, out_dtype=torch.float32)
    return found


def multiply_into(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies bfloat16 [..., S, d] and [..., d, T] into a float32 tensor by ``matmul(out=)``."""
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32, device=a.device)
    return torch.matmul(a, b, out=out)


FORMS: tuple[Product, ...] = (multiply_by_dtype, multiply_into)


def find_product(device: torch.device, compile: Callable[[Product], Product] | None) -> Product | None:
    """Returns the first of ``FORMS`` that runs on the card and is exact, in three and four dimensions; None: none is,
    with one warning if one runs.

    Args:
        compile: the compiler of compile mode; None in lazy mode.
    """
    g = torch.Generator().manual_seed(4)
    a, b = torch.randn(2, 4, 64, generator=g).bfloat16(), torch.randn(2, 64, 8, generator=g).bfloat16()
    want, wrong = a.float() @ b.float(), ""
    for form in FORMS:
        product = _any_rank(form)
        try:
            call = product if compile is None else compile(product)
            with redirect_stderr(StringIO()):  # a graph that fails prints its code
                found = [
                    call(*(t.to(device).view(shape + t.shape[1:]) for t in (a, b))).cpu().view_as(want)
                    for shape in ((2,), (1, 2))
                ]
        except Exception:
            continue  # whatever a release raises for a form that it lacks
        off = max(float((t.float() - want).abs().max() / want.abs().max()) for t in found)
        if off < EXACT and all(t.dtype == torch.float32 for t in found):
            return product
        wrong = f"hpu: products of bfloat16 into float32 are off by {off:.0e}; they are rounded to bfloat16."
    if wrong:
        log.warning(wrong)
    return None


def _any_rank(form: Product) -> Product:
    """Returns ``form`` for matrices of any number of leading dimensions."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        if a.dim() == 3:
            return form(a, b)
        found = form(a.flatten(0, -3), b.expand(*a.shape[:-2], *b.shape[-2:]).flatten(0, -3))
        return found.view(*a.shape[:-1], b.shape[-1])

    return product


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
    hccl: bool = False,
) -> Bridge:
    """Opens the process's bridge: sets the environment first, then imports the plug-in.

    Args:
        index: the card, counted from 0 over the visible ones; in a group, the card of this rank.
        named: the user named the card by its number; False: the first one may be any that is free.
        hccl: memory is left to HCCL also where this machine has one rank: the others are on other machines, or its
            collectives are probed.

    Raises:
        StartupError: see ``gaudi_mode_and_env.find_capability``; a plug-in that cannot be used; fewer cards than ranks.
    """
    env = os.environ if environ is None else environ
    found = gaudi_mode_and_env.find_capability(env, index, world)
    settled = hpu_process_setup.settle(env, index - rank, rank, world)
    env.update(settled.variables)
    for gone in settled.removed:
        env.pop(gone, None)
    with _with_rank_count(env, max(world, 2) if hccl else world):
        if found.real:
            return open_real(env, index, world, named)
        from trencadis.backends.hpu.emulator import emulated_bridge

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
        bridge = _open_plugin(environ, index, world, named)
    except MISMATCHED as error:
        stack = gaudi_card_and_plugin_detection.find_stack()
        raise StartupError(gaudi_mode_and_env.unusable_message(format_error(error), environ, stack)) from None
    return drop_wrong_kernels(bridge)


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
    hidden = {name: environ.pop(name) for name in gaudi_card_and_plugin_detection.LAUNCHED if name in environ}
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
    before = environ.get(gaudi_card_and_plugin_detection.WORLD_SIZE)
    if world > 1 and before in (None, "", "1"):
        environ[gaudi_card_and_plugin_detection.WORLD_SIZE] = str(world)
    try:
        yield
    finally:
        if before is not None:
            environ[gaudi_card_and_plugin_detection.WORLD_SIZE] = before
        else:
            environ.pop(gaudi_card_and_plugin_detection.WORLD_SIZE, None)


def _open_plugin(environ: MutableMapping[str, str], index: int, world: int, named: bool) -> Bridge:
    with _without_rank_variables(environ):
        core = import_module("habana_frameworks.torch.core")
        hpu: Any = import_module("habana_frameworks.torch.hpu")
        import_module("habana_frameworks.torch.distributed.hccl")  # registers the backend "hccl"
    is_lazy: Callable[[], bool] = import_module("habana_frameworks.torch.utils.internal").is_lazy
    wrong = gaudi_mode_and_env.mode_conflict(environ, is_lazy())
    if wrong is not None:
        raise StartupError(wrong)
    wrap: Any = hpu.wrap_in_hpu_graph if is_lazy() else None
    gaudi_card_and_plugin_detection.check_module(
        environ, gaudi_card_and_plugin_detection.find_machine(environ), index, world
    )
    _acquire_card(hpu, index, world, named or gaudi_card_and_plugin_detection.VISIBLE in environ)
    kernels = _optional("habana_frameworks.torch.hpex.kernels")
    norms = _optional("habana_frameworks.torch.hpex.normalization")
    metrics = import_module("habana_frameworks.torch.hpu.metrics")
    optional = find_symbols(gaudi_card_and_plugin_detection.plugin_version(), hpu.get_device_name())
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
        timed_event=lambda: hpu.Event(enable_timing=True),
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
