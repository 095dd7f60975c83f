"""Calls of the plug-in's own kernels with their right results: for ``check-hpu``, and for the check at a start.

The kernels' sources are closed, and users have reported wrong values of some. So a start compares those that its
launches may use with their formulas, and does not use one that differs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from trencadis.backends.hpu.habana_bridge import Bridge
from trencadis.core.errors import format_error

log = logging.getLogger("trencadis.engine")

T = TypeVar("T")
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest allowed error as a share of the largest magnitude, by dtype."""


class ProbeFailed(Exception):
    """A kernel's or a copy's result is wrong; the message gives the error."""


class ProbeModule(nn.Module):
    """A function as a module, so that it can be compiled or captured.

    It is the module's ``forward`` itself: torch keeps a few compiled variants for each code object, and a shared one
    would exceed that limit after the eighth probe.
    """

    def __init__(self, run: Callable[..., object]) -> None:
        super().__init__()
        self.forward = run


def error(found: Tensor, wanted: Tensor) -> float:
    """Returns the largest error as a share of the largest magnitude.

    Raises:
        ProbeFailed: another shape, a value that is not finite, or an error above ``CLOSE``.
    """
    if found.shape != wanted.shape:
        raise ProbeFailed(f"shape {list(found.shape)}, the CPU gives {list(wanted.shape)}")
    if not wanted.is_floating_point():
        wrong = int((found.long() != wanted.long()).sum())
        if wrong:
            raise ProbeFailed(f"{wrong} of {wanted.numel()} values differ from the CPU's")
        return 0.0
    off = float((found.float() - wanted.float()).abs().max()) / max(float(wanted.float().abs().max()), 1e-6)
    if not off <= CLOSE.get(wanted.dtype, 1e-4):
        raise ProbeFailed(f"off by {off:.1e} of the largest value")
    return off


def visible_before(keys: int, queries: int) -> Tensor:
    """Returns bool [1, 1, queries, keys]: ``queries`` tokens see all stored ones, and their own in turn."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]


class KernelCase(NamedTuple):
    """A function to run on the card, its arguments, and the right result."""

    run: Callable[..., Tensor]
    args: tuple[Tensor, ...]
    wanted: Tensor


def _statistics_case(bridge: Bridge, g: torch.Generator) -> KernelCase:
    """Attention over some keys, multiplied by its sum of exponentials: what merging parts needs of the statistics."""
    parts, scale = require(bridge.sdpa_parts), 64**-0.5
    q = torch.randn(1, 4, 8, 64, generator=g).bfloat16()
    k, v = (torch.randn(1, 2, 16, 64, generator=g).bfloat16() for _ in range(2))
    mask = (torch.arange(16) < 11).view(1, 1, 1, 16)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out, high, inverse = parts(q, k, v, mask, False, scale, "fp32")
        return out.float() * high.float().exp() / inverse.float()

    scores = q.float() @ k.float().repeat_interleave(2, 1).transpose(2, 3) * scale
    share = scores.exp() * mask
    return KernelCase(run, (q, k, v, mask), (share @ v.float().repeat_interleave(2, 1)).bfloat16())


def _causal_case(bridge: Bridge, g: torch.Generator) -> KernelCase:
    """A causal call of 1,024 tokens, the fewest of which the kernel's statistics are right."""
    parts, scale = require(bridge.sdpa_parts), 64**-0.5
    q = torch.randn(1, 4, 1024, 64, generator=g).bfloat16()
    k, v = (torch.randn(1, 2, 1024, 64, generator=g).bfloat16() for _ in range(2))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, high, inverse = parts(q, k, v, None, True, scale, "fp32")
        return torch.cat([out.float(), high.float() - inverse.float().log()], -1).bfloat16()

    scores = q.float() @ k.float().repeat_interleave(2, 1).transpose(2, 3) * scale
    scores = scores.masked_fill(~visible_before(1024, 1024), float("-inf"))
    out = scores.softmax(-1) @ v.float().repeat_interleave(2, 1)
    return KernelCase(run, (q, k, v), torch.cat([out, scores.logsumexp(-1, True)], -1).bfloat16())


def _wide_product_case(bridge: Bridge, g: torch.Generator) -> KernelCase:
    a, b = torch.randn(2, 4, 64, generator=g).bfloat16(), torch.randn(2, 64, 8, generator=g).bfloat16()
    return KernelCase(require(bridge.product), (a, b), a.float() @ b.float())


def _fp8_product_case(bridge: Bridge, g: torch.Generator) -> KernelCase:
    multiply, cast = require(bridge.fp8_gemm_v2), require(bridge.cast_to_fp8_v2)
    x, w = (torch.randint(-8, 9, (n, 32), generator=g).float() for n in (5, 16))
    scale, each = torch.rand(5, 1, generator=g) + 0.5, torch.rand(16, generator=g) + 0.5

    def run(x: Tensor, w: Tensor, scale: Tensor, each: Tensor) -> Tensor:
        return multiply(cast(x), cast(w), torch.float32, scale, each, None)

    return KernelCase(run, (x, w, scale, each), (x * scale) @ (w * each[:, None]).t())


def _unpack_case(bridge: Bridge, g: torch.Generator) -> KernelCase:
    unpack = require(bridge.convert_from_uint4)
    codes = torch.randint(0, 16, (8, 16), generator=g)
    words = sum(codes.view(8, 2, 8)[..., i] << (4 * i) for i in range(8))
    assert isinstance(words, Tensor)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    scale, zero = torch.rand(2, 16, generator=g).bfloat16(), torch.zeros(2, 2, dtype=torch.int32)

    def run(words: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return unpack(words, scale, zero, torch.bfloat16)

    wanted = (codes.float() * scale.float().repeat_interleave(4, 0)).bfloat16()
    return KernelCase(run, (signed, scale, zero), wanted)


def _adjustment_case(bridge: Bridge, g: torch.Generator) -> KernelCase:
    adjust, shape = require(bridge.block_adjustment), [3, 2, 2, 1, 1]
    high, total = torch.randn(shape, generator=g), torch.rand(shape, generator=g) + 1
    rows = torch.zeros(3, dtype=torch.int32)

    def run(high: Tensor, total: Tensor, rows: Tensor) -> Tensor:
        return adjust(high, total, rows, 1, shape)

    factor = (high - high.amax(0)).exp()
    return KernelCase(run, (high, total, rows), factor / (factor * total).sum(0))


def require(kernel: Callable[..., T] | None) -> Callable[..., T]:
    assert kernel is not None, "only kernels that the bridge has are probed"
    return kernel


CASES: dict[str, Callable[[Bridge, torch.Generator], KernelCase]] = {
    "sdpa_recomp_fwd": _statistics_case, "sdpa_recomp_fwd.causal": _causal_case, "product": _wide_product_case,
    "fp8_gemm_v2": _fp8_product_case, "convert_from_uint4": _unpack_case, "block_softmax_adjustment": _adjustment_case,
}  # fmt: skip
"""Calls of kernels by the names of their lines."""

CHECKED = {
    "sdpa_recomp_fwd": ("sdpa_parts", "plain attention takes its place"),
    "sdpa_recomp_fwd.causal": ("sdpa_parts", "plain attention takes its place"),
    "block_softmax_adjustment": ("block_adjustment", "plain operations take its place"),
    "fp8_gemm_v2": ("fp8_gemm_v2", "weights of 8-bit floats become 16 bits"),
    "convert_from_uint4": ("convert_from_uint4", "weights of 4 bits become 16 bits"),
}
"""Cases that a start compares: the field of the bridge that is None where a result differs, and what that means."""


def drop_wrong_kernels(bridge: Bridge) -> Bridge:
    """Returns the bridge without the kernels that fail or whose results differ; warns once of each."""
    for name, (field, instead) in CHECKED.items():
        if getattr(bridge, field) is None:
            continue
        why = _find_fault(bridge, CASES[name](bridge, torch.Generator().manual_seed(5)))
        if why:
            log.warning("hpu: %s %s; %s.", name.partition(".")[0], why, instead)
            without: dict[str, Any] = {field: None}
            bridge = dataclasses.replace(bridge, **without)
    return bridge


def _find_fault(bridge: Bridge, case: KernelCase) -> str:
    """Runs a case once; returns what is wrong with it, or ""."""
    module: Any = ProbeModule(case.run)
    try:
        call = module if bridge.is_lazy() else bridge.compile(module)
        with torch.no_grad(), redirect_stderr(StringIO()):  # a graph that fails prints its code
            out = call(*(t.to(bridge.device) for t in case.args))
            bridge.mark_step()
            found = out.cpu()
        error(found, case.wanted)
    except ProbeFailed as wrong:
        return f"is {wrong}" if str(wrong).startswith("off") else f"is wrong ({wrong})"
    except Exception as failed:  # whatever a release raises for an operation that it refuses
        return f"fails ({format_error(failed)})"
    return ""
