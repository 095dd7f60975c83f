"""Launches for attention to images: tokens over a poisoned arena, and the float32 reference of each.

Every value of the arena that no token sees is NaN: other layers' columns, images of nobody, rows behind the last one
that is seen, and the queries of surplus tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.oracles.attention_cases import Guarded
from tests.traffic.ragged_rows import ragged_inputs
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda import runtime_of
from trencadis.backends.cuda.kernels import cross_attend
from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes
from trencadis.backends.cuda.launches.input_buffers import InputBuffers
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.cross_attention_inputs import VARIANT, CrossAttentionInputs
from trencadis.core.device.launch_tensors import CrossAttentionTensors
from trencadis.core.media_spans import RESERVED_ROWS
from trencadis.core.vision_config import SlotForm

LAYERS, LAYER = 3, 1
"""Layers whose keys and values an arena row holds, and the one that is attended to."""


@dataclass(frozen=True)
class CrossAttentionCase:
    """One launch; its tokens are one row's, or as many rows of one token each (``decode``).

    Args:
        reach, times: [n][u] as ``CrossAttentionTensors`` has them.
        units: which image of the arena each column is.
        spare: tokens and images of the bucket beyond those in use.
        processors: images are cut for many of them; where there is none, a share is all work.
    """

    reach: tuple[tuple[int, ...], ...]
    times: tuple[tuple[int, ...], ...] = ()
    units: tuple[int, ...] = ()
    decode: bool = False
    length: int = 150
    group: int = 2
    kv_heads: int = 2
    d: int = 16
    dtype: torch.dtype = torch.float32
    spare: tuple[int, int] = (3, 1)
    processors: int = 0
    seed: int = 0

    @property
    def bucket(self) -> Bucket:
        tokens, variant = len(self.reach) + self.spare[0], f"{VARIANT}{len(self.reach[0]) + self.spare[1]}"
        return Bucket(Stage.DECODE, (tokens,), variant) if self.decode else Bucket(Stage.PREFILL, (tokens, 2), variant)

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            16,
            8,
            50,
            self.kv_heads,
            self.processors,
            group=self.group,
            slot=SlotForm(1, 1, cross_attention_rows=self.length),
        )

    @property
    def visible(self) -> CrossAttentionInputs:
        reach = np.array(self.reach, np.int32)
        times = np.array(self.times, np.int32) if self.times else (reach > 0).astype(np.int32)
        units = np.array(self.units or range(reach.shape[1]), np.int32)
        return CrossAttentionInputs(units, reach, times, np.full(len(reach), 2, np.int32))


@dataclass
class CrossAttentionLaunch:
    """Tensors of one launch on the device, and the arena without poison."""

    case: CrossAttentionCase
    tensors: Any
    q: Tensor
    held: Tensor  # [arena rows, 2 x width] of one layer
    clean: Tensor  # the same in float32, on the host
    out: Tensor
    workspace: cross_attend.SpanResults
    guards: Guarded

    def run(self) -> Tensor:
        """[tokens of the bucket, heads, d]; partial results hold what an earlier launch left."""
        self.out.fill_(float("nan"))
        k, v = torch.split(self.held, self.held.shape[1] // 2, dim=1)
        cross_attend.cross_attend(
            self.q, k, v, self.tensors.cross_attention, self.case.d**-0.5, self.out, self.workspace
        )
        return self.out.clone()

    def expected(self) -> Tensor:
        """float32 [n, heads, d]; 0 for tokens that see nothing."""
        seen, case = self.case.visible, self.case
        place = torch.from_numpy(seen.units).long()[:, None] * case.length + torch.arange(case.length)
        tensors = CrossAttentionTensors(*map(torch.from_numpy, (seen.units, seen.reach, seen.times, seen.gate)))  # type: ignore[arg-type]
        q = self.q[: len(seen.reach)].cpu().float()
        rows = (place + RESERVED_ROWS).flatten()
        out = ReferenceOps().cross_attend(q, self.clean, rows, tensors, case.d**-0.5)
        return torch.where(torch.from_numpy(seen.reach.any(1))[:, None, None], out, 0.0)

    def check(self, out: Tensor) -> float:
        """Asserts everything about one run; returns the largest error, as a share of the largest value."""
        out, want = out.cpu().float(), self.expected()
        n = len(self.case.reach)
        assert not out[n:].any(), "surplus tokens get 0"
        blind = ~torch.from_numpy(self.case.visible.reach.any(1))
        assert not out[:n][blind].any(), "who sees nothing gets 0"
        error = float((out[:n] - want).abs().max() / want.abs().max().clamp(min=1e-6))
        bound = 2e-5 if self.case.dtype == torch.float32 else 2e-2
        assert error <= bound, f"{self.case}: {error:.2e}"
        self.guards.check()
        return error


def launched(case: CrossAttentionCase, device: torch.device, images: Tensor | None = None) -> CrossAttentionLaunch:
    """Fills the bucket's buffers, and makes queries and an arena of seeded values.

    Args:
        images: float32 [images, length, 2 x width] what the arena holds; None: random values.
    """
    n, seen = len(case.reach), case.visible
    rows = [(0, 1)] * n if case.decode else [(0, n)]
    inputs = replace(ragged_inputs(rows, 16, np.random.default_rng(case.seed)), cross_attention=seen)
    runtime = runtime_of(device)
    buffers = InputBuffers(case.bucket, case.sizes, runtime)
    buffers.fill(inputs)
    runtime.synchronize()
    guards, generator = Guarded(device), torch.Generator().manual_seed(case.seed + 1)
    width, count = case.kv_heads * case.d, int(seen.units.max()) + 2
    if images is None:
        images = torch.randn(count, case.length, 2 * width, generator=generator)
    clean = torch.zeros(RESERVED_ROWS + len(images) * case.length, 2 * width)
    clean[RESERVED_ROWS:] = images.flatten(0, 1).to(case.dtype).float()
    arena = torch.full((len(clean), LAYERS * 2 * width), float("nan"), dtype=case.dtype)
    for unit, far in zip(seen.units.tolist(), seen.reach.max(0).tolist(), strict=True):
        first = RESERVED_ROWS + unit * case.length
        rows_seen = slice(first, first + far)
        arena[rows_seen, 2 * LAYER * width : 2 * (LAYER + 1) * width] = clean[rows_seen].to(case.dtype)
    tokens, heads = case.bucket.dims[0], case.group * case.kv_heads
    q = torch.randn(tokens, heads, case.d, generator=generator).to(case.dtype)
    q[n:] = float("nan")
    q = guards.like(q)
    held = guards.like(arena)[:, 2 * LAYER * width : 2 * (LAYER + 1) * width]
    out = guards.like(torch.full(tuple(q.shape), float("nan"), dtype=case.dtype))
    room = cross_attend.span_results(buffers.tensors.cross_attention, q, case.kv_heads)
    room = cross_attend.SpanResults(*(guards.like(torch.full(t.shape, float("nan"))) for t in room))
    return CrossAttentionLaunch(case, buffers.tensors, q, held, clean, out, room, guards)
