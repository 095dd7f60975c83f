"""Attention launches of serving size on a GPU: our kernel, torch's ways to the same result, and the least work.

Imports torch and the CUDA backend alone, so that a bare GPU machine runs it from a checkout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.kernels.case import Case
from trencadis.backends.cuda import runtime_of
from trencadis.backends.cuda.kernels import (
    cross_attend,
    paged_attention,
    quantised_kv_attention,
    rotary_kernels,
    vision_attention,
)
from trencadis.backends.cuda.kernels.attention_metadata import CudaSegments
from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes, segments
from trencadis.backends.cuda.launches.input_buffers import InputBuffers
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.cross_attention_inputs import VARIANT, CrossAttentionInputs
from trencadis.core.device.backend import LayerKV
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.media_spans import RESERVED_ROWS
from trencadis.core.vision_config import SlotForm

BLOCK = 16
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Model:
    """Heads of a text model: Qwen2.5-VL-3B and 7B have 16/2 and 28/4, Llama-3-8B 32/8."""

    heads: int
    kv_heads: int
    d: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def label(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.d} {str(self.dtype).removeprefix('torch.')}"


QWEN_3B, QWEN_7B, LLAMA_11B = Model(16, 2), Model(28, 4), Model(32, 8)


def step_inputs(rows: list[tuple[int, int]], rng: np.random.Generator) -> StepInputs:
    """Rows of (context, tokens), blocks in random order."""
    held = [-(-(c + t) // BLOCK) for c, t in rows]
    ids = 2 + rng.permutation(sum(held)).astype(np.int32)
    blocks = np.zeros((len(rows), max(held)), np.int32)
    for row, part in enumerate(np.split(ids, np.cumsum(held)[:-1])):
        blocks[row, : len(part)] = part
    counts = np.array([t for _, t in rows])
    n = int(counts.sum())
    flat = np.zeros(n, np.int32)
    return StepInputs(
        tokens=flat, from_slot=flat, positions=np.zeros((3, n), np.int32), image_row=flat, out_row=flat,
        row_start=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        context=np.array([c for c, _ in rows], np.int32), blocks=blocks, slot=flat[: len(rows)],
        adapter=flat[: len(rows)],
    )  # fmt: skip


def processors_of(device: torch.device) -> int:
    """Processors of a card; an H100's without one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def make_launch(
    m: Model, rows: list[tuple[int, int]], bucket: Bucket, device: torch.device
) -> tuple[InputBuffers, list[Tensor]]:
    """Inputs of a launch of rows of (context, tokens); queries, and a cache whose blocks are in random order."""
    inputs = step_inputs(rows, np.random.default_rng(0))
    group = m.heads // m.kv_heads
    sizes = Sizes(BLOCK, inputs.blocks.shape[1], 8, m.kv_heads, processors_of(device), group=group)
    buffers = InputBuffers(bucket, sizes, runtime_of(device))
    buffers.fill(inputs)
    buffers.buffer.runtime.synchronize()
    shape = (int(inputs.blocks.max()) + 1, BLOCK, m.kv_heads, m.d)
    cache = [torch.randn(shape, dtype=m.dtype, device=device) for _ in range(2)]
    q = torch.randn(len(inputs.tokens), m.heads, m.d, dtype=m.dtype, device=device)
    return buffers, [q, *cache]


def store_keys(k: Tensor, v: Tensor, codes: torch.dtype | None) -> tuple[LayerKV, Tensor, Tensor]:
    """A cache that holds k and v as they are or as 8-bit codes, and the keys and values that it stands for.

    Args:
        k, v: [blocks, block_size, kv_heads, d].
        codes: int8, uint8 for e4m3, or None.
    """
    if codes is None:
        return LayerKV(k, v), k, v
    held = [torch.empty(t.shape, dtype=codes, device=t.device) for t in (k, v)]
    scales = [torch.empty(t.shape[:3], dtype=torch.float16, device=t.device) for t in (k, v)]
    cache = LayerKV(*held, *scales)
    slots = torch.arange(k.shape[0] * k.shape[1], device=k.device)
    quantised_kv_attention.store(k.flatten(0, 1), v.flatten(0, 1), cache, slots)
    values = [t.float() if codes == torch.int8 else t.view(torch.float8_e4m3fn).float() for t in held]
    keys, read = ((x * s[..., None].float()).to(k.dtype) for x, s in zip(values, scales, strict=True))
    return cache, keys, read


def _cache_label(codes: torch.dtype | None) -> str:
    return "" if codes is None else f", {'int8' if codes == torch.int8 else 'fp8'} keys"


def decode(
    m: Model, rows: int, context: int, device: torch.device, window: int = 0, codes: torch.dtype | None = None
) -> Case:
    """``rows`` tokens that each read ``context`` keys, or the last of them that a ``window`` holds: bound by memory.

    Args:
        codes: of an 8-bit cache: int8, or uint8 for e4m3; None: one of the model's dtype.
    """
    read = min(context, window or context)
    buffers, (q, k, v) = make_launch(m, [(context - 1, 1)] * rows, Bucket(Stage.DECODE, (rows,)), device)
    attn, out, scale = buffers.tensors.attn, torch.empty_like(q), m.d**-0.5
    cache, k, v = store_keys(k, v, codes)
    room = paged_attention.partial(attn, q, cache)
    dense = [t[attn.blocks.view(rows, -1).long()].flatten(1, 2)[:, :context].transpose(1, 2) for t in (k, v)]
    dense = [t[:, :, context - read :].contiguous() for t in dense]
    wide = q.view(rows, m.heads, 1, m.d)

    def run() -> Tensor:
        paged_attention.attend_text(q, cache, attn, scale, out, room, window=window)
        return out

    def torch_way() -> Tensor:
        return sdpa(wide, *dense, scale=scale, enable_gqa=True)

    return Case(
        f"decode {m.label} {rows} rows x {context}" + (f", window {window}" if window else "") + _cache_label(codes),
        "attend_decode", run,
        bytes=2 * rows * read * m.kv_heads * m.d * cache.k.itemsize, flops=4 * rows * read * m.heads * m.d,
        bound="bytes", baselines={"sdpa, keys contiguous": torch_way},
        check=lambda: float((run().view(wide.shape) - torch_way()).abs().max()),
    )  # fmt: skip


def prefill(m: Model, tokens: int, device: torch.device, context: int = 0, codes: torch.dtype | None = None) -> Case:
    """One prompt, or a chunk of it after ``context`` stored tokens: bound by arithmetic.

    Args:
        codes: as for ``decode``.
    """
    buffers, (q, k, v) = make_launch(m, [(context, tokens)], Bucket(Stage.PREFILL, (tokens, 16)), device)
    attn, out, scale = buffers.tensors.attn, torch.empty_like(q), m.d**-0.5
    cache, k, v = store_keys(k, v, codes)
    room = paged_attention.partial(attn, q, cache)
    held = -(-(context + tokens) // BLOCK)
    packed = [t[attn.blocks[:held].long()].flatten(0, 1)[: context + tokens] for t in (k, v)]
    packed = [t.repeat_interleave(m.heads // m.kv_heads, dim=1) for t in packed]
    dense = [t.transpose(0, 1)[None].contiguous() for t in packed]
    starts = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (tokens, context + tokens)]
    wide = q.transpose(0, 1)[None].contiguous()

    def run() -> Tensor:
        paged_attention.attend_text(q, cache, attn, scale, out, room)
        return out

    def way(backend: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return sdpa(wide, *dense, is_causal=True, scale=scale)

        return call

    def torch_varlen() -> Tensor:
        attended: Tensor = varlen_attn(q, *packed, *starts, tokens, context + tokens, scale=scale, window_size=(-1, 0))
        return attended

    exact = SDPBackend.MATH if tokens <= 4096 else SDPBackend.FLASH_ATTENTION  # MATH would hold all scores, twice
    pairs = tokens * context + tokens * (tokens + 1) // 2
    return Case(
        f"prefill {m.label} {tokens} tokens" + (f" after {context}" if context else "") + _cache_label(codes),
        "attend_prefill", run,
        bytes=(2 * q.numel() + 2 * (context + tokens) * m.kv_heads * m.d) * m.dtype.itemsize,
        flops=4 * pairs * m.heads * m.d, bound="flops",
        baselines={"varlen_attn": torch_varlen} | ({} if context else {name: way(b) for name, b in BACKENDS.items()}),
        check=None if context else lambda: float((run() - way(exact)()[0].transpose(0, 1)).abs().max()),
    )  # fmt: skip


def cross_attention(m: Model, tokens: int, length: int, device: torch.device, decode: bool = False) -> Case:
    """Tokens that all see one image of ``length`` rows of the arena (Llama-3.2-Vision: 1,601 a tile): ``tokens`` rows
    of one token if ``decode``, which memory bounds, or one row.
    """
    reach = np.full((tokens, 1), length, np.int32)
    seen = CrossAttentionInputs(np.zeros(1, np.int32), reach, np.ones_like(reach), np.full(tokens, 2, np.int32))
    rows = [(0, 1)] * tokens if decode else [(0, tokens)]
    inputs = replace(step_inputs(rows, np.random.default_rng(0)), cross_attention=seen)
    variant = f"{VARIANT}1"
    bucket = Bucket(Stage.DECODE, (tokens,), variant) if decode else Bucket(Stage.PREFILL, (tokens, 2), variant)
    slot = SlotForm(1, 1, cross_attention_rows=length)
    sizes = Sizes(
        BLOCK, inputs.blocks.shape[1], 8, m.kv_heads, processors_of(device), group=m.heads // m.kv_heads, slot=slot
    )
    buffers = InputBuffers(bucket, sizes, runtime_of(device))
    buffers.fill(inputs)
    buffers.buffer.runtime.synchronize()
    items, width = buffers.tensors.cross_attention, m.kv_heads * m.d
    q = torch.randn(tokens, m.heads, m.d, dtype=m.dtype, device=device)
    arena = torch.randn(RESERVED_ROWS + length, 2 * width, dtype=m.dtype, device=device)
    k, v = torch.split(arena, width, dim=1)
    out, scale, room = torch.empty_like(q), m.d**-0.5, cross_attend.span_results(items, q, m.kv_heads)
    dense = [t[RESERVED_ROWS:].view(1, length, m.kv_heads, m.d).transpose(1, 2).contiguous() for t in (k, v)]
    wide = q.transpose(0, 1)[None].contiguous()

    def run() -> Tensor:
        cross_attend.cross_attend(q, k, v, items, scale, out, room)
        return out

    def torch_way() -> Tensor:
        return sdpa(wide, *dense, scale=scale, enable_gqa=True)

    return Case(
        f"image keys {m.label} {tokens} {'rows' if decode else 'tokens'} x {length}", "attend_pictures", run,
        bytes=(2 * q.numel() + 2 * length * width) * m.dtype.itemsize, flops=4 * tokens * length * m.heads * m.d,
        bound="bytes" if decode else "flops", baselines={"sdpa, keys contiguous": torch_way},
        check=lambda: float((run() - torch_way()[0].transpose(0, 1)).abs().max()),
    )  # fmt: skip


def vision(
    whole: bool, slots: int, images: int, device: torch.device, heads: int = 16, d: int = 80,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:  # fmt: skip
    """The tower of Qwen2.5-VL over ``images`` images; every fourth window is half padding."""
    windows = slots // 64
    image = (np.arange(windows) * images // windows).astype(np.int32)
    real = np.where(np.arange(windows) % 4 == 3, 32, 64).astype(np.int32)
    seg = CudaSegments(*(torch.from_numpy(a).to(device) for a in segments(image, real)))
    q, k, v = (torch.randn(slots, heads, d, dtype=dtype, device=device) for _ in range(3))
    out, scale = torch.empty_like(q), d**-0.5
    launch = vision_attention.attend_images if whole else vision_attention.attend_windows
    seen = (torch.arange(64) < torch.from_numpy(real)[:, None]).to(device)
    if whole:
        owner = torch.from_numpy(image).to(device).repeat_interleave(64)
        mask = (owner[:, None] == owner) & seen.flatten()
        shaped = [t.transpose(0, 1)[None] for t in (q, k, v)]
    else:
        mask = seen[:, None, None]
        shaped = [t.view(windows, 64, heads, d).transpose(1, 2) for t in (q, k, v)]

    def run() -> Tensor:
        launch(q, k, v, seg, scale, out)
        return out

    def torch_way() -> Tensor:
        return sdpa(*shaped, attn_mask=mask, scale=scale)

    def away() -> float:
        want = torch_way()
        flat = want[0].transpose(0, 1) if whole else want.transpose(1, 2).reshape(q.shape)
        return float((run() - flat).abs().max())

    sizes = np.bincount(image) * 64
    pairs = int((sizes**2).sum()) if whole else slots * 64
    return Case(
        f"{'images' if whole else 'windows'} {slots} slots, {images} images", launch.__name__, run,
        bytes=4 * q.nbytes, flops=4 * pairs * heads * d, bound="flops" if whole else "bytes",
        baselines={"sdpa with a mask": torch_way}, check=away,
    )  # fmt: skip


def rope_store(m: Model, tokens: int, device: torch.device) -> Case:
    """Rotary and store of one layer: bound by memory."""
    shape = (-(-tokens // BLOCK) + 2, BLOCK, m.kv_heads, m.d)
    cache = [torch.zeros(shape, dtype=m.dtype, device=device) for _ in range(2)]
    fused = torch.randn(tokens, (m.heads + 2 * m.kv_heads) * m.d, dtype=m.dtype, device=device)
    parts = [m.heads * m.d, m.kv_heads * m.d, m.kv_heads * m.d]
    q, k, v = (t.view(tokens, -1, m.d) for t in torch.split(fused, parts, dim=1))
    cos, sin = (torch.rand(tokens, m.d, device=device) for _ in range(2))
    slots = 2 * BLOCK + torch.randperm(tokens, device=device)

    out = torch.empty(q.shape, dtype=m.dtype, device=device)

    def run() -> Tensor:
        rotary_kernels.rope_store(q, k, v, cos, sin, *cache, slots, out)
        return out

    return Case(
        f"rope_store {m.label} {tokens} tokens", "rope", run,
        bytes=2 * fused.numel() * m.dtype.itemsize + cos.numel() * 4 + tokens * 8, flops=0, bound="bytes",
    )  # fmt: skip


SMALL = Model(4, 2, 16, torch.float32)


def cases(device: torch.device, small: bool = False) -> Iterator[Case]:
    """What is reported, one at a time: each holds its tensors until the next is asked for.

    ``small``: sizes for the interpreter, which compare values and say nothing about speed.
    """
    if small:
        yield from (
            decode(SMALL, 3, 300, device),
            decode(SMALL, 1, 300, device, 40),
            decode(SMALL, 2, 40, device, codes=torch.int8),
            prefill(SMALL, 40, device),
            prefill(SMALL, 40, device, codes=torch.uint8),
            cross_attention(SMALL, 2, 40, device, decode=True),
            cross_attention(SMALL, 20, 600, device),
            rope_store(SMALL, 4, device),
        )
        # The interpreter computes products of bfloat16 on its bits.
        yield from (vision(whole, 128, 2, device, heads=2, d=16, dtype=torch.float32) for whole in (False, True))
        return
    for m in (QWEN_3B, QWEN_7B):
        for rows, context in ((1, 2048), (1, 32768), (16, 2048), (64, 2048), (256, 1024)):
            yield decode(m, rows, context, device)
        for rows in (1, 16):
            yield from (decode(m, rows, 16384, device), decode(m, rows, 16384, device, window=1024))
        for tokens in (512, 4096, 16384, 32768):
            yield prefill(m, tokens, device)
        yield prefill(m, 2048, device, context=14336)
        yield from (decode(m, 16, 16384, device, codes=torch.int8), prefill(m, 4096, device, codes=torch.int8))
        yield rope_store(m, 4096, device)
    yield from (
        cross_attention(LLAMA_11B, 16, 6404, device, decode=True),
        cross_attention(LLAMA_11B, 2048, 6404, device),
    )
    for slots in (1024, 4096, 12544):
        yield vision(False, slots, 2, device)
        yield vision(True, slots, 2, device)
