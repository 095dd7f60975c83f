"""Launches of the elementwise kernels and the head at serving sizes, for ``tools.kernel_cases``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trencadis.backends.cuda.kernels import (
    activation,
    block_scaled_linear,
    gather_scatter,
    input_embeddings,
    lora_shrink_expand,
    norms,
    quantised_linear,
    sample,
    tile_sizes,
)
from trencadis.backends.cuda.kernels.activation_rounding import Rounding, round_few, round_to
from trencadis.backends.cuda.kernels.layers import skinny_gemm, skinny_quantised_gemm
from trencadis.backends.cuda.weights.quantised_weight import E4M3, INT8, QuantisedWeight, pack_quantised_weight
from trencadis.core.device.backend import AdapterWeights, HeadTensors, ResetTensors, SamplerState
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

Case = tuple[str, Callable[[], None]]
HIDDEN, INTERMEDIATE, FEATURES, VOCAB, PAIRS = 3584, 18944, PATCH_VALUES, 151_936, 300
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes in which every supported card computes."""


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def small(arch: int) -> Iterator[Case]:
    for dtype in DTYPES:
        label = str(dtype).removeprefix("torch.")
        x, gate_up = torch.empty(4, HIDDEN, dtype=dtype), torch.empty(4, 2 * INTERMEDIATE, dtype=dtype)
        pixels, factor = ints(64, FEATURES, dtype=torch.uint8), torch.empty(FEATURES)
        wide, one, many = torch.empty(64, FEATURES, dtype=dtype), ints(4), ints(4, dtype=torch.int64)
        yield f"{label} norm", lambda x=x: norms.rms_norm(x, None, x[0], 1e-6, x, x)
        yield f"{label} norm with residual", lambda x=x: norms.rms_norm(x, x, x[0], 1e-6, x, x)
        for width in (128, 256):
            heads = torch.empty(4, 16, 2, width, dtype=dtype)
            y, gate = heads[:, :, 0].contiguous(), heads[:, :, 1]
            yield f"{label} gates of {width}", lambda y=y, g=gate: norms.gate_rows(y, g, None, 0.0, y)
            yield f"{label} norms and gates of {width}", lambda y=y, g=gate: norms.gate_rows(y, g, y[0, 0], 1e-6, y)
        yield f"{label} layer norm", lambda x=x: norms.layer_norm(x, None, x[0], x[0], 1e-5, x, x)
        yield f"{label} layer norm with residual", lambda x=x: norms.layer_norm(x, x, x[0], x[0], 1e-5, x, x)
        for kind in activation.KINDS:
            yield f"{label} act {kind}", lambda x=x, kind=kind: activation.launch(x, kind, False, torch.empty_like(x))
            yield (
                f"{label} act {kind} and product",
                lambda g=gate_up, kind=kind: activation.launch(g, kind, True, g[:, :INTERMEDIATE].contiguous()),
            )
        yield from adapters(dtype)
        yield f"{label} silu", lambda g=gate_up: activation.silu_mul(g, g[:, :INTERMEDIATE])
        yield f"{label} embed", lambda x=x, i=one: input_embeddings.embed_tokens(i, i, i, i, x, x, x)
        yield f"{label} gather", lambda x=x, i=many: gather_scatter.gather(x, i, x)
        yield f"{label} scatter", lambda x=x, i=many: gather_scatter.scatter(x, i, x)
        yield f"{label} patches", lambda p=pixels, f=factor, w=wide: input_embeddings.normalise_pixels(p, f, f, w)


def adapters(dtype: torch.dtype) -> Iterator[Case]:
    """Products with slots of each rank, for few tokens and for many."""
    label = str(dtype).removeprefix("torch.")
    for rank in (8, 16, 32, 64):
        w = AdapterWeights(torch.empty(2, 2, rank, HIDDEN, dtype=dtype), (torch.empty(2, rank, 512, dtype=dtype),) * 2)
        for n in (4, 128):
            x, y = torch.empty(n, HIDDEN, dtype=dtype), torch.empty(n, 1024, dtype=dtype)
            yield (
                f"{label} adapters of rank {rank}, {'few' if n < 16 else 'many'} tokens",
                lambda x=x, y=y, w=w, n=n: lora_shrink_expand.add(y, x, ints(n), w),
            )


def sampling(arch: int) -> Iterator[Case]:
    count, width = 2, -(-VOCAB // 8)
    real, many = torch.empty(count), ints(count, dtype=torch.int64)
    state = SamplerState(
        ints(count), ints(count, VOCAB), ints(count, width, dtype=torch.uint8), ints(count, PAIRS, dtype=torch.int64),
        torch.empty(count, PAIRS),
    )  # fmt: skip
    masks = ints(count, width, dtype=torch.uint8)
    x = HeadTensors(many, many, real, ints(count), *[real] * 6, many, many, masks)
    sizes = count, VOCAB, torch.device("cpu")
    for dtype in DTYPES:
        logits = torch.empty(count, VOCAB, dtype=dtype)
        label = str(dtype).removeprefix("torch.")

        def full(logits: Tensor = logits) -> None:
            sample.draw_with_logprobs(logits, x, state, sample.scratch(*sizes), sample.outputs(*sizes, True))

        def drawn(logits: Tensor = logits) -> None:
            sample.draw_tokens(
                logits, x, state, sample.scratch(*sizes, with_logprobs=False), sample.outputs(*sizes, False)
            )

        def greedy(logits: Tensor = logits) -> None:
            sample.pick_greedy(logits, x, state, sample.greedy_scratch(*sizes), sample.outputs(*sizes, False))

        yield f"{label} head, {VOCAB} ids", full
        yield f"{label} head that draws, {VOCAB} ids", drawn
        yield f"{label} greedy head, {VOCAB} ids", greedy
    yield f"reset, {VOCAB} ids", lambda: sample.reset_slots(ResetTensors(many, *state[1:]), state)


SCHEMES = {
    "int4, groups of 128, zero points": Scheme(4, group=128, symmetric=False),
    "int4, groups of 32": Scheme(4, group=32),
    "int8": Scheme(8),
    "int8, groups of 64": Scheme(8, group=64),
    "int8 by int8": Scheme(8, activations="token"),
    "fp8": Scheme(8, "float"),
}
ROUNDED_FLOATS = Scheme(8, "float", activations="token")


def products(arch: int) -> Iterator[Case]:
    """Every line of ``tiles/quantised.csv`` and ``tiles/coded_skinny.csv``: each kind of weight in bfloat16, two and
    one in the other types.
    """
    tile_sizes.INTERPRETED = arch
    tile_sizes.find.cache_clear()
    tile_sizes.arch_of.cache_clear()
    taken = {torch.bfloat16: list(SCHEMES), torch.float16: list(SCHEMES)[::5], torch.float32: ["int8"]}
    for dtype, label in ((dtype, label) for dtype, labels in taken.items() for label in labels):
        scheme = SCHEMES[label]
        codes = torch.zeros(256, 1024, dtype=torch.float8_e4m3fn if scheme.kind == "float" else torch.int8)
        scale = torch.ones(256, 1024 // (scheme.group or 1024))
        w = pack_quantised_weight(QTensor(scheme, codes, scale, None, scheme.group or 1024, None, dtype), None, arch)
        for count in (quantised_linear.FEW, quantised_linear.SOME, 2 * quantised_linear.SOME):
            x = torch.empty(count, 1024, dtype=dtype)
            name = f"{str(dtype).removeprefix('torch.')} {label}, {count} rows"
            yield name, lambda x=x, w=w: quantised_linear.linear(x, w)
        if not w.rounds:
            name = f"{str(dtype).removeprefix('torch.')} {label}"
            if dtype != torch.float32:
                held = torch.empty(256, w.columns, dtype=dtype)
                yield f"{name}, decoded", lambda w=w, held=held: quantised_linear.decode_features(w, 0, 256, held)
            yield from fused_products(name, w, dtype)
    for label, scheme in {"int8 by int8": SCHEMES["int8 by int8"], "fp8 by fp8": ROUNDED_FLOATS}.items():
        codes = torch.zeros(256, 1024, dtype=torch.float8_e4m3fn if scheme.kind == "float" else torch.int8)
        q = QTensor(scheme, codes, torch.ones(256, 1), None, 1024, None, torch.bfloat16)
        w = pack_quantised_weight(q, None, arch)
        if w.rounds:  # 8-bit floats from sm_89 on
            yield from rounded_products(f"bfloat16 {label}", w)
    if arch == block_scaled_linear.HOPPER:
        for rows, label in ((block_scaled_linear.VALUES_ROWS, "few"), (1024, "many")):
            how = block_scaled_linear.choose_rounding(rows, torch.bfloat16)
            yield from roundings(f"bfloat16 fp8 in blocks, {label} rows", how)


def rounded_products(name: str, w: QuantisedWeight) -> Iterator[Case]:
    """Those of decoder layers behind rounded activations, 16 rows and 8, and the rounding behind a norm and alone, of
    wide rows.
    """
    arrived = ints(skinny_gemm.COUNTERS)
    for rows in (skinny_gemm.FEW, skinny_quantised_gemm.FEW):
        x, out = (torch.empty(rows, width, dtype=torch.bfloat16) for width in (w.in_features, w.out_features))
        few = ", 8 rows" if rows == skinny_quantised_gemm.FEW else ""
        codes = x.half() if w.kind == E4M3 else x
        for part, gate, residual in (("gate and up", True, None), ("down", False, out)):

            def run(
                codes: Tensor = codes, x: Tensor = x, gate: bool = gate, residual: Tensor | None = residual
            ) -> None:
                scales = torch.empty(len(x))
                skinny_quantised_gemm.product(codes, w, arrived, None, gate, residual, scales, x.dtype)

            yield f"{name}, {part}{few}", run
    x, wide = (torch.empty(16, width, dtype=torch.bfloat16) for width in (w.in_features, 18_944))
    norm = skinny_gemm.NormOf(x[0], 1e-6, x, torch.empty_like(x))
    yield f"{name}, rounded behind a norm", lambda: (round_few(x, w.kind, norm), None)[1]
    yield f"{name}, rounded", lambda: (round_few(wide, w.kind), None)[1]
    how = Rounding(w.kind, torch.int8 if w.kind == INT8 else torch.float8_e4m3fn)
    yield from roundings(f"{name}, many rows", how)


def roundings(name: str, how: Rounding) -> Iterator[Case]:
    """Rounding of many rows: alone, behind a norm with its residual, and behind SiLU."""
    x, gate_up = (torch.empty(4, width, dtype=torch.bfloat16) for width in (HIDDEN, 2 * INTERMEDIATE))
    norm = skinny_gemm.NormOf(x[0], 1e-6, x, torch.empty_like(x))
    yield f"{name}, rounded", lambda: (round_to(x, how), None)[1]
    yield f"{name}, rounded within a norm", lambda: (round_to(x, how, norm), None)[1]
    yield f"{name}, rounded within SiLU", lambda: (round_to(gate_up, how, gate=True), None)[1]


def fused_products(name: str, w: QuantisedWeight, dtype: torch.dtype) -> Iterator[Case]:
    """Those of decoder layers over codes: behind a norm with gate and up, and before a residual; 16 rows and 8, which
    have one tile in float32.
    """
    arrived = ints(skinny_gemm.COUNTERS)
    for rows in (skinny_gemm.FEW, skinny_quantised_gemm.FEW)[: 1 if dtype == torch.float32 else 2]:
        x, out = torch.empty(rows, w.in_features, dtype=dtype), torch.empty(rows, w.out_features, dtype=dtype)
        norm = skinny_gemm.NormOf(x[0], 1e-6)
        few = ", 8 rows" if rows == skinny_quantised_gemm.FEW else ""

        def gate(x: Tensor = x, norm: skinny_gemm.NormOf = norm) -> None:
            skinny_quantised_gemm.product(x, w, arrived, norm, gate=True)

        def down(x: Tensor = x, out: Tensor = out) -> None:
            skinny_quantised_gemm.product(x, w, arrived, residual=out)

        yield f"{name}, gate and up{few}", gate
        yield f"{name}, down{few}", down
