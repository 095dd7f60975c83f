"""Compares a library's attention with this engine's own kernels on one small launch, before it is used unasked.

The launch has what prompts have: a prompt from its first token on, a follow-up behind a prefix that crosses KV blocks,
a decoding row, a row of no sequence and surplus tokens, which see no key. It runs once, and by a graph where graphs
are captured, since a library may do in a capture what no capture permits.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.cuda.attention_libraries.attention_library_selector import SelectedLibrary
from trencadis.backends.cuda.attention_libraries.library_attention import FlashAttnLaunch
from trencadis.backends.cuda.backend import CudaBackend
from trencadis.backends.cuda.kernels.attention_metadata import ItemAttn
from trencadis.backends.cuda.launches.input_buffers import InputBuffers
from trencadis.backends.cuda.runtime_protocol import Stream
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import Body, LayerKV
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.launch_inputs import StepInputs

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest difference of two values, over one plus the size of ours: both round weights and results to the type."""

BUCKET = Bucket(Stage.PREFILL, (64, 4))
PROBE = "attention library"


def find_disagreement(found: SelectedLibrary, backend: CudaBackend) -> str:
    """Returns why the library cannot take the place of this engine's kernels, in a line; an empty string if it can."""
    try:
        worst = float(np.max([_largest_difference(found, backend, window) for window in _windows(backend)]))
    except Exception as error:  # a wheel for another torch, CUDA or card may raise anything
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if not worst <= TOLERANCE[backend.dtype]:  # NaN included
        return f"its values differ by {worst:.2g} from those of own kernels"
    return ""


def _windows(backend: CudaBackend) -> tuple[int, ...]:
    """The windows of keys to compare: none, and a short one where layers have any."""
    return (0, 24) if any(backend.cfg.windows) else (0,)


def make_rows(block_size: int, longest: int) -> list[tuple[int, int]]:
    """Returns (stored keys, new tokens) of three rows, none of more than ``longest`` keys."""
    prefix = 2 * block_size + 8
    return [(0, min(21, longest)), (min(prefix, longest - 9), 9), (min(prefix // 2, longest - 1), 1)]


def make_inputs(rows: list[tuple[int, int]], block_size: int) -> StepInputs:
    """Returns the host arrays of a launch of ``rows``, whose blocks lie in reverse order."""
    counts = [tokens for _, tokens in rows]
    held = [-(-(context + tokens) // block_size) for context, tokens in rows]
    ids = RESERVED_BLOCKS + np.arange(sum(held), dtype=np.int32)[::-1]
    blocks, n = np.zeros((len(rows), max(held)), np.int32), sum(counts)
    for row, (first, stop) in enumerate(pairwise(np.cumsum([0, *held]))):
        blocks[row, : stop - first] = ids[first:stop]
    zeros = np.zeros(n, np.int32)
    return StepInputs(
        tokens=zeros, from_slot=zeros, positions=np.zeros((3, n), np.int32), image_row=zeros,
        out_row=np.arange(1, n + 1, dtype=np.int32), row_start=np.cumsum([0, *counts]).astype(np.int32),
        context=np.array([context for context, _ in rows], np.int32), blocks=blocks,
        slot=np.arange(1, len(rows) + 1, dtype=np.int32), adapter=np.zeros(len(rows), np.int32),
    )  # fmt: skip


def _largest_difference(found: SelectedLibrary, backend: CudaBackend, window: int) -> float:
    """Returns the largest difference of a run and of a replay; NaN where either has one."""
    runtime, sizes, d = backend.runtime, backend.sizes, backend.cfg.head_dim
    rows = make_rows(sizes.block_size, sizes.row_blocks * sizes.block_size)
    inputs = make_inputs(rows, sizes.block_size)
    buffers = InputBuffers(BUCKET, sizes, runtime)
    buffers.fill(inputs)
    generator = torch.Generator().manual_seed(7)

    def draw_values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(backend.dtype).to(backend.device)

    q = draw_values(BUCKET.dims[0], sizes.group * sizes.kv_heads, d)
    k, v = (draw_values(int(inputs.blocks.max()) + 1, sizes.block_size, sizes.kv_heads, d) for _ in range(2))
    kv, launch = LayerKV(k, v), FlashAttnLaunch(found.calls["attend"], found.kind, BUCKET, sizes)

    def body(tensors: object) -> Tensor:
        attn: ItemAttn = tensors.attn  # type: ignore[attr-defined]
        launch.begin(attn)
        theirs = launch.attend(q, kv, d**-0.5, window).float()
        ours = backend.ops.attend(q, q, q, kv, attn, d**-0.5, window).float()  # type: ignore[arg-type]
        return ((theirs - ours).abs() / (1 + ours.abs())).amax()

    runtime.wait(Stream.PROGRAMS, buffers.buffer.written)
    made = [runtime.launch(PROBE, body, buffers.tensors, buffers.static)]
    runtime.synchronize()
    values = [float(made[0])]
    if runtime.graphs:
        values.append(runtime.on_captures(lambda: _replay(backend, body, buffers)))
    return float(np.max(values))


def _replay(backend: CudaBackend, body: Body, buffers: InputBuffers) -> float:
    """Returns what ``body`` gives as a graph."""
    runtime = backend.runtime
    graph = runtime.capture(PROBE, PROBE, body, buffers.tensors, buffers.static)
    try:
        runtime.replay(graph)
        runtime.synchronize()
        return float(graph.out)
    finally:
        runtime.release(graph)
