"""A layer of gated DeltaNet between its projections, for rows of one token each: two launches.

The first one is the convolution (``causal_conv``). ``net_kernel`` makes decay and beta of the raw gates, does one step
of the delta rule, and norms and gates the result, so that a program holds the whole state of a head: other operations
would be a dozen small launches between which a card waits longer than it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import causal_conv
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.model_and_ops_api import DeltaNetWeights, RecurrentState

SIZES = (16, 32, 64, 128)
"""Values of a head that a program holds in registers."""


@triton.jit
def _softplus(x):
    """Returns log(1 + exp(x)), also where exp(x) is lost in the sum."""
    grown = tl.exp(tl.minimum(x, 20.0))
    small = grown * (1.0 - 0.5 * grown)
    return tl.where(x > 20.0, x, tl.where(x < -8.0, small, tl.log(1.0 + grown)))


@triton.jit(do_not_specialize=["eps"])
def net_kernel(
    mixed, gates, state, out, decay, shift, norm, slot, source, begins, count, MIXED_ROW, GATES_ROW, eps, scale,
    RATIO: tl.constexpr, KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    head, heads, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    token = row.to(tl.int64)
    lane, column = tl.arange(0, DK), tl.arange(0, DV)
    results = out + (token * heads + head) * DV + column
    if tl.load(count + row) == 0:  # padding
        tl.store(results, tl.zeros([DV], out.dtype.element_ty))
    else:
        own = mixed + token * MIXED_ROW
        query = tl.load(own + head // RATIO * DK + lane).to(tl.float32)
        key = tl.load(own + KEYS + head // RATIO * DK + lane).to(tl.float32)
        value = tl.load(own + 2 * KEYS + head * DV + column).to(tl.float32)
        query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + EPS))
        key = key / tl.sqrt(tl.sum(key * key, 0) + EPS)
        gate = gates + token * GATES_ROW
        share = 1.0 / (1.0 + tl.exp(-tl.load(gate + heads * DV + head).to(tl.float32)))
        grown = tl.load(gate + heads * DV + heads + head).to(tl.float32) + tl.load(shift + head)
        fade = tl.exp(tl.load(decay + head) * _softplus(grown))
        kept = DK * (1 - tl.load(begins + row))
        at = lane[:, None] * DV + column[None, :]
        old = state + (tl.load(source + row) * heads + head) * DK * DV + at
        held = tl.load(old, mask=lane[:, None] < kept, other=0.0) * fade
        change = share * (value - tl.sum(held * key[:, None], 0))
        held += key[:, None] * change[None, :]
        tl.store(state + (tl.load(slot + row) * heads + head) * DK * DV + at, held)
        result = tl.sum(held * query[:, None], 0).to(out.dtype.element_ty).to(tl.float32)
        factor = tl.rsqrt(tl.sum(result * result, 0) / DV + eps)
        normed = (result * factor * tl.load(norm + column).to(tl.float32)).to(out.dtype.element_ty).to(tl.float32)
        z = tl.load(gate + head * DV + column).to(tl.float32)
        tl.store(results, (normed * (z / (1.0 + tl.exp(-z)))).to(out.dtype.element_ty))


def fits(w: DeltaNetWeights, held: RecurrentState, rows: object) -> bool:
    """Returns True if the kernels take a layer of these weights, and rows of one token each."""
    state = held.state
    return state is not None and isinstance(rows, RecurrentRows) and state.shape[2] in SIZES and state.shape[3] in SIZES


def run(x: Tensor, gates: Tensor, w: DeltaNetWeights, held: RecurrentState, rows: RecurrentRows, eps: float) -> Tensor:
    """Computes ``FusedDeltaOps.delta_net`` of a launch that ``fits``, [n, channels] -> [n, H * Dv].

    Args:
        eps: added to the sum of squares of queries and keys.
    """
    state, n = held.state, len(x)
    assert state is not None and state.is_contiguous() and state.dtype == torch.float32 and gates.stride(1) == 1
    heads, dk, dv = state.shape[1:]
    assert gates.shape == (n, heads * (dv + 2)) and x.shape[1] == 2 * w.key_heads * dk + heads * dv, gates.shape
    assert w.norm.shape == (dv,) and w.decay.shape == w.shift.shape == (heads,) and heads % w.key_heads == 0
    mixed, out = x.new_empty(x.shape), x.new_empty(n, heads * dv)
    causal_conv.launch(x, w.conv, None, held.conv, rows, "silu", mixed)
    if n:
        net_kernel[(heads, n)](
            mixed, gates, state, out, w.decay, w.shift, w.norm, rows.slot, rows.source, rows.begins, rows.count,
            mixed.stride(0), gates.stride(0), w.eps, dk**-0.5, RATIO=heads // w.key_heads, KEYS=w.key_heads * dk, DK=dk,
            DV=dv, EPS=eps, num_warps=8 if dk * dv > 64 * 64 else 4,
        )  # fmt: skip
    return out
