"""A depthwise causal convolution along the tokens of each row, whose last inputs are kept in slots.

The results of a launch are computed before its states are stored, which a second kernel does; where each row has one
token, one kernel does both. A thread reads and writes the same channels, so that a slot can be moved in itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels.attention_metadata import ItemRows, LaunchRows

CHANNELS, TOKENS = 256, 16
"""Channels and tokens of a program."""


@triton.jit
def conv_kernel(
    x, weight, bias, state, out, row_start, source, begins, count, token_row, tokens, X_ROW,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * T + tl.arange(0, T)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    row = tl.load(token_row + token, mask=token < tokens, other=0)
    place = token - tl.load(row_start + row)
    real = (token < tokens) & (place < tl.load(count + row))
    old = tl.load(source + row) * (TAPS - 1)
    goes_on = real & (tl.load(begins + row) == 0)
    inside = (channel < WIDTH)[None, :]
    total = tl.zeros([T, C], tl.float32)
    for tap in tl.static_range(TAPS):
        lag = TAPS - 1 - tap
        own, kept = real & (place >= lag), goes_on & (place < lag)
        at = x + (token - lag).to(tl.int64)[:, None] * X_ROW + channel[None, :]
        value = tl.load(at, mask=own[:, None] & inside, other=0.0).to(tl.float32)
        if tap < TAPS - 1:
            at = state + (old + TAPS - 1 + place - lag)[:, None] * WIDTH + channel[None, :]
            value += tl.load(at, mask=kept[:, None] & inside, other=0.0).to(tl.float32)
        total += value * tl.load(weight + channel * TAPS + tap, mask=channel < WIDTH, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    total = tl.where(real[:, None], total, 0.0)
    at = out + token.to(tl.int64)[:, None] * WIDTH + channel[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & inside)


@triton.jit
def conv_state_kernel(
    x, state, row_start, slot, source, begins, count, X_ROW, WIDTH: tl.constexpr, KEPT: tl.constexpr, C: tl.constexpr
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    many = tl.load(count + row)
    if many > 0:
        inside = channel < WIDTH
        kept = WIDTH * (1 - tl.load(begins + row))
        first = x + tl.load(row_start + row).to(tl.int64) * X_ROW + channel
        old = state + tl.load(source + row) * KEPT * WIDTH + channel
        new = state + tl.load(slot + row) * KEPT * WIDTH + channel
        for i in tl.static_range(KEPT):
            place = many + i - KEPT
            if place >= 0:
                value = tl.load(first + place * X_ROW, mask=inside, other=0.0)
            else:
                value = tl.load(old + (many + i) * WIDTH, mask=channel < kept, other=0.0)
            tl.store(new + i * WIDTH, value, mask=inside)


@triton.jit
def conv_step_kernel(
    x, weight, bias, state, out, slot, source, begins, count, X_ROW,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside, real = channel < WIDTH, channel < WIDTH * tl.load(count + row)
    kept = channel < WIDTH * tl.load(count + row) * (1 - tl.load(begins + row))
    old = state + tl.load(source + row) * (TAPS - 1) * WIDTH + channel
    new = state + tl.load(slot + row) * (TAPS - 1) * WIDTH + channel
    total = tl.zeros([C], tl.float32)
    for tap in tl.static_range(TAPS):
        if tap < TAPS - 1:
            value = tl.load(old + tap * WIDTH, mask=kept, other=0.0)
        else:
            value = tl.load(x + row.to(tl.int64) * X_ROW + channel, mask=real, other=0.0)
        factor = tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * factor
        if tap:
            tl.store(new + (tap - 1) * WIDTH, value, mask=real)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    total = tl.where(real, total, 0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + channel, total.to(out.dtype.element_ty), mask=inside)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str) -> None:
    """Asserts: x [n, C] with adjacent channels, weight [C, K], state [slots, K - 1, C], contiguous and of one dtype."""
    channels, taps = weight.shape
    assert x.shape[1] == channels and x.stride(1) == 1 and taps >= 2 and activation in ("silu", ""), activation
    assert state.shape[1:] == (taps - 1, channels) and state.is_contiguous() and weight.is_contiguous()
    assert x.dtype == weight.dtype == state.dtype and (bias is None or bias.dtype == x.dtype)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: LaunchRows, activation: str, out: Tensor
) -> None:
    """Computes ``RecurrentOps.causal_conv`` into ``out`` [n, C]; padding gives zeros."""
    check(x, weight, bias, state, activation)
    (n, width), taps = out.shape, weight.shape[1]
    if not n:
        return
    block = min(triton.next_power_of_2(width), CHANNELS)
    blocks = triton.cdiv(width, block)
    held = weight if bias is None else bias
    options = {"WIDTH": width, "TAPS": taps, "BIAS": bias is not None, "SILU": activation == "silu", "C": block}
    if not isinstance(rows, ItemRows):
        conv_step_kernel[(n, blocks)](
            x, weight, held, state, out, rows.slot, rows.source, rows.begins, rows.count, x.stride(0), **options,
            num_warps=4,
        )  # fmt: skip
        return
    conv_kernel[(triton.cdiv(n, TOKENS), blocks)](
        x, weight, held, state, out, rows.row_start, rows.source, rows.begins, rows.count, rows.token_row, n,
        x.stride(0), **options, T=TOKENS, num_warps=8,
    )  # fmt: skip
    conv_state_kernel[(len(rows.count), blocks)](
        x, state, rows.row_start, rows.slot, rows.source, rows.begins, rows.count, x.stride(0), WIDTH=width,
        KEPT=taps - 1, C=block, num_warps=4,
    )  # fmt: skip
