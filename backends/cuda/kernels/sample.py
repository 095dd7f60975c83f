"""Sampling in three variants: the argmax; a draw; a draw with log-probabilities, rank and the 20 best ids.

A draw is one pass over the logits by many programs, and one program per row that picks the token from their summaries
of each 128 ids. Log-probabilities take a third launch of several programs per row, which skip rows that need none. No
host read, no atomics on floats, fixed shapes. backends/cpu/sampler.py defines the parameters. Each row writes the state
of its own slot, which no other row of the launch may use; slot 0 is the sink and is never written. One launch resets
whole slots: counts, seen bits and bias pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels.sample_chunk_summaries import (
    GREEDY_BELOW,
    count_better,
    find_best_ids,
    greedy_parts_kernel,
    greedy_pick_kernel,
    inverse_of,
    log_sum,
    logprob_of,
    parts_kernel,
)
from trencadis.backends.cuda.kernels.sample_draw import DrawParams, draw
from trencadis.backends.cuda.kernels.sample_scores import CHUNK, HeadRow, pairs_of, raw_of
from trencadis.core import request
from trencadis.core.device.backend import HeadTensors, HeadTensorsOut, ResetTensors, SamplerState
from trencadis.core.request import MAX_LOGPROBS

RESET_BLOCK = 4096
"""Ids of a slot that a program resets."""

SHARE, PARTS_WARPS = 16, 8
"""Chunks per program of the first kernel, and its warps."""

TILE, DRAW_WARPS, DRAW_REGISTERS = 8, 16, 64
"""Listed chunks that a row's program reads at a time, its warps, and the registers of a thread.

With more registers a processor would hold one program, and half of a launch of 256 rows would wait.
"""

RANKERS, RANK_TILE, TOLD_WARPS = 4, 8, 8
"""Programs that count the ids above a row's token, chunks that one reads at a time, and warps."""

UNTOLD: tl.constexpr = tl.constexpr(request.NO_LOGPROB)
"""``HeadTensors.target`` of a row that is drawn and needs no log-probabilities."""

GREEDY_TILE = 4096
TOP = MAX_LOGPROBS


class HeadScratch(NamedTuple):
    """Results of the first kernel for the others, which read only what the same launch wrote."""

    chunk_raw: Tensor  # float32 [rows, chunks] largest raw logit
    chunk_raw_mass: Tensor  # float32 [rows, chunks]
    chunk_top: Tensor  # float32 [rows, chunks] largest score
    chunk_mass: Tensor  # float32 [rows, chunks]
    listed: Tensor  # int32 [rows, chunks]


def scratch(rows: int, vocab: int, device: torch.device, with_logprobs: bool = True) -> HeadScratch:
    """Allocates uninitialised memory for a launch that draws; any launch of as many rows may reuse it.

    ``with_logprobs``: with log-probabilities; other launches never use the first two tensors.
    """
    shape = rows, triton.cdiv(vocab, CHUNK.value)
    real = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(4 if with_logprobs else 2)]
    return HeadScratch._make([*real[:2], *real[-2:], torch.empty(shape, dtype=torch.int32, device=device)])


def greedy_scratch(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocates (largest logit float32, its id int32) of each share, [rows, shares] each, for the greedy variant."""
    shape = rows, triton.cdiv(vocab, _greedy_tile(vocab))
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def outputs(rows: int, vocab: int, device: torch.device, full: bool) -> HeadTensorsOut:
    """Allocates uninitialised outputs of either variant."""

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
    """Asserts: logits [rows, vocabulary], contiguous; ``device.backend`` gives the shapes of ``head`` and ``state``."""
    rows, vocab = logits.shape
    assert logits.is_contiguous() and logits.is_floating_point() and vocab < 1 << 26
    for name in ("hidden_row", "slot", "target", "mask_row"):
        assert getattr(head, name).dtype == torch.int64 and getattr(head, name).shape == (rows,), name
    for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition", "uniform"):
        assert getattr(head, name).dtype == torch.float32 and getattr(head, name).shape == (rows,), name
    assert head.top_k.dtype == torch.int32 and head.masks.shape[1] == state.prompt_mask.shape[1] == triton.cdiv(
        vocab, 8
    )
    assert state.counts.shape[1] == vocab and state.counts.dtype == state.last.dtype == torch.int32
    assert state.bias_id.shape == state.bias_value.shape and state.bias_id.dtype == torch.int64
    assert head.ahead is None, "sample_chains copies states of rows with drafts before them"
    for t in (*head[:-2], *state):
        assert t.is_contiguous()


def pick_greedy(
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


def draw_tokens(
    logits: Tensor, head: HeadTensors, state: SamplerState, scratch: HeadScratch, out: HeadTensorsOut
) -> None:
    """Draws from each row of logits [rows, vocabulary] with masks, penalties and filters into ``out.token``."""
    check(logits, head, state)
    if len(logits):
        _draw(logits, head, state, scratch, out, False)


def draw_with_logprobs(
    logits: Tensor, head: HeadTensors, state: SamplerState, scratch: HeadScratch, out: HeadTensorsOut
) -> None:
    """Runs ``draw_tokens``, and adds log-probabilities, ranks and best ids for rows whose target is not ``UNTOLD``."""
    check(logits, head, state)
    rows, vocab = logits.shape
    if not rows:
        return
    assert out.rank is not None and out.top_id is not None and out.top_logprob is not None
    _draw(logits, head, state, scratch, out, True)
    chunks = scratch.listed.shape[1]
    told_kernel[(rows, 1 + RANKERS)](
        logits, head.target, out.token, scratch.chunk_raw, scratch.chunk_raw_mass, out.rank, out.top_id,
        out.top_logprob, VOCAB=vocab, CHUNKS=chunks, CHUNKS_POW=triton.next_power_of_2(chunks),
        SHARE=triton.cdiv(chunks, RANKERS), TILE=min(RANK_TILE, triton.next_power_of_2(chunks)),
        TOP=out.top_id.shape[1], TOP_POW=triton.next_power_of_2(out.top_id.shape[1]), num_warps=TOLD_WARPS,
    )  # fmt: skip


def _draw(
    logits: Tensor,
    head: HeadTensors,
    state: SamplerState,
    scratch: HeadScratch,
    out: HeadTensorsOut,
    with_logprobs: bool,
) -> None:
    rows, vocab = logits.shape
    chunks = scratch.listed.shape[1]
    share = min(SHARE, triton.next_power_of_2(chunks))
    sizes = {
        "VOCAB": vocab, "BYTES": state.prompt_mask.shape[1], "PAIRS": state.bias_id.shape[1],
        "PAIRS_POW": triton.next_power_of_2(state.bias_id.shape[1]), "CHUNKS": chunks, "TOLD": with_logprobs,
    }  # fmt: skip
    stored = state.counts, state.prompt_mask, state.bias_id, state.bias_value, head.masks
    parts_kernel[(triton.cdiv(chunks, share), rows)](
        logits, head.slot, head.temperature, head.mask_row, head.repetition, head.frequency, head.presence, *stored,
        *scratch[:-1], **sizes, SHARE=share, num_warps=PARTS_WARPS,
    )  # fmt: skip
    real = out.logprob if out.logprob is not None else scratch.chunk_top  # never written without log-probabilities
    draw_kernel[(rows,)](
        logits, head.slot, head.temperature, head.top_k, head.top_p, head.min_p, head.uniform, head.target,
        head.mask_row, head.repetition, head.frequency, head.presence, *stored, state.last, *scratch,
        out.token, real, out.token if out.rank is None else out.rank,
        **sizes, CHUNKS_POW=triton.next_power_of_2(chunks), TILE=min(TILE, triton.next_power_of_2(chunks)),
        num_warps=DRAW_WARPS, maxnreg=DRAW_REGISTERS,
    )  # fmt: skip


def _greedy_tile(vocab: int) -> int:
    return min(GREEDY_TILE, max(triton.next_power_of_2(vocab), 16))


@triton.jit
def draw_kernel(
    logits, slots, temperature, top_k, top_p, min_p, uniform, target, mask_rows, repetition, frequency, presence,
    counts, seen, bias_id, bias_value, masks, last, chunk_raw, chunk_raw_mass, chunk_top, chunk_mass, index,
    token, logprob, rank,
    VOCAB: tl.constexpr, BYTES: tl.constexpr, PAIRS: tl.constexpr, PAIRS_POW: tl.constexpr, CHUNKS: tl.constexpr,
    TOLD: tl.constexpr, CHUNKS_POW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Picks a row's token. Its rank starts at 1; the next launch adds the number of ids above it."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    warmth = tl.load(temperature + row)
    given = tl.load(target + row).to(tl.int32)
    picked = given
    if given < 0:
        x = HeadRow(
            logits, row, slot, tl.load(mask_rows + row), inverse_of(warmth),
            pairs_of(bias_value, slot, PAIRS, PAIRS_POW), repetition, frequency, presence,
            counts, seen, bias_id, bias_value, masks, VOCAB, BYTES, PAIRS,
        )  # fmt: skip
        want = DrawParams(
            tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row), tl.load(uniform + row),
            warmth < GREEDY_BELOW,
        )  # fmt: skip
        picked = draw(x, want, chunk_top, chunk_mass, index + row * CHUNKS, CHUNKS, CHUNKS_POW, TILE)
    tl.store(token + row, picked)
    if TOLD:  # noqa: SIM102  Triton decides this as it compiles
        if given != UNTOLD:
            total = log_sum(chunk_raw, chunk_raw_mass, row, tl.arange(0, CHUNKS_POW), CHUNKS)
            own = raw_of(logits + row * VOCAB, picked, picked < VOCAB)
            tl.store(logprob + row, logprob_of(own, total))
            tl.store(rank + row, 1)
    if slot > 0:
        tl.store(last + slot, picked)
        tl.atomic_add(counts + slot * VOCAB + picked, 1)


@triton.jit
def told_kernel(
    logits, target, token, chunk_raw, chunk_raw_mass, rank, top_id, top_logprob,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_POW: tl.constexpr, SHARE: tl.constexpr, TILE: tl.constexpr,
    TOP: tl.constexpr, TOP_POW: tl.constexpr,
):  # fmt: skip
    """Lists the best ids (program (row, 0)); each other program counts ids above the row's token in SHARE chunks."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if tl.load(target + row) != UNTOLD:
        if part == 0:
            find_best_ids(
                logits, row, chunk_raw, chunk_raw_mass, top_id, top_logprob,
                VOCAB, CHUNKS, CHUNKS_POW, TOP, TOP_POW,
            )  # fmt: skip
        else:
            picked = tl.load(token + row)
            own = raw_of(logits + row * VOCAB, picked, picked < VOCAB)
            above = count_better(logits, row, own, chunk_raw, (part - 1) * SHARE, VOCAB, CHUNKS, SHARE, TILE)
            tl.atomic_add(rank + row, above)


@triton.jit
def _reset(
    slots, counts, seen, bias_id, bias_value, to_counts, to_seen, to_bias_id, to_bias_value,
    VOCAB: tl.constexpr, BYTES: tl.constexpr, PAIRS: tl.constexpr, PAIRS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slots + row)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCAB
    tl.store(to_counts + slot * VOCAB + at, tl.load(counts + row * VOCAB + at, mask=inside, other=0), mask=inside)
    byte = tile * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    some = byte < BYTES
    tl.store(to_seen + slot * BYTES + byte, tl.load(seen + row * BYTES + byte, mask=some, other=0), mask=some)
    if tile == 0:
        pair = tl.arange(0, PAIRS_BLOCK)
        real = pair < PAIRS
        ids = tl.load(bias_id + row * PAIRS + pair, mask=real, other=0)
        values = tl.load(bias_value + row * PAIRS + pair, mask=real, other=0.0)
        tl.store(to_bias_id + slot * PAIRS + pair, ids, mask=real)
        tl.store(to_bias_value + slot * PAIRS + pair, values, mask=real)


def check_reset(reset: ResetTensors, state: SamplerState) -> None:
    """Asserts: each array of ``reset`` is [r, width], its target [slots + 1, width] of the same dtype; all
    contiguous.
    """
    assert reset.slot.dtype == torch.int64 and reset.slot.is_contiguous()
    for name in ("counts", "prompt_mask", "bias_id", "bias_value"):
        part, whole = getattr(reset, name), getattr(state, name)
        assert part.shape == (len(reset.slot), whole.shape[1]) and part.dtype == whole.dtype, name
        assert part.is_contiguous() and whole.is_contiguous(), name


def reset_slots(reset: ResetTensors, state: SamplerState) -> None:
    """Writes each row of ``reset``, built on the host, to its slot of ``state``; padded rows name slot 0, the sink."""
    check_reset(reset, state)
    rows, vocab = reset.counts.shape
    pairs: Tensor = state.bias_id
    if rows:
        _reset[(rows, triton.cdiv(vocab, RESET_BLOCK))](
            reset.slot, reset.counts, reset.prompt_mask, reset.bias_id, reset.bias_value,
            state.counts, state.prompt_mask, state.bias_id, state.bias_value,
            VOCAB=vocab, BYTES=state.prompt_mask.shape[1], PAIRS=pairs.shape[1],
            PAIRS_BLOCK=triton.next_power_of_2(pairs.shape[1]), BLOCK=RESET_BLOCK, num_warps=4,
        )  # fmt: skip
