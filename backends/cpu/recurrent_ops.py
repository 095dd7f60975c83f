"""The recurrent ops (``core.models.model_and_ops_api.RecurrentOps``): the reference in plain torch, and the library's
kernels.

In the reference shapes are static, and no tensor is read on the host unless ``reads_rows`` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.cpu.native import recurrent_kernels
from trencadis.backends.cpu.native.attention_and_row_kernels import gated_norm
from trencadis.backends.cpu.native.kernel_choice_by_cpu import KernelTable
from trencadis.core.device.backend import Ops
from trencadis.core.device.launch_tensors import Attn, RecurrentRows
from trencadis.core.models.model_and_ops_api import DeltaNetWeights, RecurrentState

CHUNK = 64
"""Tokens of a row that are computed together."""

EPS = 1e-6
"""Added to the sum of squares of queries and keys."""


class DeltaInputs(NamedTuple):
    """Normalised inputs of the delta rule, float32; letters as in ``RecurrentOps.delta_rule``, t tokens in any form.

    Of ``RecurrentOps.state_space``: c, b, x, g and step.
    """

    q: Tensor  # [t, Hv, Dk]
    k: Tensor  # [t, Hv, Dk]
    v: Tensor  # [t, Hv, Dv]
    g: Tensor  # [t, Hv]
    beta: Tensor  # [t, Hv]


Advance = Callable[[DeltaInputs, Tensor], tuple[Tensor, Tensor]]
"""Computes some tokens: (inputs, state before them) -> (results, state after them)."""


class TokenPlaces(NamedTuple):
    """Where the tokens of a launch are."""

    start: Tensor  # [rows + 1]: first token of each row
    row: Tensor  # [n]: row of each token
    offset: Tensor  # [n]: place of each token in its row


class RecurrentReference:
    """Implements ``core.models.model_and_ops_api.RecurrentOps``."""

    reads_rows = False
    """True: inputs may be read on the host, which a graph does not permit: the tokens of each row, so that no chunk
    without tokens is computed, and whether all rows of a sampling launch have a target.
    """

    def prepare_recurrent(self, rows: RecurrentRows, attn: Attn) -> RecurrentRows:
        return rows

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: RecurrentRows, attn: Attn,
        activation: str,
    ) -> Tensor:  # fmt: skip
        start, row, offset = locate_tokens(len(x), attn)
        real = offset < rows.count[row]
        earlier = read_state(state, rows)  # [rows + 1, K - 1, C]
        taps, token = weight.shape[1], torch.arange(len(x), device=x.device)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for tap in range(taps):
            lag = taps - 1 - tap
            own = x.index_select(0, (token - lag).clamp(min=0))
            old = earlier[row, (taps - 1 + offset - lag).clamp(0, taps - 2)]
            out = out + torch.where((offset >= lag)[:, None], own, old).float() * weight[:, tap].float()
        out = out if bias is None else out + bias.float()
        out = functional.silu(out) if activation == "silu" else out
        self._store_inputs(x, state, earlier, start, rows)
        return torch.where(real[:, None], out, 0.0).to(x.dtype)

    def _store_inputs(self, x: Tensor, state: Tensor, earlier: Tensor, start: Tensor, rows: RecurrentRows) -> None:
        """Writes the last inputs of each row, some of which may be from before the launch."""
        kept = state.shape[1]
        place = rows.count[:, None].long() - kept + torch.arange(kept, device=x.device)  # [rows + 1, K - 1]
        own = x[(start[:, None] + place).clamp(0, len(x) - 1)]
        old = earlier.gather(1, (place + kept).clamp(0, kept - 1)[..., None].expand(-1, -1, x.shape[1]))
        state.index_copy_(0, rows.slot, torch.where((place >= 0)[..., None], own, old))

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: RecurrentRows, attn: Attn
    ) -> Tensor:
        places = locate_tokens(len(v), attn)
        x = normalise(q, k, v, g, beta, places.offset < rows.count[places.row])
        return self._run_rows(x, state, rows, places.start, run_chunk, step_rows).to(v.dtype)

    def state_space(
        self, c: Tensor, b: Tensor, x: Tensor, g: Tensor, step: Tensor, state: Tensor, rows: RecurrentRows, attn: Attn
    ) -> Tensor:
        places = locate_tokens(len(x), attn)
        real = places.offset < rows.count[places.row]
        made = DeltaInputs(*(
            torch.where(real.view(-1, *[1] * (t.dim() - 1)), t.float(), 0.0) for t in (c, b, x, g, step)
        ))  # fmt: skip
        ratio = x.shape[1] // b.shape[1]
        made = made._replace(q=made.q.repeat_interleave(ratio, 1), k=made.k.repeat_interleave(ratio, 1))
        return self._run_rows(made, state, rows, places.start, scan_chunk, scan_rows).to(x.dtype)

    def _run_rows(
        self, x: DeltaInputs, state: Tensor, rows: RecurrentRows, start: Tensor, chunk: Advance, step: Advance
    ) -> Tensor:
        """Computes all rows into float32 [n, Hv, Dv] and writes their states.

        ``chunk`` computes CHUNK tokens of one row, ``step`` one token of each row.
        """
        n, single = len(x.v), rows.count % CHUNK == 1
        out = torch.zeros((n + 1, *x.v.shape[1:]), device=x.v.device)  # the last row takes what belongs to no token
        held = self._run_chunks(x, state, rows, start, rows.count - single.int(), out, chunk)
        last = (start + rows.count - 1).clamp(min=0)
        made, new = step(DeltaInputs(*(t.index_select(0, last) for t in x)), held)
        out.index_copy_(0, torch.where(single, last, n), made)
        state.index_copy_(0, rows.slot, torch.where(single[:, None, None, None], new, held))
        return out[:-1]

    def gated_norm(self, y: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
        normed = cast(Ops, self).rms_norm(y.reshape(-1, y.shape[2]), weight, eps)[0]
        return (normed.view(len(y), -1) * functional.silu(gate.float())).to(y.dtype)

    def _run_chunks(
        self, x: DeltaInputs, state: Tensor, rows: RecurrentRows, start: Tensor, count: Tensor, out: Tensor,
        chunk: Advance,
    ) -> Tensor:  # fmt: skip
        """Computes the first ``count`` tokens of each row, chunk by chunk, into ``out``.

        Returns:
            float32 [rows + 1, Hv, Dk, Dv]: the state after them.
        """
        held, n = read_state(state, rows), len(x.v)
        ends = ((count + CHUNK - 1) // CHUNK).cumsum(0)
        # A row has two tokens at least, or none.
        total = int(ends[-1]) if self.reads_rows else n // CHUNK + min(len(count), n // 2)
        numbers = torch.arange(total, device=count.device)
        row = torch.searchsorted(ends, numbers, right=True).clamp(max=len(count) - 1)
        place = (numbers - functional.pad(ends, (1, 0))[row]) * CHUNK
        token = place[:, None] + torch.arange(CHUNK, device=count.device)
        real = (token < count[row, None]) & (numbers < ends[-1])[:, None]
        token = start[row, None] + token
        for i in range(total):
            at, own = token[i].clamp(max=n - 1), real[i]
            part = (torch.where(own.view(-1, *[1] * (t.dim() - 1)), t.index_select(0, at), 0.0) for t in x)
            made, new = chunk(DeltaInputs(*part), held.index_select(0, row[i : i + 1])[0])
            out.index_copy_(0, torch.where(own, at, n), made)
            held.index_copy_(0, row[i : i + 1], new[None])
        return held


class RecurrentKernelOps(RecurrentReference):
    """The recurrent ops by the library's kernels, by the reference where the library has none."""

    if TYPE_CHECKING:  # of the class that this one is mixed into

        @property
        def table(self) -> KernelTable: ...

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: RecurrentRows, attn: Attn,
        activation: str,
    ) -> Tensor:  # fmt: skip
        made = recurrent_kernels.causal_conv(x, weight, bias, state, rows, attn, activation, self.table)
        return super().causal_conv(x, weight, bias, state, rows, attn, activation) if made is None else made

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: RecurrentRows, attn: Attn
    ) -> Tensor:
        made = recurrent_kernels.delta_rule(q, k, v, g, beta, state, rows, attn, self.table)
        return super().delta_rule(q, k, v, g, beta, state, rows, attn) if made is None else made

    def state_space(
        self, c: Tensor, b: Tensor, x: Tensor, g: Tensor, step: Tensor, state: Tensor, rows: RecurrentRows, attn: Attn
    ) -> Tensor:
        made = recurrent_kernels.delta_rule(c, b, x, g, step, state, rows, attn, self.table, True)
        return super().state_space(c, b, x, g, step, state, rows, attn) if made is None else made

    def gated_norm(self, y: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
        made = gated_norm(y, weight, eps, gate, self.table)
        return super().gated_norm(y, weight, eps, gate) if made is None else made

    def delta_net(
        self, x: Tensor, gates: Tensor, w: DeltaNetWeights, held: RecurrentState, rows: RecurrentRows, attn: Attn
    ) -> Tensor | None:
        """Implements ``FusedDeltaOps``: between two products that read memory at its rate, Python's calls cost most."""
        return recurrent_kernels.delta_net(x, gates, w, held, rows, attn, self.table)


def locate_tokens(n: int, attn: Attn) -> TokenPlaces:
    """Returns the places of n tokens."""
    start = attn.row_start[:-1].long()
    token = torch.arange(n, device=start.device)
    row = torch.searchsorted(attn.row_start[1:-1].long().contiguous(), token, right=True)
    return TokenPlaces(start, row, token - start[row])


def read_state(state: Tensor, rows: RecurrentRows) -> Tensor:
    """Returns a copy of each row's state, [rows + 1, ...]: zeros where the row begins or is padding."""
    fresh = (rows.begins > 0) | (rows.count == 0)
    return torch.where(fresh.view(-1, *[1] * (state.dim() - 1)), 0.0, state.index_select(0, rows.source))


def normalise(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, real: Tensor) -> DeltaInputs:
    """Returns the inputs of the delta rule with q and k normalised and repeated, and zeros for tokens not ``real``."""

    def unit(t: Tensor) -> Tensor:
        wide = torch.where(real[:, None, None], t.float(), 0.0)
        wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)
        return wide.repeat_interleave(v.shape[1] // t.shape[1], dim=1)

    values = torch.where(real[:, None, None], v.float(), 0.0)
    gate, share = (torch.where(real[:, None], t.float(), 0.0) for t in (g, beta))
    return DeltaInputs(unit(q) * q.shape[-1] ** -0.5, unit(k), values, gate, share)


def step_rows(x: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one token of each row: x has r tokens, ``state`` is [r, Hv, Dk, Dv].

    Returns:
        [r, Hv, Dv] and the new state.
    """
    state = state * x.g.exp()[..., None, None]
    change = x.beta[..., None] * (x.v - (x.k[..., None, :] @ state)[..., 0, :])
    state = state + x.k[..., None] * change[..., None, :]
    return (x.q[..., None, :] @ state)[..., 0, :], state


def run_chunk(x: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes CHUNK tokens of one row by products and one triangular system; ``state``: [Hv, Dk, Dv].

    Tokens whose values, g and beta are all zero leave the state as it is.

    Returns:
        [CHUNK, Hv, Dv] and the new state.
    """
    q, k, v = (t.transpose(0, 1) for t in x[:3])  # [Hv, CHUNK, D]
    total, beta = x.g.t().cumsum(-1), x.beta.t()[..., None]  # [Hv, CHUNK]
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(upper, float("-inf")).exp()
    lower = (k * beta) @ k.transpose(1, 2) * decay
    both = torch.cat([v * beta, k * beta * total.exp()[..., None]], dim=-1)
    values, keys = torch.linalg.solve_triangular(lower, both, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    change = values - keys @ state
    out = (q * total.exp()[..., None]) @ state + (q @ k.transpose(1, 2) * decay) @ change
    end = total[:, -1:]
    new = state * end.exp()[..., None] + (k * (end - total).exp()[..., None]).transpose(1, 2) @ change
    return out.transpose(0, 1), new


def scan_rows(x: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one token of each row of a state space, as ``step_rows`` does."""
    value = x.v * x.beta[..., None]
    state = state * x.g.exp()[..., None, None] + x.k[..., None] * value[..., None, :]
    return (x.q[..., None, :] @ state)[..., 0, :], state


def scan_chunk(x: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes CHUNK tokens of one row of a state space by products, as ``run_chunk`` does."""
    q, k, v = (t.transpose(0, 1) for t in x[:3])  # [Hv, CHUNK, D]
    total, change = x.g.t().cumsum(-1), v * x.beta.t()[..., None]
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(upper, float("-inf")).exp()
    out = (q * total.exp()[..., None]) @ state + (q @ k.transpose(1, 2) * decay) @ change
    end = total[:, -1:]
    new = state * end.exp()[..., None] + (k * (end - total).exp()[..., None]).transpose(1, 2) @ change
    return out.transpose(0, 1), new
