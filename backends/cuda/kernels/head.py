"""Sampling: one pass over the logits, then two programs per row: one picks the token, one lists the 20 best ids.

No host read, no atomics on floats, fixed shapes. backends/cpu/sampling.py defines the parameters. Each row writes the
state of its own slot, which no other row of the launch may name; slot 0 is the sink and is never written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels.head_best import best, log_sum, logprob_of
from trencadis.backends.cuda.kernels.head_draw import DrawParams, draw, rank_of
from trencadis.backends.cuda.kernels.head_parts import (
    GREEDY_BELOW,
    greedy_parts_kernel,
    greedy_pick_kernel,
    inverse_of,
    parts_kernel,
)
from trencadis.backends.cuda.kernels.head_scores import CHUNK, HeadRow, pairs_of, raw_of
from trencadis.core.backend import HeadTensors, HeadTensorsOut, SamplerState
from trencadis.core.request import MAX_LOGPROBS

SHARE, PARTS_WARPS = 16, 8
"""Chunks of one program of the first kernel, and its warps."""

TILE, PICK_WARPS = 32, 16
"""Listed chunks that a row's program reads at a time, and its warps; its registers allow 8 or 16."""

GREEDY_TILE = 4096
TOP = MAX_LOGPROBS


class HeadScratch(NamedTuple):
    """Results of the first kernel for the second, which reads only what the same launch wrote."""

    chunk_raw: Tensor  # float32 [rows, chunks] largest raw logit
    chunk_raw_mass: Tensor  # float32 [rows, chunks]
    chunk_top: Tensor  # float32 [rows, chunks] largest score
    chunk_mass: Tensor  # float32 [rows, chunks]
    listed: Tensor  # int32 [rows, chunks]


def scratch(rows: int, vocab: int, device: torch.device) -> HeadScratch:
    """Unwritten memory for a launch of the full variant; any launch of as many rows may reuse it."""
    shape = rows, triton.cdiv(vocab, CHUNK.value)
    real = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(4)]
    return HeadScratch._make([*real, torch.empty(shape, dtype=torch.int32, device=device)])


def greedy_scratch(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Unwritten (largest logit float32, its id int32) of each share, [rows, shares] each, for the greedy variant."""
    shape = rows, triton.cdiv(vocab, _greedy_tile(vocab))
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def outputs(rows: int, vocab: int, device: torch.device, full: bool) -> HeadTensorsOut:
    """Unwritten outputs of either variant."""

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    token, top = empty(torch.int32, rows), min(TOP, vocab)
    if not full:
        return HeadTensorsOut(token, None, None, None, None)
    return HeadTensorsOut(
        token, empty(torch.float32, rows), empty(torch.int32, rows),
        empty(torch.int32, rows, top), empty(torch.float32, rows, top),
    )  # fmt: skip


def check(logits: Tensor, head: HeadTensors, state: SamplerState) -> None:
    """logits [rows, vocabulary], contiguous; ``core.backend`` gives the shapes of ``head`` and ``state``."""
    rows, vocab = logits.shape
    assert logits.is_contiguous() and logits.is_floating_point() and vocab < 1 << 26
    for name in ("hidden_row", "slot", "target", "mask_row"):
        assert getattr(head, name).dtype == torch.int64 and getattr(head, name).shape == (rows,), name
    for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition", "uniform"):
        assert getattr(head, name).dtype == torch.float32 and getattr(head, name).shape == (rows,), name
    assert head.top_k.dtype == torch.int32 and head.masks.shape[1] == state.seen.shape[1] == triton.cdiv(vocab, 8)
    assert state.counts.shape[1] == vocab and state.counts.dtype == state.last.dtype == torch.int32
    assert state.bias_id.shape == state.bias_value.shape and state.bias_id.dtype == torch.int64
    for t in (*head, *state):
        assert t.is_contiguous()


def greedy(
    logits: Tensor, head: HeadTensors, state: SamplerState, parts: tuple[Tensor, Tensor], out: HeadTensorsOut
) -> None:
    """Writes the argmax of each row of logits [rows, vocabulary] to ``out.token``; the lowest id among equals."""
    check(logits, head, state)
    rows, vocab = logits.shape
    if rows:
        tile, shares = _greedy_tile(vocab), parts[0].shape[1]
        greedy_parts_kernel[(shares, rows)](
            logits, *parts, VOCAB=vocab, TILE=tile, SHARES=shares, num_warps=4 if tile >= 1024 else 1
        )
        greedy_pick_kernel[(rows,)](
            *parts, head.slot, state.last, out.token, SHARES=shares, SHARES_POW=triton.next_power_of_2(shares),
            num_warps=1,
        )  # fmt: skip


def full(logits: Tensor, head: HeadTensors, state: SamplerState, scratch: HeadScratch, out: HeadTensorsOut) -> None:
    """Samples each row of logits [rows, vocabulary] with masks, penalties, filters and logprobs into ``out``."""
    check(logits, head, state)
    rows, vocab = logits.shape
    if not rows:
        return
    assert out.logprob is not None and out.rank is not None and out.top_id is not None and out.top_logprob is not None
    chunks = scratch.listed.shape[1]
    share = min(SHARE, triton.next_power_of_2(chunks))
    sizes = {
        "VOCAB": vocab, "BYTES": state.seen.shape[1], "PAIRS": state.bias_id.shape[1],
        "PAIRS_POW": triton.next_power_of_2(state.bias_id.shape[1]), "CHUNKS": chunks,
    }  # fmt: skip
    stored = state.counts, state.seen, state.bias_id, state.bias_value, head.masks
    parts_kernel[(triton.cdiv(chunks, share), rows)](
        logits, head.slot, head.temperature, head.mask_row, head.repetition, head.frequency, head.presence, *stored,
        *scratch[:-1], **sizes, SHARE=share, num_warps=PARTS_WARPS,
    )  # fmt: skip
    pick_kernel[(rows, 2)](
        logits, head.slot, head.temperature, head.top_k, head.top_p, head.min_p, head.uniform, head.target,
        head.mask_row, head.repetition, head.frequency, head.presence, *stored, state.last, *scratch,
        out.token, out.logprob, out.rank, out.top_id, out.top_logprob,
        **sizes, CHUNKS_POW=triton.next_power_of_2(chunks),
        TILE=min(TILE, triton.next_power_of_2(chunks)), TOP=out.top_id.shape[1],
        TOP_POW=triton.next_power_of_2(out.top_id.shape[1]), num_warps=PICK_WARPS,
    )  # fmt: skip


def _greedy_tile(vocab: int) -> int:
    return min(GREEDY_TILE, max(triton.next_power_of_2(vocab), 16))


@triton.jit
def pick_kernel(
    logits, slots, temperature, top_k, top_p, min_p, uniform, target, mask_rows, repetition, frequency, presence,
    counts, seen, bias_id, bias_value, masks, last, chunk_raw, chunk_raw_mass, chunk_top, chunk_mass, index,
    token, logprob, rank, top_id, top_logprob,
    VOCAB: tl.constexpr, BYTES: tl.constexpr, PAIRS: tl.constexpr, PAIRS_POW: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_POW: tl.constexpr, TILE: tl.constexpr, TOP: tl.constexpr, TOP_POW: tl.constexpr,
):  # fmt: skip
    """Program (row, 0) picks the token and ranks it; program (row, 1) lists the best."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 1:
        best(
            logits, row, chunk_raw, chunk_raw_mass, top_id, top_logprob,
            VOCAB, CHUNKS, CHUNKS_POW, TOP, TOP_POW,
        )  # fmt: skip
    else:
        slot = tl.load(slots + row)
        warmth = tl.load(temperature + row)
        picked = tl.load(target + row).to(tl.int32)
        list_of = index + row * CHUNKS
        if picked < 0:
            x = HeadRow(
                logits, row, slot, tl.load(mask_rows + row), inverse_of(warmth),
                pairs_of(bias_value, slot, PAIRS, PAIRS_POW), repetition, frequency, presence,
                counts, seen, bias_id, bias_value, masks, VOCAB, BYTES, PAIRS,
            )  # fmt: skip
            want = DrawParams(
                tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row), tl.load(uniform + row),
                warmth < GREEDY_BELOW,
            )  # fmt: skip
            picked = draw(x, want, chunk_top, chunk_mass, list_of, CHUNKS, CHUNKS_POW, TILE)
        lane = tl.arange(0, CHUNKS_POW)
        total = log_sum(chunk_raw, chunk_raw_mass, row, lane, CHUNKS)
        own = raw_of(logits + row * VOCAB, picked, picked < VOCAB)
        tl.store(token + row, picked)
        tl.store(logprob + row, logprob_of(own, total))
        tl.store(rank + row, rank_of(logits, row, own, list_of, chunk_raw, lane, VOCAB, CHUNKS, TILE))
        if slot > 0:
            tl.store(last + slot, picked)
            tl.atomic_add(counts + slot * VOCAB + picked, 1)
