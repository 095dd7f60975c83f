"""Launches for the attention kernels: ragged rows over a poisoned cache, and the float32 reference of each.

Everything that no row may read is NaN: the SINK block, blocks of no row, and what lies behind the last key of a row.
Tensors lie between guard bands, which a launch must leave as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.traffic.ragged_rows import ragged_inputs
from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda import runtime_of
from trencadis.backends.cuda.kernels import paged_attention, rotary_kernels, vision_attention
from trencadis.backends.cuda.kernels.attention_metadata import CudaSegments
from trencadis.backends.cuda.launches.attention_work_items import STEP
from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes, segments
from trencadis.backends.cuda.launches.input_buffers import InputBuffers
from trencadis.core.buckets import Bucket, Stage, verify_variant
from trencadis.core.device.backend import BackendConfig, LayerKV, Segments
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.launches.host_inputs import own_positions

GUARD = 256
"""Values before and behind each tensor."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


class Guarded:
    """Makes tensors between guard bands."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: list[tuple[Tensor, Tensor]] = []

    def like(self, values: Tensor) -> Tensor:
        """A copy of ``values`` on the device."""
        size = values.numel()
        fill = 99 if values.dtype in (torch.int32, torch.int64) else float("nan")
        whole = torch.full((size + 2 * GUARD,), fill, dtype=values.dtype, device=self.device)
        part = whole[GUARD : GUARD + size].view(values.shape)
        part.copy_(values)
        self._made.append((whole, whole.clone()))
        return part

    def check(self) -> None:
        """Asserts that no guard band was written."""
        for whole, before in self._made:
            for band in (slice(None, GUARD), slice(-GUARD, None)):
                assert torch.equal(_bits(whole[band]), _bits(before[band])), "a guard band was written"


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Case:
    """One text launch.

    Args:
        rows: (context, tokens) of each row.
        spare: rows, and (prefill) tokens, of the bucket beyond those in use.
        verify: tokens of a row of a VERIFY launch; 0: it is none.
        invariant: attended to as ``--batch-invariant`` does.
        window: keys that a token sees; 0: all. Blocks before all windows of a row hold NaN.
        spans: the tokens of every other row see each other, in the others the last two thirds.
        sinks: each head has one, from far below to far above the scores.
        planned: query heads per KV head that blocks of queries are planned by, if not ``group``.
    """

    rows: tuple[tuple[int, int], ...]
    decode: bool = False
    group: int = 2
    kv_heads: int = 2
    d: int = 16
    block: int = 16
    dtype: torch.dtype = torch.float32
    spare: tuple[int, int] = (2, 5)
    invariant: bool = False
    shared: bool = False
    processors: int = 4
    seed: int = 0
    window: int = 0
    spans: bool = False
    sinks: bool = False
    planned: int = 0
    verify: int = 0

    @property
    def bucket(self) -> Bucket:
        tokens, rows = sum(t for _, t in self.rows), len(self.rows) + self.spare[0]
        if self.decode:
            return Bucket(Stage.DECODE, (rows,))
        if self.verify:
            return Bucket(Stage.VERIFY, (rows,), verify_variant(self.verify))
        return Bucket(Stage.PREFILL, (tokens + self.spare[1], rows))

    @property
    def sizes(self) -> Sizes:
        longest = max(c + t for c, t in self.rows)
        blocks = -(-longest // self.block)
        return Sizes(
            self.block,
            blocks,
            50,
            self.kv_heads,
            self.processors,
            self.invariant,
            upto=self.spans,
            group=self.planned or self.group,
        )


def step_inputs(case: Case) -> StepInputs:
    """Blocks out of order; ``shared``: the first block of all rows with a full block of context is the same."""
    rng = np.random.default_rng(case.seed)
    inputs = ragged_inputs(case.rows, case.block, rng, shared=case.shared, positions=9999)
    if case.spans:
        inputs.upto = own_positions(inputs.row_start, inputs.context)
        for row, (context, tokens) in enumerate(case.rows):
            first = inputs.row_start[row] + row % 2 * tokens // 3
            inputs.upto[first : inputs.row_start[row + 1]] = context + tokens - 1
    return inputs


@dataclass
class Prepared:
    """Tensors of one launch on the device, and what must come of it."""

    case: Case
    tensors: Any
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    cache: LayerKV
    clean: LayerKV  # on the host, float32, without poison
    out: Tensor
    partial: paged_attention.Partial
    guards: Guarded
    inputs: StepInputs
    poisoned: LayerKV = field(init=False)

    def __post_init__(self) -> None:
        self.poisoned = LayerKV(*(t.clone() for t in self.cache[:2]))

    @property
    def sinks(self) -> Tensor | None:
        """float32 [heads]."""
        return torch.linspace(-30, 30, self.case.group * self.case.kv_heads) if self.case.sinks else None

    def reset(self) -> None:
        """The cache as before the launch, the output as if never written."""
        for now, before in zip(self.cache[:2], self.poisoned[:2], strict=True):
            now.copy_(before)
        self.out.fill_(float("nan"))

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """(attention, K cache, V cache) after rotary, store and attention."""
        self.reset()
        turned = torch.empty_like(self.q).contiguous()
        rotary_kernels.rope_store(
            self.q, self.k, self.v, self.cos, self.sin, *self.cache[:2], self.tensors.attn.slot_map, turned
        )
        self.attend(turned)
        return self.out.clone(), self.cache.k.clone(), self.cache.v.clone()

    def attend(self, turned: Tensor) -> None:
        attn, scale, case = self.tensors.attn, self.case.d**-0.5, self.case
        paged_attention.attend_text(
            turned, self.cache, attn, scale, self.out, self.partial, case.invariant, case.window,
            None if self.sinks is None else self.sinks.to(self.out.device), case.planned,
        )  # fmt: skip

    def expected(self) -> tuple[Tensor, LayerKV]:
        """The reference in float32 on the same values; q and k rounded to the dtype after the rotary."""
        ops, n, dtype = ReferenceOps(), len(self.inputs.tokens), self.case.dtype
        upto, options = self.case.spans, {"threads": "1"}
        backend = make_backend(BackendConfig(block_size=self.case.block, upto=upto, options=options))
        program: Any = backend.program(Bucket(Stage.PREFILL, (n, len(self.case.rows))), print)
        backend.fill(program, self.inputs)
        attn = program.inputs.attn
        rotary = ops.rotary(program.inputs.positions, *frequencies(self.case.d))
        kv = LayerKV(*(t.clone() for t in self.clean[:2]))
        q, k, v = (t[:n].cpu().float() for t in (self.q, self.k, self.v))
        q, k, v = ops.rope_store(q, k, v, rotary, kv, attn)
        kv = LayerKV(*(t.to(dtype).float() for t in kv[:2]))
        return ops.attend(q.to(dtype).float(), k, v, kv, attn, self.case.d**-0.5, self.case.window, self.sinks), kv


def frequencies(d: int) -> tuple[Tensor, Tensor]:
    """M-RoPE: three sections."""
    return torch.logspace(0, -4, d // 2), torch.arange(d // 2) * 3 // (d // 2)


def prepared(case: Case, device: torch.device) -> Prepared:
    """Fills the bucket's buffers and makes q, k, v side by side, padding included, of seeded values."""
    inputs = step_inputs(case)
    runtime = runtime_of(device)
    buffers = InputBuffers(case.bucket, case.sizes, runtime)
    buffers.fill(inputs)
    runtime.synchronize()
    guards, generator = Guarded(device), torch.Generator().manual_seed(case.seed + 1)
    n, heads, d = len(buffers.tensors.tokens), case.group * case.kv_heads, case.d
    parts = [heads * d, case.kv_heads * d, case.kv_heads * d]
    fused = torch.randn(n, sum(parts), generator=generator).to(case.dtype)
    fused[len(inputs.tokens) :] = float("nan")
    q, k, v = (t.view(n, -1, d) for t in torch.split(guards.like(fused), parts, dim=1))
    clean, poisoned = caches(case, inputs, generator)
    cos, sin = (guards.like(torch.zeros(n, d)) for _ in range(2))
    base, axes = (t.to(device) for t in frequencies(d))
    rotary_kernels.rotary(buffers.tensors.positions, base, axes, cos, sin)
    attn = buffers.tensors.attn
    out = guards.like(torch.full((n, heads, d), float("nan"), dtype=case.dtype))
    cache = LayerKV(*map(guards.like, poisoned[:2]))
    room = paged_attention.partial(attn, q, cache, case.invariant)
    partial = paged_attention.Partial(*(guards.like(torch.full(t.shape, float("nan"))) for t in room))
    return Prepared(case, buffers.tensors, q, k, v, cos, sin, cache, clean, out, partial, guards, inputs)


def caches(case: Case, inputs: StepInputs, generator: torch.Generator) -> tuple[LayerKV, LayerKV]:
    """(float32 without poison, of the dtype with NaN wherever no key of a row's context lies); ZERO is 0 in both."""
    shape = (int(inputs.blocks.max()) + 2, case.block, case.kv_heads, case.d)
    stored = np.zeros(shape[:2], bool)
    stored[0] = True
    unread = np.zeros(shape[:2], bool)
    for row, (context, _) in enumerate(case.rows):
        place = np.arange(context)
        stored[inputs.blocks[row, place // case.block], place % case.block] = True
        if case.window:
            early = place[: max(context + 1 - case.window, 0) // STEP * STEP]
            unread[inputs.blocks[row, early // case.block], early % case.block] = True
    here = torch.from_numpy(stored)[:, :, None, None]
    read = torch.from_numpy(stored & ~unread)[:, :, None, None]
    clean, poisoned = [], []
    for _ in range(2):
        values = torch.randn(shape, generator=generator).to(case.dtype)
        values[0] = 0
        clean.append(torch.where(here, values, 0).float())
        poisoned.append(torch.where(read, values, float("nan")))
    return LayerKV(*clean), LayerKV(*poisoned)


def check(ready: Prepared, ran: tuple[Tensor, Tensor, Tensor]) -> float:
    """Asserts everything about one run; returns the largest relative error."""
    out, *cache = (t.cpu() for t in ran)
    n, tolerance = len(ready.inputs.tokens), TOLERANCE[ready.case.dtype]
    want, want_kv = ready.expected()
    assert not out[n:].any(), "surplus tokens get 0"
    error = (out[:n].float() - want).abs().max() / want.abs().max()
    assert error <= tolerance, f"{ready.case}: {error:.2e}"
    real = ready.tensors.attn.slot_map[:n].cpu()
    for got, wanted, before in zip(cache, want_kv[:2], ready.poisoned[:2], strict=True):
        flat, wanted = got.flatten(0, 1), wanted.flatten(0, 1)
        torch.testing.assert_close(flat[real].float(), wanted[real], rtol=tolerance, atol=tolerance)
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[real] = False
        untouched[got.shape[1] : 2 * got.shape[1]] = False  # SINK
        old = before.cpu().flatten(0, 1)[untouched]
        assert torch.equal(_bits(flat[untouched]), _bits(old)), "a slot of no token was written"
    ready.guards.check()
    return float(error)


def moved(source: Prepared, last: int, target: Prepared, row: int, count: int) -> Tensor:
    """What ``target`` attends to for the last token of ``row`` if its ``count`` tokens are those of ``source``'s row 0
    up to token ``last``, and what is stored before them is what ``source`` stored."""
    width = min(source.inputs.blocks.shape[1], target.inputs.blocks.shape[1])
    begin = int(target.inputs.row_start[row])
    for other, ours in zip(target.poisoned[:2], source.cache[:2], strict=True):
        other[torch.from_numpy(target.inputs.blocks[row, :width]).long()] = ours[
            torch.from_numpy(source.inputs.blocks[0, :width]).long()
        ]
    for name in ("q", "k", "v", "cos", "sin"):
        part = getattr(source, name)[last + 1 - count : last + 1]
        getattr(target, name)[begin : begin + count] = part
    return target.run()[0][begin + count - 1]


@dataclass
class Packed:
    """One vision launch: images of windows that hold some real patches each."""

    q: Tensor
    k: Tensor
    v: Tensor
    seg: CudaSegments
    out: Tensor
    guards: Guarded
    real: Tensor  # bool [slots]

    def run(self, launch: Any) -> Tensor:
        self.out.fill_(float("nan"))
        launch(self.q, self.k, self.v, self.seg, self.q.shape[2] ** -0.5, self.out)
        return self.out.clone()

    def check(self, out: Tensor, want: Tensor) -> float:
        """Real slots equal the reference; padding is finite."""
        out = out.cpu().float()
        error = float((out[self.real] - want[self.real]).abs().max() / want[self.real].abs().max())
        assert error <= TOLERANCE[self.q.dtype], f"{error:.2e}"
        self.guards.check()
        return error


def packed(
    counts: list[list[int]], heads: int, d: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Packed, Tensor, Tensor]:
    """(launch, windows' reference, images' reference); ``counts``: real patches of each window of each image.

    Keys and values of padding are NaN, its queries are ordinary.
    """
    image = np.concatenate([np.full(len(c), i) for i, c in enumerate(counts)]).astype(np.int32)
    real = np.concatenate([np.asarray(c, np.int32) for c in counts])
    slots, generator = 64 * len(image), torch.Generator().manual_seed(seed)
    fused = torch.randn(slots, 3 * heads * d, generator=generator).to(dtype)
    inside = (torch.arange(64) < torch.from_numpy(real)[:, None]).flatten()
    clean = [t.view(slots, heads, d).float() for t in fused.chunk(3, dim=1)]
    poisoned = fused.clone()
    poisoned[~inside, heads * d :] = float("nan")
    guards = Guarded(device)
    q, k, v = (t.view(slots, heads, d) for t in guards.like(poisoned).chunk(3, dim=1))
    seg = CudaSegments(*(guards.like(torch.from_numpy(a)) for a in segments(image, real)))
    out = guards.like(torch.zeros(slots, heads, d, dtype=dtype))
    ops, plain = ReferenceOps(), Segments(torch.from_numpy(image), torch.from_numpy(real))
    queries, keys, values = clean
    want = [f(queries, keys, values, plain, d**-0.5) for f in (ops.attend_windows, ops.attend_images)]
    return Packed(q, k, v, seg, out, guards, inside), want[0], want[1]


WINDOWS, IMAGES = vision_attention.attend_windows, vision_attention.attend_images
