"""Kernels of the card: each operation that model bodies use, and each fused one, compared with the CPU.

Also the checks that a start makes of operations which a closed library decides about: experts and recurrent layers.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trencadis.backends.hpu.fused_experts import check_experts, check_fp8_experts
from trencadis.backends.hpu.habana_bridge import Bridge, emulator_hooks, fused_attention
from trencadis.backends.hpu.hpu_settings import settings
from trencadis.backends.hpu.ops import HpuOps
from trencadis.backends.hpu.recurrent_check import check_recurrent
from trencadis.backends.hpu.sampling_thresholds import sum_units
from trencadis.backends.hpu.start.kernel_cases import (
    CASES,
    ProbeModule,
    error,
    visible_before,
)

Probe = tuple[str, Callable[[], str]]
LACKING = {
    "": "the plug-in lacks it: plain operations take its place",
    "cast_to_fp8_v2": "the plug-in lacks it: no fp8 KV cache",
    "fp8_gemm_v2": "the plug-in lacks it: weights of 8-bit floats become 16 bits",
    "convert_from_uint4": "the plug-in lacks it: weights of 4 bits become 16 bits",
    "product": "no form is exact here: bfloat16 products are widened",
}


def kernel_probes(bridge: Bridge) -> Iterator[Probe]:
    """Yields (name, function to run) for every kernel; the function returns the figure of its line, or raises."""
    for name, (run, args) in kernels(bridge).items():
        yield f"kernel.{name}", partial(compare_with_cpu, bridge, run, args)
    sdpa, parts = bridge.fused_sdpa, bridge.sdpa_parts
    symbols = {
        **dict.fromkeys(ATTENTION, sdpa), "sdpa_recomp_fwd.causal": parts, "FusedRMSNorm": bridge.fused_rms_norm,
        "apply_rotary_pos_emb": bridge.apply_rotary, "cast_to_fp8_v2": bridge.cast_to_fp8_v2,
        "sdpa_recomp_fwd": parts, "product": bridge.product, "fp8_gemm_v2": bridge.fp8_gemm_v2,
        "convert_from_uint4": bridge.convert_from_uint4, "block_softmax_adjustment": bridge.block_adjustment,
    }  # fmt: skip
    for name, symbol in symbols.items():
        if symbol is not None:
            yield f"kernel.{name}", partial(check_fused_kernel, bridge, name)
        else:
            yield f"kernel.{name}", partial(str, LACKING.get(name, LACKING[""]))
    yield "kernel.mixture_of_experts", lambda: experts(bridge, bridge.experts, check_experts)
    yield "kernel.mixture_of_experts.fp8", lambda: experts(bridge, bridge.fp8_experts, check_fp8_experts)
    yield "recurrent layers", lambda: f"error {check_recurrent(open_ops(bridge)):.0e}"


def open_ops(bridge: Bridge) -> HpuOps:
    """Returns the backend's ops, whose own checks at a start are probes too."""
    emulator = emulator_hooks(bridge)
    context = nullcontext if emulator is None else emulator.launch
    return HpuOps(bridge, settings(os.environ), 128, check_context=context)


def experts(bridge: Bridge, kernel: object, check: Callable[[HpuOps], bool]) -> str:
    """Compares the plug-in's operation for experts with the product over all of them, as a start does."""
    if kernel is None:
        return LACKING[""]
    return "as the product over all experts" if check(open_ops(bridge)) else "it differs, and is not used"


def kernels(bridge: Bridge) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Returns plain operations that the model bodies use, with arguments of a few rows."""
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(8, 64, generator=g), torch.randn(64, 32, generator=g)
    rows = torch.tensor([3, 1, 6], dtype=torch.int64)
    ids = torch.randint(0, 8, (8, 5), generator=g)
    bits = torch.randint(0, 256, (4, 8), generator=g, dtype=torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8)
    small = torch.randint(-90, 90, (8, 5), generator=g).to(torch.int8)
    return {
        **({} if bridge.is_lazy() else {"made there": (add_constants, (x,))}),
        "matmul.bfloat16": (lambda a, b: a @ b, (x.bfloat16(), w.bfloat16())),
        "matmul.float32": (lambda a, b: a @ b, (x, w)),
        "softmax": (lambda a: torch.softmax(a.float(), -1), (x.bfloat16(),)),
        "silu": (lambda a: torch.nn.functional.silu(a) * a, (x.bfloat16(),)),
        "index_select": (lambda a, i: a.index_select(0, i), (x, rows)),
        "index_copy": (lambda a, i, v: a.clone().index_copy_(0, i, v), (x, rows, x[:3] + 1)),
        "index_copy.int8": (lambda a, i, v: a.clone().index_copy_(0, i, v), (small, rows, small[:3] + 1)),
        "index_put": (lambda a, i, v: a.clone().index_put_((i, i), v), (x, rows, x[:3, 0])),
        "index_reduce": (lambda a, i, v: a.clone().index_reduce_(0, i, v, "amax"), (x, rows, x[:3] + 1)),
        "gather": (lambda a, i: a.gather(1, i), (x, ids)),
        "scatter_add": (lambda a, i, v: a.clone().scatter_add_(1, i, v), (x, ids, x[:, :5])),
        "sort": (lambda a: torch.sort(a, -1, descending=True).values, (x,)),
        "topk": (lambda a: torch.topk(a, 4).values, (x,)),
        "cumsum": (lambda a: torch.cumsum(a, -1), (x,)),
        "whole units": (sum_units, (x.softmax(-1),)),
        "ceil": (lambda a: torch.ceil(a), (x,)),  # a builtin is no frame that a compiler sees
        "argmax": (lambda a: torch.argmax(a, -1), (x,)),
        "where": (lambda a: torch.where(a > 0, a, -a), (x,)),
        "masked_fill": (lambda a: a.masked_fill(a < 0, -1e4), (x,)),
        "uint8 shifts": (lambda a, s: (a[..., None] >> s) & 1, (bits, shifts)),
        "bmm": (lambda a, b: torch.bmm(a[None], b[None]), (x.bfloat16(), w.bfloat16())),
        "addmm": (lambda a, b, c: torch.addmm(c, a, b), (x, w, w[0])),
        "log_softmax": (lambda a: torch.log_softmax(a, -1), (x,)),
        "gelu": (lambda a: torch.nn.functional.gelu(a) + torch.sigmoid(a), (x,)),
        "extremes": (lambda a: torch.maximum(a.amax(-1), -a.amin(-1)).clamp_min(0.5).clamp_max(2.0), (x,)),
        "rms": (lambda a: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6), (x,)),
        "turn": (lambda a: torch.cat([a.sin(), a.cos(), a.exp() / (a.abs() + 1)], -1), (x,)),
        "merge": (lambda a, b: torch.lerp(a, b, 0.3) + torch.logaddexp(a, b) + torch.log(a.abs() + 1), (x, x.flip(0))),
        "comparisons": (lambda i: (i >= 2) & (i <= 6) | ~(i < 7) | (i == 1) | (i != 3) & (i > 0), (ids,)),
        "scatter": (lambda a, i, v: a.scatter(1, i, v), (x, ids, x[:, :5])),
        "rounding": (lambda a: (a * 9).round().clamp(-8, 8).to(torch.int8).float(), (x,)),
        "masked minimum": (lambda a: torch.minimum(a, torch.where(a > 0, 1.0, 0.5)) - a.sub(1).sum(-1, True), (x,)),
    }


def add_constants(a: Tensor) -> Tensor:
    """Adds tensors that a compiled launch makes on the card; outside one they are made on the host and copied."""
    made = torch.arange(64, device=a.device) + torch.full((64,), 2.0, device=a.device)
    return a + made + a.new_zeros(64)


class TimedLaunch(NamedTuple):
    """A probe's second launch."""

    result: Tensor  # on the host
    seconds: float
    fallbacks: str  # operations that fell back to the host; "" if none did


def time_launch(bridge: Bridge, run: Callable[..., Tensor], args: tuple[Tensor, ...]) -> TimedLaunch:
    """Launches ``run`` twice and times the second launch."""
    module: Any = ProbeModule(run)
    call = module if bridge.is_lazy() else bridge.compile(module)
    on_card = tuple(a.to(bridge.device) for a in args)
    with torch.no_grad(), bridge.metric_localcontext("cpu_fallback") as metric:
        call(*on_card)
        bridge.mark_step()
        bridge.synchronize()
        begun = time.perf_counter()
        out = call(*on_card)
        bridge.mark_step()
        bridge.synchronize()
        took = time.perf_counter() - begun
        stats = metric.stats()
        fallen = stats[1][1] if stats[0][1] and len(stats) > 1 and isinstance(stats[1][1], dict) else {}
        back = ", ".join(fallen) or (f"{stats[0][1]} operations" if stats[0][1] else "")
        return TimedLaunch(out.cpu(), took, back)


def compare_with_cpu(bridge: Bridge, run: Callable[..., Tensor], args: tuple[Tensor, ...]) -> str:
    """Runs an operation on the card and on the CPU; returns the figure of its line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its index_reduce is in beta
        found, took, back = time_launch(bridge, run, args)
        return format_figure(error(found, run(*args)), took, back)


def format_figure(off: float, took: float, back: str) -> str:
    """Formats the figure of a line: error, milliseconds, operations that fell back to the host."""
    return f"error {off:.0e}, {took * 1e3:.2f} ms" + (f"; sent back to the host: {back}" if back else "")


class AttentionCall(NamedTuple):
    """A call of ``FusedSDPA`` as a launch makes it: queries [rows, 8, queries, 64].

    Args:
        groups: KV heads.
        visible: bool [rows, 1, queries or 1, keys]; None: a causal call.
        mode: of the softmax.
    """

    groups: int
    rows: int
    queries: int
    keys: int
    visible: Tensor | None
    mode: str


HEADS = 8


_real = torch.tensor([64, 9, 33])
"""Real slots of three windows of an image."""

ATTENTION = {
    "FusedSDPA": AttentionCall(HEADS, 1, 128, 128, None, "fp32"),
    "FusedSDPA.few": AttentionCall(2, 2, 128, 128, None, "fast"),  # prompts, fewer KV heads
    "FusedSDPA.masked": AttentionCall(2, 1, 64, 192, visible_before(192, 64), "fp32"),  # prompts after stored tokens
    "FusedSDPA.masked.fast": AttentionCall(2, 1, 64, 192, visible_before(192, 64), "fast"),
    "FusedSDPA.windows": AttentionCall(
        HEADS, 3, 64, 64, (torch.arange(64) < _real[:, None])[:, None, None], "None"
    ),  # of images
}  # fmt: skip
"""Forms of masks, heads and softmax in which launches call the kernel."""


def check_attention(bridge: Bridge, case: AttentionCall, g: torch.Generator) -> str:
    """Compares the fused attention kernel with torch's on the CPU; returns the figure of its line."""
    sdpa: Any = bridge.fused_sdpa
    q = torch.randn(case.rows, HEADS, case.queries, 64, generator=g).bfloat16()
    k, v = (torch.randn(case.rows, case.groups, case.keys, 64, generator=g).bfloat16() for _ in range(2))
    causal, mode = case.visible is None, case.mode
    masks = () if case.visible is None else (case.visible,)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return fused_attention(sdpa, q, k, v, mask, causal, 64**-0.5, mode)

    found, took, back = time_launch(bridge, run, (q, k, v, *masks))
    keys, values = (t.float().repeat_interleave(HEADS // case.groups, 1) for t in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.float(), keys, values, attn_mask=case.visible, is_causal=causal
    )
    return format_figure(error(found, wanted.bfloat16()), took, back)


def check_fused_kernel(bridge: Bridge, name: str) -> str:
    """Compares a fused kernel with its formula."""
    g = torch.Generator().manual_seed(2)
    if name in ATTENTION:
        return check_attention(bridge, ATTENTION[name], g)
    if name == "FusedRMSNorm":
        norm: Any = bridge.fused_rms_norm
        x, weight = torch.randn(1, 8, 64, generator=g), torch.rand(64, generator=g)
        found, took, back = time_launch(bridge, lambda x, w: norm(x, w, 1e-6), (x, weight))
        return format_figure(error(found, weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), took, back)
    if name == "cast_to_fp8_v2":
        return fp8_cache(bridge)
    if name in LACKING or name.startswith(("sdpa_recomp_fwd", "block_softmax_adjustment")):
        return check_product_kernel(bridge, name)
    rotary: Any = bridge.apply_rotary
    x, angle = torch.randn(8, 4, 64, generator=g), torch.rand(8, 1, 64, generator=g)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    found, took, back = time_launch(bridge, lambda x, c, s: rotary(x, c, s), (x, cos, sin))
    return format_figure(error(found, x * cos + torch.cat([-second, first], -1) * sin), took, back)


def check_product_kernel(bridge: Bridge, name: str) -> str:
    """Compares a kernel of a product, or of attention's statistics, with its formula."""
    g = torch.Generator().manual_seed(5)
    run, args, wanted = CASES[name](bridge, g)
    found, took, back = time_launch(bridge, run, args)
    return format_figure(error(found, wanted), took, back)


def fp8_cache(bridge: Bridge) -> str:
    """Stores and reads 8-bit floats as an fp8 KV cache does, and checks the values."""
    to, back = bridge.cast_to_fp8_v2, bridge.cast_from_fp8
    assert to is not None and back is not None
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(3)) * 60).clamp(-240, 240)
    rows = torch.tensor([3, 1, 6], dtype=torch.int64)

    def store_and_read(x: Tensor, rows: Tensor) -> Tensor:
        codes = to(x)
        kept = codes.clone().index_copy_(0, rows, codes.index_select(0, rows))
        return back(kept, torch.float32)

    found, took, sent = time_launch(bridge, store_and_read, (x, rows))
    return format_figure(error(found, x.to(torch.float8_e4m3fn).float()), took, sent)
