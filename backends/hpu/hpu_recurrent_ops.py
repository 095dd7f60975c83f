"""The recurrent ops on Gaudi: products, selections of rows and static shapes alone.

A launch is R rows of T tokens, padded (FRESH); one row (CONTEXT); or one token of each row (DECODE).

In compile mode a store stays in place only if its graph reads the tensor nowhere else, so layers return their new
states, and a region of its own stores them (``KeptStates``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.cpu.recurrent_ops import CHUNK, EPS, Advance, DeltaInputs, scan_rows, step_rows
from trencadis.core.device.launch_tensors import RecurrentRows

SLAB = 8
"""Chunks whose inverses are computed together: more would need more memory, fewer more operations."""


class StaticRows(NamedTuple):
    """``RecurrentRows`` of R rows with T tokens each, and what all layers of a launch share."""

    slot: Tensor  # int64 [R]
    source: Tensor  # int64 [R]
    fresh: Tensor  # bool [R]: the state counts as zero
    count: Tensor  # type: ignore[assignment]  # int64 [R]
    real: Tensor  # bool [R, T]
    single: Tensor  # bool [R]: the row's last chunk is one token
    pairs: Tensor  # float32 [levels, CHUNK, CHUNK]: see ``invert``; [0] if T is 1
    stores: list[tuple[Tensor, Tensor]] | None = None
    """Collects (tensor of states, new states of the rows), to be stored later; None: stored at once."""


class KeptStates(NamedTuple):
    """Result of a compiled layer, and the states that are stored after it."""

    out: object
    slot: Tensor  # int64 [R]
    new: tuple[Tensor, ...]
    states: tuple[Tensor, ...]


class KeptLayer:
    """A layer that returns its new states with its result."""

    def __init__(self, layer: Callable[..., object]) -> None:
        self.layer = layer

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: StaticRows, attn: object, *adapters: object
    ) -> KeptStates:
        held: list[tuple[Tensor, Tensor]] = []
        out = self.layer(x, residual, rows._replace(stores=held), attn, *adapters)
        return KeptStates(out, rows.slot.clone(), tuple(new for _, new in held), tuple(state for state, _ in held))


def store_states(slot: Tensor, new: tuple[Tensor, ...], states: tuple[Tensor, ...]) -> None:
    """Writes the new states of the rows, [R, ...] each, at their slots."""
    for state, value in zip(states, new, strict=True):
        state.index_copy_(0, slot.long(), value)


def prepare(rows: RecurrentRows, tokens: int) -> StaticRows:
    """Returns the rows of a launch of ``tokens`` tokens; the last entry, which owns no token here, is left out."""
    many = len(rows.count) - 1
    width, count = tokens // many, rows.count[:many].long()
    place = torch.arange(width, device=count.device)
    at = torch.arange(CHUNK, device=count.device)
    pairs = []
    size = 1
    while size < CHUNK and width > 1:
        half = at // size
        pairs.append(((half[:, None] % 2 == 1) & (half[:, None] == half + 1)).float())
        size *= 2
    return StaticRows(
        rows.slot[:many].clone(),
        rows.source[:many].clone(),
        (rows.begins[:many] > 0) | (count == 0),
        count,
        place < count[:, None],
        count % CHUNK == 1,
        torch.stack(pairs).clone() if pairs else torch.zeros(0, device=count.device),
    )


def read_state(state: Tensor, rows: StaticRows) -> Tensor:
    """Returns a copy of each row's state, [R, ...]."""
    found = state.index_select(0, rows.source)
    return torch.where(rows.fresh.view(-1, *[1] * (state.dim() - 1)), 0.0, found)


def write_state(state: Tensor, rows: StaticRows, new: Tensor) -> None:
    """Stores each row's state, or has it stored after the layer."""
    if rows.stores is None:
        state.index_copy_(0, rows.slot.long(), new)
    else:
        rows.stores.append((state, new))


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StaticRows, activation: str
) -> Tensor:
    """Computes ``RecurrentOps.causal_conv``."""
    (many, width), (channels, taps) = rows.real.shape, weight.shape
    both = torch.cat([read_state(state, rows), x.view(many, width, channels)], dim=1)
    columns, out = weight.float().t(), torch.zeros((), device=x.device)
    for tap in range(taps):
        out = out + both[:, tap : tap + width].float() * columns[tap]
    out = out if bias is None else out + bias.float()
    out = functional.silu(out) if activation == "silu" else out
    # The last inputs of a row, which start after as many columns as it has tokens.
    line = torch.arange(many, device=x.device)[:, None] * (width + taps - 1)
    last = line + rows.count[:, None] + torch.arange(taps - 1, device=x.device)
    new = both.flatten(0, 1).index_select(0, last.view(-1))
    new = new.view(many, taps - 1, channels)
    write_state(state, rows, new if rows.stores is None else new.clone())  # no view may leave a graph
    return torch.where(rows.real[..., None], out, 0.0).to(x.dtype).view(x.shape)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: StaticRows
) -> Tensor:  # fmt: skip
    """Computes ``RecurrentOps.delta_rule``: decoding rows by the formula, others by chunks."""
    heads = v.shape[1]
    x = DeltaInputs(
        _unit(q, heads, rows) * q.shape[-1] ** -0.5, _unit(k, heads, rows), *_split_values(v, g, beta, rows)
    )
    return _run_rows(x, state, rows, _run_slab, step_rows).to(v.dtype)


def state_space(
    c: Tensor, b: Tensor, x: Tensor, g: Tensor, step: Tensor, state: Tensor, rows: StaticRows
) -> Tensor:  # fmt: skip
    """Computes ``RecurrentOps.state_space``: decoding rows by the formula, others by chunks."""
    many, width = rows.real.shape
    groups, size = b.shape[1:]
    heads = x.shape[1]

    def keys(t: Tensor) -> Tensor:
        wide = torch.where(rows.real[..., None, None], t.reshape(many, width, groups, size).float(), 0.0)
        return wide[:, :, :, None].expand(many, width, groups, heads // groups, size).reshape(many, width, heads, size)

    made = DeltaInputs(keys(c), keys(b), *_split_values(x, g, step, rows))
    return _run_rows(made, state, rows, _scan_slab, scan_rows).to(x.dtype)


Slab = Callable[[DeltaInputs, Tensor, Tensor], tuple[list[Tensor], Tensor]]
"""Computes a few chunks: (inputs, state before them, ``StaticRows.pairs``) -> (results of each, state after them)."""


def _run_rows(x: DeltaInputs, state: Tensor, rows: StaticRows, slab: Slab, step: Advance) -> Tensor:
    """Computes all rows into float32 [R x T, Hv, Dv] and writes their states, or has them written after the layer."""
    many, width = rows.real.shape
    shape, held = (many * width, *x.v.shape[2:]), read_state(state, rows)
    if width == 1:
        out, new = step(DeltaInputs(*(t[:, 0] for t in x)), held)
        write_state(state, rows, new)
        return out.view(shape)
    place = torch.arange(width, device=x.v.device)
    tail = rows.single[:, None] & (place == rows.count[:, None] - 1)
    body = DeltaInputs(*(torch.where(_wide(tail, t), 0.0, t) for t in x))
    out, held = run_chunks(body, held, rows.pairs, slab)
    line = torch.arange(many, device=x.v.device) * width
    last = line + (rows.count - 1).clamp(min=0)
    made, new = step(DeltaInputs(*(t.flatten(0, 1).index_select(0, last) for t in x)), held)
    write_state(state, rows, torch.where(rows.single.view(-1, 1, 1, 1), new, held))
    return torch.where(tail[..., None, None], made[:, None], out).reshape(shape)


class StaticRecurrentOps:
    """The methods of ``RecurrentOps`` over ``StaticRows``."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: object, attn: object,
        activation: str,
    ) -> Tensor:  # fmt: skip
        assert isinstance(rows, StaticRows)
        return convolve(x, weight, bias, state, rows, activation)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: object, attn: object
    ) -> Tensor:
        assert isinstance(rows, StaticRows)
        return delta_rule(q, k, v, g, beta, state, rows)

    def state_space(
        self, c: Tensor, b: Tensor, x: Tensor, g: Tensor, step: Tensor, state: Tensor, rows: object, attn: object
    ) -> Tensor:
        assert isinstance(rows, StaticRows)
        return state_space(c, b, x, g, step, state, rows)


def _wide(flags: Tensor, t: Tensor) -> Tensor:
    """Returns flags [R, T] with as many dimensions as ``t`` [R, T, ...]."""
    return flags.view(*flags.shape, *[1] * (t.dim() - 2))


def _unit(t: Tensor, heads: int, rows: StaticRows) -> Tensor:
    """Returns float32 [R, T, heads, d]: queries or keys of length 1, each repeated for the heads that it serves."""
    many, width = rows.real.shape
    wide = torch.where(rows.real[..., None, None], t.view(many, width, *t.shape[1:]).float(), 0.0)
    wide = wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + EPS)
    groups, size = t.shape[1:]
    return wide[:, :, :, None].expand(many, width, groups, heads // groups, size).reshape(many, width, heads, size)


def _split_values(v: Tensor, g: Tensor, beta: Tensor, rows: StaticRows) -> Sequence[Tensor]:
    """Returns values, decays and shares by row, with zeros for padding."""
    many, width = rows.real.shape
    values = torch.where(rows.real[..., None, None], v.view(many, width, *v.shape[1:]).float(), 0.0)
    gate, share = (torch.where(rows.real[..., None], t.view(many, width, -1), 0.0) for t in (g, beta))
    return values, gate, share


def run_chunks(x: DeltaInputs, state: Tensor, pairs: Tensor, slab: Slab) -> tuple[Tensor, Tensor]:
    """Computes R rows of T tokens chunk by chunk.

    Args:
        x: [R, T, ...], zeros for padding.
        state: [R, Hv, Dk, Dv].

    Returns:
        float32 [R, T, Hv, Dv] and the new state.
    """
    many, width, heads = x.beta.shape
    missing = -width % CHUNK
    if missing:
        x = DeltaInputs(*(torch.cat([t, t.new_zeros((many, missing, *t.shape[2:]))], dim=1) for t in x))
    chunks = (width + missing) // CHUNK
    out = []
    for start in range(0, chunks, SLAB):
        size = min(SLAB, chunks - start)
        part = slice(start * CHUNK, (start + size) * CHUNK)
        some = DeltaInputs(
            *(t[:, part].reshape(many, size, CHUNK, heads, -1).permute(1, 0, 3, 2, 4) for t in x)
        )  # [size, R, Hv, CHUNK, ...]
        made, state = slab(some, state, pairs)
        out += made
    found = torch.stack(out).permute(1, 0, 3, 2, 4)  # [R, chunks, CHUNK, Hv, Dv]
    return found.reshape(many, chunks * CHUNK, heads, -1)[:, :width], state


def _run_slab(x: DeltaInputs, state: Tensor, pairs: Tensor) -> tuple[list[Tensor], Tensor]:
    """Computes a few chunks, [size, R, Hv, CHUNK, ...]: all that does not depend on the state first."""
    q, k, v, gate, beta = x
    total = gate[..., 0].cumsum(-1)
    at = torch.arange(CHUNK, device=v.device)
    apart = total[..., :, None] - total[..., None, :]
    decay = torch.where(at[:, None] >= at, apart, torch.finfo(torch.float32).min).exp()
    across = k.transpose(-1, -2)
    inverse = invert(((k * beta) @ across) * decay, pairs)
    grown = total.exp()[..., None]
    values, keys = inverse @ (v * beta), inverse @ (k * beta * grown)
    own, queries = (q @ across) * decay, q * grown
    end = total[..., -1:]
    left, faded = (k * (end - total).exp()[..., None]).transpose(-1, -2), end.exp()[..., None]
    out = []
    for i in range(len(v)):
        change = values[i] - keys[i] @ state
        out.append(queries[i] @ state + own[i] @ change)
        state = state * faded[i] + left[i] @ change
    return out, state


def _scan_slab(x: DeltaInputs, state: Tensor, pairs: Tensor) -> tuple[list[Tensor], Tensor]:
    """Computes a few chunks of a state space, as ``_run_slab`` does."""
    c, b, v, gate, step = x
    total = gate[..., 0].cumsum(-1)
    at = torch.arange(CHUNK, device=v.device)
    apart = total[..., :, None] - total[..., None, :]
    decay = torch.where(at[:, None] >= at, apart, torch.finfo(torch.float32).min).exp()
    own, queries, change = (c @ b.transpose(-1, -2)) * decay, c * total.exp()[..., None], v * step
    end = total[..., -1:]
    left, faded = (b * (end - total).exp()[..., None]).transpose(-1, -2), end.exp()[..., None]
    out = []
    for i in range(len(v)):
        out.append(queries[i] @ state + own[i] @ change[i])
        state = state * faded[i] + left[i] @ change[i]
    return out, state


def invert(lower: Tensor, pairs: Tensor) -> Tensor:
    """Returns the inverse of matrices with ones on the diagonal, [..., CHUNK, CHUNK], whose other values are those of
    ``lower`` below it.

    The inverses of neighbouring blocks of 1, 2, 4, ... rows are joined by two products, which have no larger values
    than the result: as exact as a triangular solve, also for nearly equal keys.

    Args:
        pairs: for each size of blocks, 1 where the second block of a pair meets the first, else 0.
    """
    at = torch.arange(CHUNK, device=lower.device)
    found = (at[:, None] == at).float() - lower * pairs[0]
    for i in range(1, len(pairs)):
        found = found - found @ (lower * pairs[i]) @ found
    return found
