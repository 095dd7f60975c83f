"""The elementwise kernels at the sizes of Qwen2.5-VL-7B, each against torch's eager and compiled ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.kernels.case import Case
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.kernels import activation, gather_scatter, input_embeddings, norms
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

HIDDEN, INTERMEDIATE, FEATURES = 3584, 18944, PATCH_VALUES
DTYPE = torch.bfloat16


def compiled(f: Callable[..., object]) -> Callable[..., object]:
    """``torch.compile`` of ``f``, made at its first call."""
    made: list[Callable[..., object]] = []

    def call(*args: object) -> object:
        if not made:
            made.append(torch.compile(f, dynamic=False))
        return made[0](*args)

    return call


def away(x: object, y: object) -> float:
    """Largest absolute difference of two tensors."""
    assert isinstance(x, Tensor) and isinstance(y, Tensor)
    return float((x.float() - y.float()).abs().max())


def norm_case(n: int, width: int, device: torch.device) -> Case:
    x, residual = (torch.randn(n, width, dtype=DTYPE, device=device) for _ in range(2))
    weight, total, out = torch.randn(width, dtype=DTYPE, device=device), torch.empty_like(x), torch.empty_like(x)
    ops = ReferenceOps()

    def run() -> Tensor:
        norms.rms_norm(x, residual, weight, 1e-6, total, out)
        return out

    def eager() -> Tensor:
        return ops.rms_norm(x, weight, 1e-6, residual)[0]

    fused = compiled(lambda a, b, w: ops.rms_norm(a, w, 1e-6, b))
    return Case(
        f"norm with residual {n} x {width}", "norm", run, bytes=4 * x.nbytes, flops=0, bound="copy",
        baselines={"eager": eager, "torch.compile": lambda: fused(x, residual, weight)},
        check=lambda: away(run(), eager()),
    )  # fmt: skip


def silu_case(n: int, width: int, device: torch.device) -> Case:
    gate_up, ops = torch.randn(n, 2 * width, dtype=DTYPE, device=device), ReferenceOps()
    out = torch.empty(n, width, dtype=DTYPE, device=device)
    fused = compiled(ops.silu_mul)

    def run() -> Tensor:
        activation.silu_mul(gate_up, out)
        return out

    return Case(
        f"silu * up {n} x {width}", "silu", run, bytes=gate_up.nbytes + out.nbytes, flops=0, bound="copy",
        baselines={"eager": lambda: ops.silu_mul(gate_up), "torch.compile": lambda: fused(gate_up)},
        check=lambda: away(run(), ops.silu_mul(gate_up)),
    )  # fmt: skip


def patches_case(slots: int, device: torch.device) -> Case:
    pixels = torch.randint(0, 256, (slots, FEATURES), dtype=torch.uint8, device=device)
    scale, shift = torch.rand(FEATURES, device=device) / 64, torch.randn(FEATURES, device=device)
    out, ops = torch.empty(slots, FEATURES, dtype=DTYPE, device=device), ReferenceOps()

    def run() -> Tensor:
        input_embeddings.normalise_pixels(pixels, scale, shift, out)
        return out

    def eager() -> Tensor:
        return ops.patches(pixels, scale, shift, DTYPE)

    return Case(
        f"patches {slots} x {FEATURES}", "patches", run, bytes=pixels.nbytes + out.nbytes, flops=0, bound="copy",
        baselines={"eager": eager}, check=lambda: away(run(), eager()),
    )  # fmt: skip


def embed_case(n: int, device: torch.device) -> Case:
    table, arena = (torch.randn(m, HIDDEN, dtype=DTYPE, device=device) for m in (32_000, 4096))
    tokens = torch.randint(0, 32_000, (n,), dtype=torch.int32, device=device)
    image = torch.where(torch.rand(n, device=device) < 0.5, torch.randint(2, 4096, (n,), device=device), 0).int()
    none, last = torch.zeros_like(tokens), torch.zeros(9, dtype=torch.int32, device=device)
    out, ops = torch.empty(n, HIDDEN, dtype=DTYPE, device=device), ReferenceOps()

    def run() -> Tensor:
        input_embeddings.embed_tokens(tokens, none, last, image, arena, table, out)
        return out

    def eager() -> Tensor:
        return ops.embed(tokens, none, last, image, arena, table)

    return Case(
        f"embed {n} x {HIDDEN}", "embed", run, bytes=2 * out.nbytes, flops=0, bound="copy",
        baselines={"eager": eager}, check=lambda: away(run(), eager()),
    )  # fmt: skip


def rows_case(n: int, device: torch.device, gather: bool) -> Case:
    source = torch.randn(8193, HIDDEN, dtype=DTYPE, device=device)
    index = torch.randperm(8193, device=device)[:n]
    part = source[index].contiguous()

    def run() -> Tensor:
        if gather:
            gather_scatter.gather(source, index, part)
            return part
        gather_scatter.scatter(source, index, part)
        return source

    eager = (lambda: source.index_select(0, index)) if gather else (lambda: source.index_copy_(0, index, part))
    name = "gather" if gather else "scatter"
    return Case(
        f"{name} {n} x {HIDDEN}", "rows", run, bytes=2 * part.nbytes, flops=0, bound="copy",
        baselines={"eager": eager}, check=lambda: away(run(), eager()),
    )  # fmt: skip


def cases(device: torch.device, small: bool = False) -> Iterator[Case]:
    """Decode and prefill sizes; ``small``: sizes that an interpreter can run."""
    for n in (3,) if small else (64, 8192):
        yield norm_case(n, 256 if small else HIDDEN, device)
        yield silu_case(n, 100 if small else INTERMEDIATE, device)
    for n in (2,) if small else (8192,):
        yield embed_case(n, device)
        yield rows_case(n, device, gather=True)
        yield rows_case(n, device, gather=False)
    yield patches_case(64 if small else 12_544, device)
