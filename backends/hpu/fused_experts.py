"""Experts by the plug-in's own operation, which reads the weights of the experts that tokens chose and no others.

How it groups and rounds is decided by a closed library, and public users report wrong values of one of its variants. So
it is compared with the product over all experts when the first experts load, and not used where it differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.cpu.expert_mlp import join_experts, route_tokens, run_all_experts
from trencadis.backends.hpu.launches.region_compiler import own_code, part
from trencadis.core.errors import format_error

log = logging.getLogger("trencadis.engine")

KIND = "silu"
"""The activation that the operation is used with."""

CLOSE = 3e-2
"""Largest difference from the product over all experts, as a share of its largest value."""


@dataclass
class ListedExperts:
    """gate_up [2 x inner, hidden] and down [hidden, inner] of each expert, contiguous tensors of their own.

    A slice of one tensor of all experts would be a view, which the compiler may read, or copy, as a whole.
    """

    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    count: int
    inner: int


def list_experts(gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> ListedExperts:
    """Packs the weights of each expert."""
    made = [tuple(t.contiguous() for t in some) for some in (gate_up, down)]
    return ListedExperts(made[0], made[1], len(down), down[0].shape[1])


def run_listed_experts(
    kernel: Callable[..., Tensor], ops: Any, x: Tensor, scores: Tensor, w: ListedExperts, top: int, normalise: bool,
    kind: str,
) -> Tensor:  # fmt: skip
    """Implements ``core.device.backend.Ops.experts``; another activation than ``KIND`` takes plain products over each
    expert.
    """
    shares, chosen = route_tokens(scores, top, normalise)
    if kind == KIND:
        return kernel(x, chosen.int(), shares.to(x.dtype), w.gate_up, w.down)
    out = torch.zeros_like(x, dtype=torch.float32)
    for i in range(w.count):
        share = torch.where(chosen == i, shares, 0.0).sum(-1, keepdim=True)
        made = ops.act_mul(functional.linear(x, w.gate_up[i]), kind)
        out = out + torch.where(share > 0, functional.linear(made, w.down[i]).float() * share, 0.0)
    return out.to(x.dtype)


def check_experts(ops: Any) -> bool:
    """Returns True if the operation gives the values of the product over all experts; else warns once."""
    kernel = ops.bridge.experts
    g = torch.Generator().manual_seed(6)
    x, scores = torch.randn(9, 64, generator=g).bfloat16(), torch.randn(9, 8, generator=g).bfloat16()
    gate_up = [(torch.randn(64, 64, generator=g) / 8).bfloat16() for _ in range(8)]
    down = [(torch.randn(64, 32, generator=g) / 6).bfloat16() for _ in range(8)]
    device = ops.bridge.device

    def run(x: Tensor, scores: Tensor, *weights: Tensor) -> Tensor:
        w = ListedExperts(weights[:8], weights[8:], 8, 32)
        return run_listed_experts(kernel, ops, x, scores, w, 2, True, KIND)

    try:
        call: Any = run if ops.lazy else partial(ops.compiler.compile(partial(own_code, part), "experts"), run)
        on_card = [t.to(device) for t in (x, scores, *gate_up, *down)]
        with torch.no_grad(), ops.check_context(), redirect_stderr(StringIO()):  # a graph that fails prints its code
            out = call(*on_card)
        found = out.cpu().float()
    except Exception as error:  # whatever a release raises for an operation that it lacks or refuses
        why = format_error(error)
        log.warning("hpu: mixture_of_experts fails (%s); products over all experts take its place.", why)
        return False
    joined = join_experts([t.float() for t in gate_up], [t.float() for t in down])
    want = run_all_experts(ops.reference(), x.float(), scores, joined, 2, True, KIND)
    off = float((found - want).abs().max() / want.abs().max())
    if off <= CLOSE:
        return True
    log.warning("hpu: mixture_of_experts is off by %.1e of the largest value; products over all experts take its "
                "place.", off)  # fmt: skip
    return False
