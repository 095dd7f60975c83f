"""The gated delta rule: chunks of 64 tokens by products in float32, single tokens by the formula; states in place.

``squares_kernel`` computes what does not depend on the state, for all chunks at once: the inverse of each chunk's
triangular system, row by row, and the products of queries and keys. ``scan_kernel`` goes through the chunks of a row
with a few columns of a head's state, which stay in the L2 cache. ``step_kernel`` computes rows of one token, and the
last token of a row that would be alone in its chunk.

A state space is the same without the triangular system: keys and queries stay as they are, and what the state holds
already is not subtracted (``DELTA`` False).

Operands of products are read in pieces of 16 columns: a product of float32 holds all columns of its operands in
registers. What a program stores and reads again is separated by barriers, since other threads read it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels.attention_metadata import CHUNK, ItemRows, LaunchRows

PIECE = 16
MOST_BYTES = 64 << 20
"""Bytes of working memory, from which on a launch computes some heads after the others."""

SIZES = range(16, 257, 16)
"""Supported values of a head."""


@triton.jit
def step_kernel(
    q, k, v, g, beta, state, out, row_start, slot, source, begins, count, Q_ROW, K_ROW, V_ROW, G_ROW, BETA_ROW, scale,
    SINGLE: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, EPS: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    many = tl.load(count + row)
    column = tl.program_id(0) * V + tl.arange(0, V)
    if SINGLE:
        token = row.to(tl.int64)
        computed = many > 0
        if many == 0:  # padding
            tl.store(out + (token * heads + head) * DV + column, tl.zeros([V], out.dtype.element_ty))
    else:
        token = (tl.load(row_start + row) + many - 1).to(tl.int64)
        computed = many % CHUNK == 1
    if computed:
        lane = tl.arange(0, K)
        inside = lane < DK
        query = tl.load(q + token * Q_ROW + head // RATIO * DK + lane, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(k + token * K_ROW + head // RATIO * DK + lane, mask=inside, other=0.0).to(tl.float32)
        if DELTA:
            query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + EPS))
            key = key / tl.sqrt(tl.sum(key * key, 0) + EPS)
        value = tl.load(v + token * V_ROW + head * DV + column).to(tl.float32)
        share = tl.load(beta + token * BETA_ROW + head)
        fade = tl.exp(tl.load(g + token * G_ROW + head))
        own = tl.load(slot + row)
        begin, kept = own, DK  # values of a column that are read
        if many == 1:
            begin, kept = tl.load(source + row), DK * (1 - tl.load(begins + row))
        at = lane[:, None] * DV + column[None, :]
        held = tl.load(state + (begin * heads + head) * DK * DV + at, mask=lane[:, None] < kept, other=0.0) * fade
        if DELTA:
            value -= tl.sum(held * key[:, None], 0)
        change = share * value
        held += key[:, None] * change[None, :]
        tl.store(state + (own * heads + head) * DK * DV + at, held, mask=inside[:, None])
        result = tl.sum(held * query[:, None], 0)
        tl.store(out + (token * heads + head) * DV + column, result.to(out.dtype.element_ty))


@triton.jit
def squares_kernel(
    q, k, g, beta, squares, facts, row_start, count, row_chunk, chunk_row, Q_ROW, K_ROW, G_ROW, BETA_ROW, scale, first,
    RATIO: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr, EPS: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    chunk, place = tl.program_id(0), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    head = first + tl.program_id(1)
    row = tl.load(chunk_row + chunk)
    if row >= 0:
        many = tl.load(count + row)
        done = (chunk - tl.load(row_chunk + row)) * C
        left = many - (many % C == 1).to(tl.int32) - done
        lane = tl.arange(0, C)
        token = (tl.load(row_start + row) + done + lane).to(tl.int64)
        real = lane < left
        part = tl.arange(0, PIECE)
        keys, queries = k + head // RATIO * DK + token * K_ROW, q + head // RATIO * DK + token * Q_ROW
        system, own = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        k_squares, q_squares = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        for d in range(0, DK, PIECE):
            query = tl.load(queries[:, None] + d + part[None, :], mask=real[:, None], other=0.0).to(tl.float32)
            across = tl.load(keys[None, :] + d + part[:, None], mask=real[None, :], other=0.0).to(tl.float32)
            own += tl.dot(query, across, input_precision="ieee")
            if DELTA:
                key = tl.load(keys[:, None] + d + part[None, :], mask=real[:, None], other=0.0).to(tl.float32)
                k_squares += tl.sum(key * key, 1)
                q_squares += tl.sum(query * query, 1)
                system += tl.dot(key, across, input_precision="ieee")
        k_norm, q_norm = tl.zeros([C], tl.float32) + 1.0, tl.zeros([C], tl.float32) + 1.0
        if DELTA:
            k_norm, q_norm = 1.0 / tl.sqrt(k_squares + EPS), scale / tl.sqrt(q_squares + EPS)
        share = tl.load(beta + token * BETA_ROW + head, mask=real, other=0.0)
        total = tl.cumsum(tl.load(g + token * G_ROW + head, mask=real, other=0.0), 0)
        known = facts + place.to(tl.int64) * 4 * C
        tl.store(known + lane, total)
        tl.store(known + C + lane, k_norm)
        tl.store(known + 2 * C + lane, q_norm)
        tl.store(known + 3 * C + lane, share)
        below = lane[:, None] >= lane[None, :]
        apart = tl.exp(tl.where(below, total[:, None] - total[None, :], float("-inf"))) * k_norm[None, :]
        system = tl.where(lane[:, None] > lane[None, :], -system * apart * (k_norm * share)[:, None], 0.0)
        at = lane[:, None] * C + lane[None, :]
        inverse_at = squares + place.to(tl.int64) * 2 * C * C
        tl.store(inverse_at + C * C + at, tl.where(below, own * apart * q_norm[:, None], 0.0))
        if DELTA:
            tl.store(inverse_at + at, system)
            tl.debug_barrier()
            inverse = tl.where(lane[:, None] == lane[None, :], 1.0, 0.0)
            for i in range(1, tl.minimum(left, C)):
                factors = tl.load(inverse_at + i * C + lane)
                found = tl.sum(factors[:, None] * inverse, 0)
                inverse += tl.where(lane[:, None] == i, found[None, :], 0.0)
            tl.debug_barrier()
            tl.store(inverse_at + at, inverse)


@triton.jit
def scan_kernel(
    q, k, v, state, out, squares, facts, changes, row_start, slot, source, begins, count, row_chunk, Q_ROW, K_ROW,
    V_ROW, first, heads, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PIECE: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2), first + tl.program_id(1)
    column, lane, part = tl.program_id(0) * V + tl.arange(0, V), tl.arange(0, C), tl.arange(0, PIECE)
    many = tl.load(count + row)
    many = many - (many % C == 1).to(tl.int32)
    held = state + (tl.load(slot + row) * heads + head) * DK * DV + column[None, :]
    if many > 0:
        old = state + (tl.load(source + row) * heads + head) * DK * DV + column[None, :]
        kept = DK * (1 - tl.load(begins + row))
        for d in range(0, DK, PIECE):
            at = (d + part)[:, None] * DV
            tl.store(held + at, tl.load(old + at, mask=(d + part)[:, None] < kept, other=0.0))
        tl.debug_barrier()
        start, group = tl.load(row_start + row), head // RATIO * DK
        for c in range(0, tl.cdiv(many, C)):
            place = ((tl.load(row_chunk + row) + c) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
            token = (start + c * C + lane).to(tl.int64)
            real = lane < many - c * C
            known, inverse = facts + place * 4 * C, squares + place * 2 * C * C
            change_at = changes + place * C * DV + column[None, :]
            grown = tl.exp(tl.load(known + lane))
            by_key, by_query = tl.zeros([C, V], tl.float32), tl.zeros([C, V], tl.float32)
            for d in range(0, DK, PIECE):
                some = tl.load(held + (d + part)[:, None] * DV)
                at = (group + d + part)[None, :]
                query = tl.load(q + token[:, None] * Q_ROW + at, mask=real[:, None], other=0.0).to(tl.float32)
                if DELTA:
                    key = tl.load(k + token[:, None] * K_ROW + at, mask=real[:, None], other=0.0).to(tl.float32)
                    by_key += tl.dot(key, some, input_precision="ieee")
                by_query += tl.dot(query, some, input_precision="ieee")
            values = v + token[:, None] * V_ROW + head * DV + column[None, :]
            value = tl.load(values, mask=real[:, None], other=0.0).to(tl.float32)
            wanted = value - by_key * (grown * tl.load(known + C + lane))[:, None]
            tl.store(change_at + lane[:, None] * DV, wanted * tl.load(known + 3 * C + lane)[:, None])
            tl.debug_barrier()
            if DELTA:
                change = tl.zeros([C, V], tl.float32)
                for j in range(0, C, PIECE):
                    some = tl.load(change_at + (j + part)[:, None] * DV)
                    factor = tl.load(inverse + lane[:, None] * C + (j + part)[None, :])
                    change += tl.dot(factor, some, input_precision="ieee")
                tl.debug_barrier()
                tl.store(change_at + lane[:, None] * DV, change)
                tl.debug_barrier()
            result = by_query * (grown * tl.load(known + 2 * C + lane))[:, None]
            for j in range(0, C, PIECE):
                some = tl.load(change_at + (j + part)[:, None] * DV)
                factor = tl.load(inverse + C * C + lane[:, None] * C + (j + part)[None, :])
                result += tl.dot(factor, some, input_precision="ieee")
            results = out + (token[:, None] * heads + head) * DV + column[None, :]
            tl.store(results, result.to(out.dtype.element_ty), mask=real[:, None])
            end = tl.load(known + C - 1)
            for d in range(0, DK, PIECE):
                new = tl.load(held + (d + part)[:, None] * DV) * tl.exp(end)
                for j in range(0, C, PIECE):
                    later = (start + c * C + j + part).to(tl.int64)
                    across = k + later[None, :] * K_ROW + (group + d + part)[:, None]
                    inner = tl.load(across, mask=(j + part < many - c * C)[None, :], other=0.0).to(tl.float32)
                    left = tl.exp(end - tl.load(known + j + part)) * tl.load(known + C + j + part)
                    piece = tl.load(change_at + (j + part)[:, None] * DV)
                    new += tl.dot(inner * left[None, :], piece, input_precision="ieee")
                tl.store(held + (d + part)[:, None] * DV, new)
            tl.debug_barrier()


def is_supported(dk: int, dv: int) -> bool:
    """Returns True if the kernels take heads of these sizes."""
    return dk in SIZES and dv in SIZES


def check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    """Asserts what ``RecurrentOps.delta_rule`` says, and that the values of a token lie side by side."""
    (n, groups, dk), (_, heads, dv) = k.shape, v.shape
    assert q.shape == k.shape and heads % groups == 0 and q.dtype == k.dtype == v.dtype, (q.shape, k.shape, v.shape)
    assert all(t.stride()[1:] == (t.shape[2], 1) for t in (q, k, v)) and is_supported(dk, dv)
    assert g.shape == beta.shape == (n, heads) and g.stride(1) == beta.stride(1) == 1
    assert state.shape[1:] == (heads, dk, dv) and state.is_contiguous() and state.dtype == torch.float32


def launch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: LaunchRows, out: Tensor, eps: float,
    delta: bool = True,
) -> None:  # fmt: skip
    """Computes ``RecurrentOps.delta_rule`` into ``out`` [n, Hv, Dv], or ``state_space`` without ``delta``.

    With ``ItemRows``, ``out`` has zeros where the launch has padding, which is not written.
    """
    check(q, k, v, g, beta, state)
    (n, heads, dv), (groups, dk) = v.shape, k.shape[1:]
    if not n:
        return
    columns = 32 if dv % 32 == 0 else 16
    strides, scale = [t.stride(0) for t in (q, k, v, g, beta)], dk**-0.5
    ragged = isinstance(rows, ItemRows)
    if isinstance(rows, ItemRows) and len(rows.chunk_row):
        _launch_chunks(q, k, v, g, beta, state, rows, out, eps, delta)
    start = rows.row_start if isinstance(rows, ItemRows) else rows.count
    step_kernel[(dv // columns, heads, len(rows.count) if ragged else n)](
        q, k, v, g, beta, state, out, start, rows.slot, rows.source, rows.begins, rows.count, *strides, scale,
        SINGLE=not ragged, RATIO=heads // groups, DK=dk, DV=dv, K=triton.next_power_of_2(dk), V=columns, CHUNK=CHUNK,
        EPS=eps, DELTA=delta, num_warps=8,
    )  # fmt: skip


def heads_at_once(chunks: int, dv: int) -> int:
    """Returns how many heads a launch computes at a time."""
    return max(MOST_BYTES // (max(chunks, 1) * _head_bytes(dv)), 1)


def _head_bytes(dv: int) -> int:
    return 4 * CHUNK * (2 * CHUNK + 4 + dv)


def _launch_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: ItemRows, out: Tensor, eps: float,
    delta: bool,
) -> None:  # fmt: skip
    (_, heads, dv), (groups, dk) = v.shape, k.shape[1:]
    chunks, columns = len(rows.chunk_row), 32 if dv % 32 == 0 else 16
    some = min(heads, heads_at_once(chunks, dv))
    squares = torch.empty((chunks, some, 2, CHUNK, CHUNK), dtype=torch.float32, device=v.device)
    facts = torch.empty((chunks, some, 4, CHUNK), dtype=torch.float32, device=v.device)
    changes = torch.empty((chunks, some, CHUNK, dv), dtype=torch.float32, device=v.device)
    for first in range(0, heads, some):
        many = min(some, heads - first)
        squares_kernel[(chunks, many)](
            q, k, g, beta, squares, facts, rows.row_start, rows.count, rows.row_chunk, rows.chunk_row, q.stride(0),
            k.stride(0), g.stride(0), beta.stride(0), dk**-0.5, first, RATIO=heads // groups, DK=dk, C=CHUNK,
            PIECE=PIECE, EPS=eps, DELTA=delta, num_warps=8,
        )  # fmt: skip
        scan_kernel[(dv // columns, many, len(rows.count))](
            q, k, v, state, out, squares, facts, changes, rows.row_start, rows.slot, rows.source, rows.begins,
            rows.count, rows.row_chunk, q.stride(0), k.stride(0), v.stride(0), first, heads, RATIO=heads // groups,
            DK=dk, DV=dv, V=columns, C=CHUNK, PIECE=PIECE, DELTA=delta, num_warps=4,
            num_stages=2 if columns == 32 else 1,  # with two, 16 columns spill on sm_120
        )  # fmt: skip
