"""Random launches of the recurrent ops: ragged rows with states, and padding of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.core.device.backend import Attn
from trencadis.core.device.launch_tensors import RecurrentRows

NAN = float("nan")


class DeltaCase(NamedTuple):
    """Operands of ``RecurrentOps.delta_rule`` without rows; ``state``: [slots, Hv, Dk, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    def tokens(self, part: slice) -> DeltaCase:
        """Returns the case with some of the tokens, and the same state tensor."""
        q, k, v, g, beta = (t[part] for t in self[:5])
        return DeltaCase(q, k, v, g, beta, self.state)

    def copied(self) -> DeltaCase:
        return DeltaCase(*(t.clone() for t in self))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def delta_case(
    n: int, heads: tuple[int, int] = (2, 4), size: int = 128, slots: int = 4, seed: int = 0, alike: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> DeltaCase:  # fmt: skip
    """Returns random operands for n tokens; ``alike``: share of all keys that is one vector, as for blank images."""
    make = seeded(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    k = normal(n, heads[0], size) * (1 - alike) + normal(1, heads[0], size) * alike
    beta = torch.sigmoid(normal(n, heads[1]) + 4 * alike)
    g = -torch.nn.functional.softplus(normal(n, heads[1]) - 2) * (1 - alike)
    q, k, v = (t.to(dtype) for t in (normal(n, heads[0], size), k, normal(n, heads[1], size)))
    return DeltaCase(q, k, v, g, beta, normal(slots, heads[1], size, size))


def rows_of(
    counts: Sequence[int], slots: Sequence[int] | None = None, begins: Sequence[int] = (),
    sources: Sequence[int] | None = None, padding: int = 0, padding_rows: int = 0,
) -> tuple[RecurrentRows, Attn]:  # fmt: skip
    """Returns the rows of a launch of ``counts`` tokens each, then ``padding`` tokens and ``padding_rows`` rows.

    Args:
        slots: slot of each row; None: 1, 2, ...
        begins: rows whose state counts as zero.
        sources: slot that each row's state is read from; None: its slot.
    """
    slots = range(1, len(counts) + 1) if slots is None else slots
    none = [0] * (padding_rows + 1)
    flags = [int(row in begins) for row in range(len(counts))] + [1] * len(none)
    start = [0, *torch.tensor(counts).cumsum(0).tolist(), *[sum(counts)] * padding_rows, sum(counts) + padding]
    rows = RecurrentRows(
        torch.tensor([*slots, *none]),
        torch.tensor(flags, dtype=torch.int32),
        torch.tensor([*(slots if sources is None else sources), *none]),
        torch.tensor([*counts, *none], dtype=torch.int32),
    )
    empty = torch.zeros(len(none) + len(counts), 1, dtype=torch.int32)
    return rows, Attn(torch.tensor(start, dtype=torch.int32), empty[:, 0], empty, torch.zeros(start[-1]).long())


def exact_rule(case: DeltaCase, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the delta rule of one row token by token in float64; returns the outputs and the state after them."""
    q, k, v, g, beta = (t.double() for t in case[:5])
    ratio, held, out = v.shape[1] // k.shape[1], state.double().clone(), torch.empty_like(v)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k = (t.repeat_interleave(ratio, dim=1) for t in (q, k))
    for i in range(len(v)):
        held = held * g[i].exp()[:, None, None]
        change = beta[i][:, None] * (v[i] - torch.einsum("hkv,hk->hv", held, k[i]))
        held = held + torch.einsum("hk,hv->hkv", k[i], change)
        out[i] = torch.einsum("hkv,hk->hv", held, q[i])
    return out, held


def exact_scan(case: DeltaCase, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the state space of one row in float64 as ``exact_rule`` does; q, k, v and beta are c, b, x and steps."""
    c, b, x, g, step = (t.double() for t in case[:5])
    ratio, held, out = x.shape[1] // b.shape[1], state.double().clone(), torch.empty_like(x)
    c, b = (t.repeat_interleave(ratio, dim=1) for t in (c, b))
    for i in range(len(x)):
        held = held * g[i].exp()[:, None, None] + torch.einsum("hk,hv->hkv", b[i], step[i][:, None] * x[i])
        out[i] = torch.einsum("hkv,hk->hv", held, c[i])
    return out, held


def off(found: Tensor, wanted: Tensor) -> float:
    """Returns the largest error as a share of the largest magnitude; infinite if a value is not finite."""
    error = float((found.double() - wanted.double()).abs().max()) / float(wanted.double().abs().max())
    return error if error == error else float("inf")
