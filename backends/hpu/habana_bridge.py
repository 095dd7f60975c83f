"""The symbols that the backend uses of a Gaudi, as one object, filled from the plug-in or from the emulator.

The bridge is the plug-in's interface, and all that ops, programs and copies get. An emulated card has hooks besides;
only the backend checks if its bridge is an emulated one, and passes the hooks to the parts that need them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trencadis.backends.hpu.collectives import register_opaque
from trencadis.core.graphs.graph_manager import TimedEvent


class AttentionPart(NamedTuple):
    """Attention over some of a row's keys.

    ``out`` is normalised; the sum of exp(score - ``high``) is 1 / ``inverse``.
    """

    out: Tensor  # [R, h, T, d]
    high: Tensor  # [R, h, T, 1]
    inverse: Tensor  # [R, h, T, 1]


@dataclass(frozen=True)
class Bridge:
    """Symbols by their names in the plug-in; docs/hpu-internals.md says where each was read.

    Args:
        label: text shown to users.
        device: where tensors are made.
        is_lazy: lazy mode (graphs) or compile mode.
        mark_step: ends a recipe; does nothing in compile mode.
        wrap_in_hpu_graph: replaces ``forward`` on the instance, adds ``clear_cache``; lazy mode only.
        compile: a function compiled for fixed shapes, ``fullgraph`` or not; compile mode only.
        compile_only: while open, launches make recipes and compute as little as the plug-in can manage.
        mem_get_info: (free, total) bytes.
        out_of_memory: True if an error of the device means a lack of memory.
        metric_localcontext: counts events; ``stats()[0][1]`` is their number.
        opaque_collectives: makes (all_reduce, all_gather) that Dynamo does not look into.
        send, receive: rows to and from a rank of another pipeline stage, between launches.
        pin: a copy of a host tensor in pinned memory, which the card reads and writes by itself; in ordinary memory if
            not ``pinned``.
        pinned: False: the plug-in refuses pinned memory, and every copy blocks.
        notes: lines for the user about what the card or the plug-in lacks.
        event: a marker with ``record`` and ``synchronize``; the latter waits for all copies and launches before it.
        timed_event: the same, with ``elapsed_time`` in milliseconds; None: launches cannot be measured.
        fused_sdpa, fused_rms_norm, apply_rotary: fused kernels, None where the plug-in lacks them.
        sdpa_parts: (q, k, v, mask, causal, scale, mode) -> attention over some keys, with the statistics to merge it
        (``start.bridge_loader``).
        product: batches of bfloat16 matrices multiplied into float32.
        cast_to_fp8_v2: (x, scale) -> e4m3 codes of x times the scale, which broadcasts to it; None: of x.
        cast_from_fp8: (codes, dtype, scale) -> codes times the scale; None: their values.
        fp8_gemm_v2: (a [n, k], b [m, k], dtype, scale [n, 1], scale [m], bias) -> [n, m] of codes times their scales.
        convert_from_uint4: (codes int32 [k, m / 8], scale [groups, m], zero [groups, m / 8], dtype) -> [k, m].
        experts: (x [n, hidden], experts int64 [n, top], shares [n, top], gate_up [2 x inner, hidden] and down
            [hidden, inner] of each expert) -> [n, hidden], the weighted sum of each token's experts with SiLU.
        fp8_experts: (codes [n, hidden], scale [n, 1], experts, shares, codes of gate_up and of down, float32 scales of
            their rows) -> the same by 8-bit floats.
        fp8_top: the largest e4m3 float of the card.
        block_adjustment: (maxima, sums, rows, count, shape) -> factor of each block over its row's sum
        (``start.bridge_loader``).
    """

    label: str
    device: torch.device
    is_lazy: Callable[[], bool]
    mark_step: Callable[[], None]
    wrap_in_hpu_graph: Callable[[nn.Module], Any]
    compile: Callable[..., Callable[..., Any]]
    compile_only: Callable[[], AbstractContextManager[Any]]
    synchronize: Callable[[], None]
    mem_get_info: Callable[[], tuple[int, int]]
    out_of_memory: Callable[[RuntimeError], bool]
    metric_localcontext: Callable[[str], AbstractContextManager[Any]]
    device_name: Callable[[], str]
    all_reduce: Callable[[Tensor], Tensor]
    all_gather: Callable[[Tensor, int], Tensor]
    send: Callable[[Tensor, int], Tensor]
    receive: Callable[[Tensor, int], Tensor]
    collective_backend: str
    fused_sdpa: Callable[..., Tensor] | None
    fused_rms_norm: Callable[..., Tensor] | None
    apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    pin: Callable[[Tensor], Tensor]
    event: Callable[[], Any]
    timed_event: Callable[[], TimedEvent] | None = None
    sdpa_parts: Callable[..., AttentionPart] | None = None
    product: Callable[[Tensor, Tensor], Tensor] | None = None
    block_adjustment: Callable[..., Tensor] | None = None
    cast_to_fp8_v2: Callable[..., Tensor] | None = None
    cast_from_fp8: Callable[..., Tensor] | None = None
    fp8_gemm_v2: Callable[..., Tensor] | None = None
    convert_from_uint4: Callable[..., Tensor] | None = None
    experts: Callable[..., Tensor] | None = None
    fp8_experts: Callable[..., Tensor] | None = None
    fp8_top: float = 240.0
    pinned: bool = True
    opaque_collectives: Callable[[], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = (
        register_opaque
    )
    notes: tuple[str, ...] = ()

    def compilations(self, metric: Any) -> int:
        """Events counted while a ``metric_localcontext`` was open: recipes compiled, or fall-backs."""
        return int(metric.stats()[0][1])


LEAST_BLOCKS = 8
"""Minimum number of KV blocks with values, whatever the host's memory allows."""


@dataclass(frozen=True)
class EmulatorHooks:
    """The calls that a backend makes to the emulator besides the bridge; a real card has none.

    Args:
        values: tensors hold values; False on a card that keeps shapes alone.
        backed: bytes of KV cache that may be filled with values; None: no limit.
        reserve: charges bytes that have no host memory.
        launch: context manager; everything inside is one launch, in compile mode.
        layer: runs one layer of a stack; a card without values repeats the figures of an equal layer.
        run_out: makes the next ``capture`` or ``step`` run out of memory.
        no_sync: context manager inside which a launch that waits raises; an emulated card refuses that at all times.
        launched: virtual seconds that launches have taken so far.
    """

    values: bool
    backed: int | None
    reserve: Callable[[int], None]
    launch: Callable[[], AbstractContextManager[Any]]
    layer: Callable[..., Any]
    run_out: Callable[[str], None]
    no_sync: Callable[[], AbstractContextManager[Any]]
    launched: Callable[[], float]

    def hold_blocks(self, wanted: int, block_bytes: int) -> int:
        """Returns how many of the ``wanted`` KV blocks get host memory; the bytes of the others are only reserved."""
        most = wanted if self.backed is None else self.backed // block_bytes
        held = min(wanted, max(most, LEAST_BLOCKS))
        if held < wanted:
            self.reserve((wanted - held) * block_bytes)
        return held


@dataclass(frozen=True)
class EmulatedBridge(Bridge):
    """The bridge of an emulated card, with the emulator's hooks."""

    hooks: EmulatorHooks = field(kw_only=True)


def emulator_hooks(bridge: Bridge) -> EmulatorHooks | None:
    """Returns the emulator's hooks; None if the bridge is a real Gaudi's."""
    return bridge.hooks if isinstance(bridge, EmulatedBridge) else None


def fused_attention(
    kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
    mode: str,
) -> Tensor:  # fmt: skip
    """Computes attention [B, h, S, d] over [B, g, T, d] by the plug-in's ``FusedSDPA``.

    ``recompute_mode`` is always given: where it is None the wrapper asks a function of the plug-in's C library, which
    Dynamo cannot trace. ``True`` is what the wrapper finds by default.
    """
    return kernel(q, k, v, mask, 0.0, causal, scale, mode, True, None, "right")


OUT_OF_MEMORY_TEXTS = (
    "allocation failed for size::",  # the pool (device_memory.cpp); also for a graph that is captured
    "workspace allocation of size ::",  # the workspace of recipes, where a card runs out first (device.cpp)
    "destination_pointer_ allocation failed",  # while memory is moved together (device_memory.cpp)
    "no enough memory for defragment",  # the same, in later releases
    "synoutofdevicememory",
    "out of memory",  # the pool's extension, and HCCL's buffers
)
"""In lower case. An error of the thread that launches recipes holds one of them behind its own text."""


GRAPH_COMPILER_TEXTS = ("graph compile failed", "synnodecreatewithid failed", "exception in lowering thread")
"""In lower case: what the plug-in raises where the card's graph compiler refuses a recipe (``graph.cpp``), at once, or
from a later call behind the text of the thread that lowers graphs."""


def is_compiler_failure(error: BaseException) -> bool:
    """Returns True if an error of the plug-in means that the card's graph compiler failed, and no lack of memory."""
    text = str(error).lower()
    return any(part in text for part in GRAPH_COMPILER_TEXTS) and not is_out_of_memory(error)


def join_lines(error: BaseException) -> str:
    """Returns the text of an error of the plug-in, which has several lines, as one of at most 240 characters."""
    return " ".join(str(error).split())[:240]


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an error of the plug-in, or of the emulator, means a lack of memory on the card."""
    text = str(error).lower()
    return any(part in text for part in OUT_OF_MEMORY_TEXTS)
