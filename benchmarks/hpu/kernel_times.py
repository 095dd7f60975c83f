"""Measures attention and experts on a card, and reports which kernels a start accepts; for ``device_probe``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.reporting import median
from trencadis.backends.hpu.fused_experts import ListedExperts
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import HeadTensorsOut, LayerKV, OutOfDeviceMemory, TextTensors
from trencadis.core.launch_inputs import StepInputs

ROWS, BLOCK, HEADS, GROUPS, HEAD_DIM = 64, 128, 28, 4, 128
"""Sizes of a DECODE launch of a 7B model."""


def found_at_opening(backend: Any) -> dict[str, float]:
    """1 where the plug-in pins host memory, and where it multiplies bfloat16 into float32 exactly."""
    return {"pinned": float(backend.bridge.pinned), "product": float(backend.bridge.product is not None)}


def known_lack_of_memory(backend: Any) -> dict[str, float]:
    """1 where the error of a tensor of twice the card's memory is known as a lack of memory."""
    try:
        torch.empty(2 * backend.memory.total(), dtype=torch.uint8, device=backend.device)
        backend.synchronize()
    except OutOfDeviceMemory:
        return {"oom_text": 1.0}
    except RuntimeError as error:
        return {"oom_text": float(backend.bridge.out_of_memory(error))}
    return {}


class DecodeLayer:
    """The attention of one layer of a DECODE launch, and nothing else.

    Args:
        parts: attention is computed block by block by the fused kernel; part of the key of a compiled region.
    """

    def __init__(self, backend: Any, blocks: int, parts: bool) -> None:
        self.ops, self.parts, self.blocks = backend.hpu_ops, parts, blocks
        shape = ((blocks + 2) * BLOCK, GROUPS, HEAD_DIM)
        self.kv = LayerKV(backend.zeros(shape, backend.dtype), backend.zeros(shape, backend.dtype))
        self.q, self.own = (
            backend.zeros((ROWS, heads, HEAD_DIM), backend.dtype) for heads in (HEADS, GROUPS)
        )  # fmt: skip

    def __call__(self, attn: Any) -> Tensor:
        out: Tensor = self.ops.attend(self.q, self.own, self.own, self.kv, attn, HEAD_DIM**-0.5)
        return out

    def launch(self, x: TextTensors) -> HeadTensorsOut:
        """The body of the launch."""
        attn = self.ops.prepare_attn(x.attn, HEADS, self.kv)
        return HeadTensorsOut(self.ops.layer(self, attn), None, None, None, None)

    def inputs(self) -> StepInputs:
        """One token of each row; no two rows share a block."""
        each, zeros = self.blocks // ROWS, np.zeros(ROWS, np.int32)
        return StepInputs(
            tokens=zeros, from_slot=zeros, positions=np.zeros((3, ROWS), np.int32), image_row=zeros,
            out_row=np.arange(1, ROWS + 1, dtype=np.int32), row_start=np.arange(ROWS + 1, dtype=np.int32),
            context=np.full(ROWS, each * BLOCK - 1, np.int32),
            blocks=2 + np.arange(ROWS * each, dtype=np.int32).reshape(ROWS, each),
            slot=np.arange(1, ROWS + 1, dtype=np.int32), adapter=zeros,
        )  # fmt: skip


def attention_times(backend: Any, blocks: int) -> dict[str, float]:
    """Milliseconds of a layer's attention in DECODE, and the share of that time which the fused kernel takes."""
    ops, found = backend.hpu_ops, dict[bool, float]()
    plain = ops.kernels
    for parts in (False, True)[: 2 if plain.parts is not None else 1]:
        layer = DecodeLayer(backend, blocks, parts)
        ops.kernels = plain._replace(decode_parts=parts)
        try:
            program = backend.program(Bucket(Stage.DECODE, (ROWS, blocks)), layer.launch)
            backend.fill(program, layer.inputs())
            program.compile()
            program.capture()
            found[parts] = seconds_of(backend, program.replay)
        finally:
            ops.kernels = plain
    values = {"attend_ms": 1e3 * found[False]}
    return values | ({"attend_parts": found[True] / found[False]} if True in found else {})


def expert_time(backend: Any, count: int, hidden: int, inner: int) -> dict[str, float]:
    """Milliseconds of one token's experts by the plug-in's operation; nothing without it."""
    shapes = ((2 * inner, hidden), (hidden, inner))
    gate_up, down = ([backend.zeros(shape, backend.dtype) for _ in range(count)] for shape in shapes)
    packed = backend.ops.pack_experts(gate_up, down)
    if not isinstance(packed, ListedExperts):
        return {}
    x, scores = backend.zeros((1, hidden), backend.dtype), torch.arange(float(count))[None].to(backend.device)

    def run(x: Tensor, scores: Tensor) -> Tensor:
        out: Tensor = backend.ops.experts(x, scores, packed, min(8, count), True, "silu")
        return out

    def launch() -> None:
        with torch.no_grad(), backend.hpu_ops.check_context():
            backend.ops.region(run, x, scores)
            backend.bridge.mark_step()

    return {"experts_ms": 1e3 * seconds_of(backend, launch)}


def seconds_of(backend: Any, launch: Callable[[], object]) -> float:
    """Returns the median seconds of a launch, without its first ones."""
    taken = []
    for _ in range(9):
        backend.synchronize()
        begun = time.perf_counter()
        launch()
        backend.synchronize()
        taken.append(time.perf_counter() - begun)
    return median(taken[2:])
