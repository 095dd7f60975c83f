"""Copies sampler state of whole slots, built on the host: one launch for counts, seen bits and bias pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.core.device.backend import ResetTensors, SamplerState

BLOCK = 4096


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


def check(reset: ResetTensors, state: SamplerState) -> None:
    """Asserts: each array of ``reset`` is [r, width], its target [slots + 1, width] of the same dtype; all
    contiguous.
    """
    assert reset.slot.dtype == torch.int64 and reset.slot.is_contiguous()
    for name in ("counts", "prompt_mask", "bias_id", "bias_value"):
        part, whole = getattr(reset, name), getattr(state, name)
        assert part.shape == (len(reset.slot), whole.shape[1]) and part.dtype == whole.dtype, name
        assert part.is_contiguous() and whole.is_contiguous(), name


def launch(reset: ResetTensors, state: SamplerState) -> None:
    """Writes each row of ``reset`` to its slot of ``state``; padded rows name slot 0, the sink."""
    check(reset, state)
    rows, vocab = reset.counts.shape
    pairs: Tensor = state.bias_id
    if rows:
        _reset[(rows, triton.cdiv(vocab, BLOCK))](
            reset.slot, reset.counts, reset.prompt_mask, reset.bias_id, reset.bias_value,
            state.counts, state.prompt_mask, state.bias_id, state.bias_value,
            VOCAB=vocab, BYTES=state.prompt_mask.shape[1], PAIRS=pairs.shape[1],
            PAIRS_BLOCK=triton.next_power_of_2(pairs.shape[1]), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
