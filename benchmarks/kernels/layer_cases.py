"""Products of few rows, whole decoder layers and experts at the sizes of Qwen2.5-VL-3B, 7B and Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.layers import SHAPES, SMALL, LayerRun, LayerShape
from benchmarks.kernels.case import Case
from trencadis.backends.cpu.reference_ops import PlainWeight, ReferenceOps
from trencadis.backends.cuda.kernels import fused_moe, tile_sizes
from trencadis.backends.cuda.kernels.layers import skinny_gemm, skinny_quantised_gemm
from trencadis.backends.cuda.ops import CudaOps
from trencadis.backends.cuda.weights.quantised_weight import dequantise, pack_quantised_weight
from trencadis.core.quant import online_quant
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme

DTYPE = torch.bfloat16
CODES = {"int4": Scheme(4, group=128), "int8": Scheme(8), "fp8": Scheme(8, "float", activations="none")}
EXPERTS, TOP, EXPERT_INNER, EXPERT_HIDDEN = 128, 8, 768, 2048


def skinny(
    rows: int, out: int, columns: int, device: torch.device, dtype: torch.dtype = DTYPE, codes: str = "",
    gate: bool = False,
) -> Case:  # fmt: skip
    """One product of few rows behind a norm; ``gate``: the SiLU of its first half times the second."""
    dense = torch.randn(out, columns, dtype=dtype, device=device) / columns**0.5
    x, weight = (torch.randn(n, columns, dtype=dtype, device=device) for n in (rows, 1))
    arrived, norm = skinny_gemm.counters(device), skinny_gemm.NormOf(weight[0], 1e-6)
    w: Any = PlainWeight(dense, None, out, columns)
    multiply: Any = skinny_gemm.product
    values = dense.float()
    if codes:
        w = pack_quantised_weight(online_quant.quantise(dense, CODES[codes], dtype), None, tile_sizes.arch_of(device))
        multiply, values = skinny_quantised_gemm.product, dequantise(w)

    def run() -> Tensor:
        found: Tensor = multiply(x, w, arrived, norm, gate)
        return found

    def check() -> float:
        normed = functional.rms_norm(x.float(), (columns,), weight[0].float(), 1e-6)
        want = normed @ values.t()
        if gate:
            first, second = want.chunk(2, 1)
            want = functional.silu(first) * second
        return float((run().float() - want).abs().max())

    size, label = w.nbytes if codes else dense.nbytes, f"{codes or 'dense'}{', gate' * gate}"
    return Case(
        f"skinny {label}, {rows} rows, {out} x {columns}", "skinny", run, bytes=size, flops=0, bound="read",
        baselines={"cuBLAS": lambda: functional.linear(x, dense)}, check=check,
    )  # fmt: skip


class OpByOp(CudaOps):
    """Layers of ten launches."""

    whole_layers = False


def layer(name: str, shape: LayerShape, rows: int, device: torch.device, dtype: torch.dtype = DTYPE) -> Case:
    """A whole layer in six launches, beside the same one op by op."""
    run = LayerRun(shape, (40,) * rows if device.type == "cpu" else (1024,) * rows, dtype, device)
    own, plain = CudaOps(), OpByOp()
    layers = run.layer(own), run.layer(plain)
    size = sum(t.nbytes for t in run.weights.values())

    def call() -> Tensor:
        return run.call(layers[0], own)

    return Case(
        f"layer {name}, {rows} rows", "layer", call, bytes=size, flops=0, bound="read",
        baselines={"op by op": lambda: run.call(layers[1], plain)},
        check=lambda: float((call() - run.call(layers[1], plain)).float().abs().max()), reset=run.reset,
    )  # fmt: skip


def experts(
    rows: int, device: torch.device, small: bool = False, codes: Scheme | None = None, gated: bool = True
) -> Case:
    """The experts of one layer, of which each token takes some: as ``codes`` if given, gated unless told."""
    count, top, inner, hidden = (4, 2, 32, 64) if small else (EXPERTS, TOP, EXPERT_INNER, EXPERT_HIDDEN)
    dtype = torch.float32 if small else DTYPE
    sides, kind = (2, "silu") if gated else (1, "relu2")
    gate_up = [torch.randn(sides * inner, hidden, dtype=dtype, device=device) / hidden**0.5 for _ in range(count)]
    down = [torch.randn(hidden, inner, dtype=dtype, device=device) / inner**0.5 for _ in range(count)]
    x, scores = (torch.randn(rows, n, dtype=dtype, device=device) for n in (hidden, count))
    held: Any = CudaOps().pack_experts(gate_up, down)
    if codes is not None:
        coded = [[online_quant.quantise(one, codes, dtype) for one in some] for some in (gate_up, down)]
        held = CudaOps().pack_quantised_experts(coded[0], coded[1])
        gate_up, down = ([q.values() for q in some] for some in coded)
    ops = ReferenceOps()
    reference = ops.pack_experts(gate_up, down)

    def run() -> Tensor:
        return fused_moe.run(x, scores, held, top, True, kind)

    used = min(count, rows * top)
    size = used * held.nbytes // count
    label = ("" if gated else " without gates") + ("" if codes is None else f" of {codes.label}")
    return Case(
        f"experts {count} take {top}{label}, {rows} rows", "experts", run, bytes=size,
        flops=2 * (sides + 1) * rows * top * inner * hidden, bound="read" if rows <= 64 else "flops",
        check=lambda: float((run() - ops.experts(x, scores, reference, top, True, kind)).float().abs().max()),
    )  # fmt: skip


def cases(device: torch.device, small: bool = False) -> Iterator[Case]:
    """Decoding; ``small``: sizes that an interpreter can run."""
    if small:
        yield skinny(2, 64, 512, device, torch.float32)
        yield skinny(2, 64, 512, device, torch.float32, "int4")
        yield layer("narrow", SMALL["narrow"], 1, device, torch.float32)
        yield experts(3, device, small=True)
        yield experts(3, device, small=True, codes=Scheme(4, group=32))
        yield experts(300, device, small=True)  # tiles of prompts
        yield experts(3, device, small=True, gated=False)
        return
    for out, columns in ((2560, 2048), (37_888, 3584), (3584, 18_944)):
        for rows in (1, 16):
            for codes in ("", *CODES):
                yield skinny(rows, out, columns, device, codes=codes)
    for name, shape in SHAPES.items():
        for rows in (1, 16):
            yield layer(name, shape, rows, device)
    for rows in (1, 64, 4096):
        yield experts(rows, device)
        yield experts(rows, device, codes=Scheme(4, group=32))
