"""The lines of ``trencadis check-hpu`` that need the card: each kernel once, copies, a graph, a collective.

Each probe compares with the CPU and reports the error. No probe depends on another, so that one run shows everything
that is wrong.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from trencadis.backends.hpu.bridge import Bridge, fused_attention

T = TypeVar("T")
Probe = tuple[str, Callable[[], str]]
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest allowed error as a share of the largest magnitude, by dtype."""


class ProbeFailed(Exception):
    """A kernel's or a copy's result is wrong; the message gives the error."""


class ProbeModule(nn.Module):
    """A function as a module, so that it can be compiled or captured.

    It is the module's ``forward`` itself: torch keeps a few compiled variants for each code object, and a shared one
    would exceed that limit after the eighth probe.
    """

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = run


LACKING = {
    "": "the plug-in lacks it: plain operations take its place",
    "cast_to_fp8_v2": "the plug-in lacks it: no fp8 KV cache",
    "fp8_gemm_v2": "the plug-in lacks it: weights of 8-bit floats become 16 bits",
    "convert_from_uint4": "the plug-in lacks it: weights of 4 bits become 16 bits",
    "product": "no form is exact here: bfloat16 products are widened",
}


def probes(bridge: Bridge) -> Iterator[Probe]:
    """Yields (name, function to run) for every probe; the function returns the figure of its line, or raises."""
    for name, (run, args) in kernels(bridge).items():
        yield f"kernel.{name}", lambda run=run, args=args: compare_with_cpu(bridge, run, args)  # type: ignore[misc]
    symbols = {
        "FusedSDPA": bridge.fused_sdpa, "FusedRMSNorm": bridge.fused_rms_norm,
        "apply_rotary_pos_emb": bridge.apply_rotary, "cast_to_fp8_v2": bridge.cast_to_fp8_v2,
        "sdpa_recomp_fwd": bridge.sdpa_parts, "product": bridge.product, "fp8_gemm_v2": bridge.fp8_gemm_v2,
        "convert_from_uint4": bridge.convert_from_uint4, "block_softmax_adjustment": bridge.block_adjustment,
    }  # fmt: skip
    for name, symbol in symbols.items():
        if symbol is not None:
            yield f"kernel.{name}", lambda name=name: check_fused_kernel(bridge, name)  # type: ignore[misc]
        else:
            yield f"kernel.{name}", lambda name=name: LACKING.get(name, LACKING[""])  # type: ignore[misc]
    yield "copies", lambda: copies(bridge)
    yield "pinned memory", lambda: pinned_upload(bridge)
    yield "fetch beside a launch", lambda: fetch_beside_launch(bridge)
    yield "events", lambda: events(bridge)
    yield "views of one upload", lambda: input_views(bridge)
    yield "store in place", lambda: store_in_place(bridge)
    yield "compile-only mode", lambda: compile_only(bridge)
    yield "memory", lambda: memory(bridge)
    yield "graph" if bridge.is_lazy() else "compiled launch", lambda: graph(bridge)
    yield "collective", lambda: collective(bridge)


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
        "masked minimum": (
            lambda a: torch.minimum(a, torch.where(a > 0, 1.0, 0.5)) - a.sub(1).sum(-1, keepdim=True),
            (x,),
        ),
    }


def add_constants(a: Tensor) -> Tensor:
    """Adds tensors that a compiled launch makes on the card; outside one they are made on the host and copied."""
    made = torch.arange(64, device=a.device) + torch.full((64,), 2.0, device=a.device)
    return a + made + a.new_zeros(64)


def time_launch(bridge: Bridge, run: Callable[..., Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, float, str]:
    """Returns (result on the host, seconds of a second launch, operations that fell back to the host)."""
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
        return out.cpu(), took, back


def compare_with_cpu(bridge: Bridge, run: Callable[..., Tensor], args: tuple[Tensor, ...]) -> str:
    """Runs an operation on the card and on the CPU; returns the figure of its line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its index_reduce is in beta
        found, took, back = time_launch(bridge, run, args)
        return format_figure(error(found, run(*args)), took, back)


def format_figure(off: float, took: float, back: str) -> str:
    """Formats the figure of a line: error, milliseconds, operations that fell back to the host."""
    return f"error {off:.0e}, {took * 1e3:.2f} ms" + (f"; sent back to the host: {back}" if back else "")


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


def check_fused_kernel(bridge: Bridge, name: str) -> str:
    """Compares a fused kernel with its formula."""
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 4, 128, 64, generator=g).bfloat16() for _ in range(3))
    if name == "FusedSDPA":
        sdpa: Any = bridge.fused_sdpa
        scale = 64**-0.5
        found, took, back = time_launch(
            bridge, lambda q, k, v: fused_attention(sdpa, q, k, v, None, True, scale, "fp32"), (q, k, v)
        )
        wide = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
        return format_figure(error(found, wide.bfloat16()), took, back)
    if name == "FusedRMSNorm":
        norm: Any = bridge.fused_rms_norm
        x, weight = torch.randn(1, 8, 64, generator=g), torch.rand(64, generator=g)
        found, took, back = time_launch(bridge, lambda x, w: norm(x, w, 1e-6), (x, weight))
        return format_figure(error(found, weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), took, back)
    if name == "cast_to_fp8_v2":
        return fp8_cache(bridge)
    if name in LACKING or name in ("sdpa_recomp_fwd", "block_softmax_adjustment"):
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
    run, args, wanted = {
        "sdpa_recomp_fwd": _statistics_case, "product": _wide_product_case, "fp8_gemm_v2": _fp8_product_case,
        "convert_from_uint4": _unpack_case, "block_softmax_adjustment": _adjustment_case,
    }[name](bridge, g)  # fmt: skip
    found, took, back = time_launch(bridge, run, args)
    return format_figure(error(found, wanted), took, back)


class KernelCase(NamedTuple):
    """A function to run on the card, its arguments, and the right result."""

    run: Callable[..., Tensor]
    args: tuple[Tensor, ...]
    wanted: Tensor


def _statistics_case(bridge: Bridge, g: torch.Generator) -> KernelCase:
    """Attention over some keys, multiplied by its sum of exponentials: what merging parts needs of the statistics."""
    parts, scale = _require(bridge.sdpa_parts), 64**-0.5
    q = torch.randn(1, 4, 8, 64, generator=g).bfloat16()
    k, v = (torch.randn(1, 2, 16, 64, generator=g).bfloat16() for _ in range(2))
    mask = (torch.arange(16) < 11).view(1, 1, 1, 16)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out, high, inverse = parts(q, k, v, mask, False, scale, "fp32")
        return out.float() * high.float().exp() / inverse.float()

    scores = q.float() @ k.float().repeat_interleave(2, 1).transpose(2, 3) * scale
    share = scores.exp() * mask
    return KernelCase(run, (q, k, v, mask), (share @ v.float().repeat_interleave(2, 1)).bfloat16())


def _wide_product_case(bridge: Bridge, g: torch.Generator) -> KernelCase:
    a, b = torch.randn(2, 4, 64, generator=g).bfloat16(), torch.randn(2, 64, 8, generator=g).bfloat16()
    return KernelCase(_require(bridge.product), (a, b), a.float() @ b.float())


def _fp8_product_case(bridge: Bridge, g: torch.Generator) -> KernelCase:
    multiply, cast = _require(bridge.fp8_gemm_v2), _require(bridge.cast_to_fp8_v2)
    x, w = (torch.randint(-8, 9, (n, 32), generator=g).float() for n in (5, 16))
    scale, each = torch.rand(5, 1, generator=g) + 0.5, torch.rand(16, generator=g) + 0.5

    def run(x: Tensor, w: Tensor, scale: Tensor, each: Tensor) -> Tensor:
        return multiply(cast(x), cast(w), torch.float32, scale, each, None)

    return KernelCase(run, (x, w, scale, each), (x * scale) @ (w * each[:, None]).t())


def _unpack_case(bridge: Bridge, g: torch.Generator) -> KernelCase:
    unpack = _require(bridge.convert_from_uint4)
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
    adjust, shape = _require(bridge.block_adjustment), [3, 2, 2, 1, 1]
    high, total = torch.randn(shape, generator=g), torch.rand(shape, generator=g) + 1
    rows = torch.zeros(3, dtype=torch.int32)

    def run(high: Tensor, total: Tensor, rows: Tensor) -> Tensor:
        return adjust(high, total, rows, 1, shape)

    factor = (high - high.amax(0)).exp()
    return KernelCase(run, (high, total, rows), factor / (factor * total).sum(0))


def _require(kernel: Callable[..., T] | None) -> Callable[..., T]:
    assert kernel is not None, "only kernels that the bridge has are probed"
    return kernel


def input_views(bridge: Bridge) -> str:
    """Runs a launch on views of one uploaded piece, as every launch gets its inputs, and again with other values."""
    module: Any = ProbeModule(lambda a, b, c: a + b.sum() * c)
    piece = torch.zeros(96, dtype=torch.int32, device=bridge.device)
    views = piece[:32], piece[32:40].view(2, 4), piece[64:96]
    call = bridge.wrap_in_hpu_graph(module).forward if bridge.is_lazy() else bridge.compile(module)
    with torch.no_grad():
        for first in range(3):
            host = torch.arange(first, first + 96, dtype=torch.int32)
            piece.copy_(bridge.pin(host), non_blocking=bridge.pinned)
            out = call(*views)
            bridge.mark_step()
            error(out.cpu(), host[:32] + host[32:40].sum() * host[64:96])
    return "three launches read what was uploaded last"


def store_in_place(bridge: Bridge) -> str:
    """Stores rows into a large tensor inside a launch, as a layer stores keys, and checks that the others stay."""
    module: Any = ProbeModule(lambda cache, rows, x: cache.index_copy_(0, rows, x * 2))
    cache = torch.zeros((1 << 14, 64), dtype=torch.bfloat16, device=bridge.device)
    rows, x = torch.tensor([3, 1, 9000], dtype=torch.int64), torch.ones(3, 64, dtype=torch.bfloat16)
    call = module if bridge.is_lazy() else bridge.compile(module)
    with torch.no_grad():
        call(cache, rows.to(bridge.device), x.to(bridge.device))
        bridge.mark_step()
    found, wanted = cache.cpu(), torch.zeros(1 << 14, 64, dtype=torch.bfloat16)
    wanted[rows] = 2
    error(found, wanted)
    return "3 of 16,384 rows written"


def compile_only(bridge: Bridge) -> str:
    """Compiles a launch in the mode that computes nothing, then runs it."""
    module: Any = ProbeModule(lambda x: torch.softmax(x * 3, -1))
    x = torch.randn(4, 96)
    call = module if bridge.is_lazy() else bridge.compile(module)
    with torch.no_grad():
        held = x.to(bridge.device)
        with bridge.compile_only():
            call(held)
            bridge.mark_step()
        with bridge.metric_localcontext("graph_compilation") as metric:
            out = call(held)
            bridge.mark_step()
            off = error(out.cpu(), torch.softmax(x * 3, -1))
        return f"error {off:.0e}, {bridge.compilations(metric)} compilations left to the first run"


def memory(bridge: Bridge) -> str:
    """Takes 64 MiB and gives them back; compares with what the plug-in reports."""
    bridge.synchronize()
    before, total = bridge.mem_get_info()
    held = torch.zeros(64 << 20, dtype=torch.uint8, device=bridge.device)
    bridge.synchronize()
    taken = before - bridge.mem_get_info()[0]
    del held
    bridge.synchronize()
    back = taken - (before - bridge.mem_get_info()[0])
    if not 0 <= before <= total:
        raise ProbeFailed(f"{before} of {total} bytes are free")
    return f"64 MiB take {taken >> 20} MiB, {back >> 20} MiB come back"


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


def copies(bridge: Bridge) -> str:
    """Copies 8 MB to the card without blocking, and back with blocking."""
    host = torch.arange(2 << 20, dtype=torch.int32)
    target = torch.zeros(host.shape, dtype=host.dtype, device=bridge.device)
    bridge.synchronize()
    begun = time.perf_counter()
    target.copy_(host, non_blocking=True)
    bridge.synchronize()
    there = time.perf_counter() - begun
    begun = time.perf_counter()
    found = target.cpu()
    back = time.perf_counter() - begun
    if not torch.equal(found, host):
        raise ProbeFailed(f"{int((found != host).sum())} of {host.numel()} values differ after both copies")
    rate = host.nbytes / 1e9
    return f"to the card {rate / there:.1f} GB/s, back {rate / back:.1f} GB/s"


def pinned_upload(bridge: Bridge) -> str:
    """Copies 8 MB from the memory that uploads use, without blocking where it is pinned, and checks the values."""
    host = bridge.pin(torch.arange(2 << 20, dtype=torch.int32))
    target = torch.zeros(host.shape, dtype=host.dtype, device=bridge.device)
    bridge.synchronize()
    begun = time.perf_counter()
    target.copy_(host, non_blocking=bridge.pinned)
    bridge.synchronize()
    took = time.perf_counter() - begun
    wrong = int((target.cpu() != host).sum())
    if wrong:
        raise ProbeFailed(f"{wrong} of {host.numel()} values differ")
    kind = "pinned" if bridge.pinned else "refused: ordinary memory, and copies block"
    return f"{kind}, to the card {host.nbytes / 1e9 / took:.1f} GB/s"


def fetch_beside_launch(bridge: Bridge) -> str:
    """Fetches a result while another launch is queued, waits for an event alone, and checks the values."""
    x = torch.arange(1 << 16, dtype=torch.float32)
    first = x.to(bridge.device) + 1
    bridge.mark_step()
    landing, event = bridge.pin(torch.zeros_like(x)), bridge.event()
    landing.copy_(first, non_blocking=bridge.pinned)
    event.record()
    second = first * 2
    bridge.mark_step()
    event.synchronize()
    off = error(landing.clone(), x + 1)
    error(second.cpu(), (x + 1) * 2)
    return f"the event waits for the fetch, error {off:.0e}"


def events(bridge: Bridge) -> str:
    """Records an event behind a copy and waits for it."""
    event, target = bridge.event(), torch.zeros(1 << 16, dtype=torch.int32, device=bridge.device)
    target.copy_(bridge.pin(torch.ones(1 << 16, dtype=torch.int32)), non_blocking=bridge.pinned)
    event.record()
    begun = time.perf_counter()
    event.synchronize()
    return f"{(time.perf_counter() - begun) * 1e6:.0f} us to wait for a copy of 256 KiB"


def graph(bridge: Bridge) -> str:
    """Captures (lazy mode) or compiles a small launch, and runs it again with other values in the same tensors."""
    module: Any = ProbeModule(lambda x, w: torch.softmax(x @ w, -1))
    x, w = torch.randn(4, 16), torch.randn(16, 16)
    static, weight = x.to(bridge.device), w.to(bridge.device)
    free = bridge.mem_get_info()[0]
    with torch.no_grad():
        call = bridge.wrap_in_hpu_graph(module).forward if bridge.is_lazy() else bridge.compile(module)
        out = call(static, weight)
        bridge.synchronize()
        for _ in range(2):
            x = torch.randn(4, 16)
            static.copy_(x)
            out = call(static, weight)
            bridge.mark_step()
        off = error(out.cpu(), torch.softmax(x @ w, -1))
    kind = "captured and replayed" if bridge.is_lazy() else "compiled and run again (compile mode has no graphs)"
    return f"{kind}, error {off:.0e}, {max(free - bridge.mem_get_info()[0], 0)} bytes"


def collective(bridge: Bridge) -> str:
    """Sums over a group of one, through the library that several ranks use."""
    name = bridge.collective_backend
    if torch.distributed.is_initialized():
        return "a group exists already"
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder, 'store')}"
        torch.distributed.init_process_group(name, init_method=meeting, rank=0, world_size=1)
        try:
            x = torch.ones(16).to(bridge.device)
            out = bridge.all_reduce(x).cpu()
        finally:
            torch.distributed.destroy_process_group()
    error(out, torch.ones(16))
    return f"all_reduce over {name}, one rank"
