"""Experts by the plug-in's own operation, which reads the weights of the experts that tokens chose and no others.

How it groups and rounds is decided by a closed library, and public users report wrong values of one of its variants. So
it is compared with the product over all experts when the first experts load, and not used where it differs. It has a
form for 8-bit floats, which is compared in the same way; without it such experts become 16 bits as they load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.cpu.expert_mlp import RoutedTokens, activate, join_experts, run_all_experts
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.hpu.habana_bridge import Bridge
from trencadis.backends.hpu.hpu_quantised_linear import E4M3, floats8_weight, round_tokens
from trencadis.backends.hpu.launches.region_compiler import RegionCompiler, own_code, part
from trencadis.core.errors import format_error
from trencadis.core.quant.quantised_tensor import QTensor

log = logging.getLogger("trencadis.engine")

KIND = "silu"
"""The activation that the operation is used with."""

CLOSE = 3e-2
"""Largest difference from the product over all experts, as a share of its largest value."""

FP8_CLOSE = 0.12
"""The same for 8-bit floats, which round weights, tokens and what is between the products by up to a sixteenth each."""


class ExpertOps(Protocol):
    """The backend's ops (``ops.HpuOps``), as far as experts need them."""

    bridge: Bridge
    lazy: bool
    compiler: RegionCompiler
    check_context: Callable[[], AbstractContextManager[object]]

    def act(self, x: Tensor, kind: str) -> Tensor: ...

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor: ...

    def reference(self) -> ReferenceOps: ...


@dataclass
class ListedExperts:
    """gate_up [2 x inner, hidden], or [inner, hidden] without gates, and down [hidden, inner] of each expert.

    They are contiguous tensors of their own.

    A slice of one tensor of all experts would be a view, which the compiler may read, or copy, as a whole.
    """

    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    count: int
    inner: int


@dataclass
class ListedFp8Experts:
    """e4m3 codes gate_up [2 x inner, hidden] and down [hidden, inner] of each expert, and float32 scales of their rows.

    Args:
        nbytes: bytes of all codes and scales.
    """

    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    gate_up_scale: tuple[Tensor, ...]
    down_scale: tuple[Tensor, ...]
    count: int
    inner: int
    nbytes: int


def list_fp8_experts(
    gate_up: Sequence[Tensor | QTensor], down: Sequence[Tensor | QTensor], limit: float, device: torch.device
) -> ListedFp8Experts | None:
    """Packs experts of 8-bit floats for a card whose e4m3 ends at ``limit``; returns None if a matrix is another."""
    kept = [[q for q in some if isinstance(q, QTensor) and q.scheme.kind == "float"] for some in (gate_up, down)]
    if [len(some) for some in kept] != [len(gate_up), len(down)]:
        return None
    made = [[floats8_weight(q, None, limit, device) for q in some] for some in kept]
    codes = [tuple(w.codes for w in some) for some in made]
    scales = [tuple(w.scale for w in some) for some in made]
    total = sum(w.nbytes for some in made for w in some)
    return ListedFp8Experts(codes[0], codes[1], scales[0], scales[1], len(down), down[0].shape[1], total)


def route_by_topk(scores: Tensor, top: int, normalise: bool) -> RoutedTokens:
    """Chooses experts as ``expert_mlp.route_tokens`` does, except that of equal shares any is taken.

    Ranking by number needs 64-bit integers or a sort, which a card computes as a topk of all experts.
    """
    shares, experts = scores.float().softmax(-1).topk(top)
    return RoutedTokens(shares / shares.sum(-1, keepdim=True) if normalise else shares, experts)


def run_listed_fp8_experts(
    ops: ExpertOps, x: Tensor, scores: Tensor, w: ListedFp8Experts, top: int, normalise: bool, kind: str
) -> Tensor:
    """Implements ``core.device.backend.Ops.experts``; as ``run_listed_experts`` does for another activation or
    experts without gates.
    """
    bridge, multiply = ops.bridge, ops.bridge.fp8_gemm_v2
    assert bridge.fp8_experts is not None and bridge.cast_to_fp8_v2 is not None and multiply is not None
    shares, chosen = route_by_topk(scores, top, normalise)
    codes, scale = round_tokens(x, bridge.fp8_top, bridge.cast_to_fp8_v2)
    if kind == KIND and len(w.gate_up[0]) == 2 * w.inner:
        shares = shares.to(x.dtype)
        found: Tensor = bridge.fp8_experts(
            codes, scale, chosen, shares, w.gate_up, w.down, w.gate_up_scale, w.down_scale
        )
        return found
    out = torch.zeros_like(x, dtype=torch.float32)
    for i in range(w.count):
        share = torch.where(chosen == i, shares, 0.0).sum(-1, keepdim=True)
        made = activate(ops, multiply(codes, w.gate_up[i], x.dtype, scale, w.gate_up_scale[i], None), w.inner, kind)
        between, own = round_tokens(made, bridge.fp8_top, bridge.cast_to_fp8_v2)
        y = multiply(between, w.down[i], x.dtype, own, w.down_scale[i], None)
        out = out + torch.where(share > 0, y.float() * share, 0.0)
    return out.to(x.dtype)


def list_experts(gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> ListedExperts:
    """Packs the weights of each expert."""
    made = [tuple(t.contiguous() for t in some) for some in (gate_up, down)]
    return ListedExperts(made[0], made[1], len(down), down[0].shape[1])


def run_listed_experts(
    kernel: Callable[..., Tensor], ops: ExpertOps, x: Tensor, scores: Tensor, w: ListedExperts, top: int,
    normalise: bool, kind: str,
) -> Tensor:  # fmt: skip
    """Implements ``core.device.backend.Ops.experts``; another activation than ``KIND``, and experts without gates,
    take plain products over each expert.
    """
    shares, chosen = route_by_topk(scores, top, normalise)
    if kind == KIND and len(w.gate_up[0]) == 2 * w.inner:
        return kernel(x, chosen, shares.to(x.dtype), w.gate_up, w.down)
    out = torch.zeros_like(x, dtype=torch.float32)
    for i in range(w.count):
        share = torch.where(chosen == i, shares, 0.0).sum(-1, keepdim=True)
        made = activate(ops, functional.linear(x, w.gate_up[i]), w.inner, kind)
        out = out + torch.where(share > 0, functional.linear(made, w.down[i]).float() * share, 0.0)
    return out.to(x.dtype)


def check_experts(ops: ExpertOps) -> bool:
    """Returns True if the operation gives the values of the product over all experts; else warns once."""

    kernel = ops.bridge.experts
    assert kernel is not None, "only a kernel that the bridge has is checked"

    def run(x: Tensor, scores: Tensor, *weights: Tensor) -> Tensor:
        w = ListedExperts(weights[:COUNT], weights[COUNT:], COUNT, INNER)
        return run_listed_experts(kernel, ops, x, scores, w, 2, True, KIND)

    x, scores, gate_up, down = random_experts()
    return _differs_little(ops, run, (x, scores, *gate_up, *down), (gate_up, down), CLOSE, "mixture_of_experts",
                           "products over all experts take its place")  # fmt: skip


def check_fp8_experts(ops: ExpertOps) -> bool:
    """Returns True if the operation's form for 8-bit floats gives the values of the product over all experts, as far as
    their rounding allows; else warns once.
    """
    x, scores, gate_up, down = random_experts()
    top, codes, scales = ops.bridge.fp8_top, list[Tensor](), list[Tensor]()
    for weight in (*gate_up, *down):
        scales.append(weight.float().abs().amax(1) / top)
        codes.append((weight.float() / scales[-1][:, None]).to(E4M3))

    def run(x: Tensor, scores: Tensor, *given: Tensor) -> Tensor:
        each = [given[i : i + COUNT] for i in range(0, 4 * COUNT, COUNT)]
        w = ListedFp8Experts(each[0], each[1], each[2], each[3], COUNT, INNER, 0)
        return run_listed_fp8_experts(ops, x, scores, w, 2, True, KIND)

    exact = [(c.float() * s[:, None]) for c, s in zip(codes, scales, strict=True)]
    given = (x, scores, *codes, *scales)
    return _differs_little(ops, run, given, (exact[:COUNT], exact[COUNT:]), FP8_CLOSE, "mixture_of_experts in fp8",
                           "experts become 16 bits")  # fmt: skip


COUNT, WIDTH, INNER = 8, 64, 32
"""Experts, hidden size and inner size of the check."""


class ProbeExperts(NamedTuple):
    """Random tokens, scores and weights in bfloat16."""

    x: Tensor
    scores: Tensor
    gate_up: list[Tensor]
    down: list[Tensor]


def random_experts() -> ProbeExperts:
    """Returns the check's inputs."""
    g = torch.Generator().manual_seed(6)
    x, scores = torch.randn(9, WIDTH, generator=g).bfloat16(), torch.randn(9, COUNT, generator=g).bfloat16()
    gate_up = [(torch.randn(2 * INNER, WIDTH, generator=g) / 8).bfloat16() for _ in range(COUNT)]
    down = [(torch.randn(WIDTH, INNER, generator=g) / 6).bfloat16() for _ in range(COUNT)]
    return ProbeExperts(x, scores, gate_up, down)


def _differs_little(
    ops: ExpertOps, run: Callable[..., Tensor], given: tuple[Tensor, ...], weights: tuple[list[Tensor], list[Tensor]],
    close: float, name: str, instead: str,
) -> bool:  # fmt: skip
    """Compares ``run`` on the card, over ``given``, with the product over all experts of ``weights`` on the host."""
    device = ops.bridge.device
    try:
        call: Callable[..., Tensor] = run
        if not ops.lazy:
            call = partial(ops.compiler.compile(partial(own_code, part), "experts"), run)
        on_card = [t.to(device) for t in given]
        with torch.no_grad(), ops.check_context(), redirect_stderr(StringIO()):  # a graph that fails prints its code
            out = call(*on_card)
        found = out.cpu().float()
    except Exception as error:  # whatever a release raises for an operation that it lacks or refuses
        log.warning("hpu: %s fails (%s); %s.", name, format_error(error), instead)
        return False
    joined = join_experts([t.float() for t in weights[0]], [t.float() for t in weights[1]])
    want = run_all_experts(ops.reference(), given[0].float(), given[1], joined, 2, True, KIND)
    off = float((found - want).abs().max() / want.abs().max())
    if off <= close:
        return True
    log.warning("hpu: %s is off by %.1e of the largest value; %s.", name, off, instead)
    return False
