"""The symbols that the backend uses of a Gaudi, as one object, filled from the plug-in or from the emulator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trencadis.backends.hpu.collectives import register_opaque


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
        fused_sdpa, fused_rms_norm, apply_rotary: fused kernels, None where the plug-in lacks them.
        sdpa_parts: (q, k, v, mask, causal, scale, mode) -> attention over some keys, with the statistics to merge it
        (``optional_symbols``).
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
        (``optional_symbols``).
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
    sdpa_parts: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
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
