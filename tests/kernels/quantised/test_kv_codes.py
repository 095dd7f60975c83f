"""The 8-bit KV cache in Triton: codes and attention against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracles.attention_cases import Case, Prepared, frequencies, prepared
from tests.quant.coded_caches import filled
from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.ops import CudaOps
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import BackendConfig, LayerKV, Rotary
from trencadis.core.models.kv_cache_quantisation import read_slots, store

triton = pytest.importorskip("triton")
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def clones(kv: LayerKV, device: torch.device) -> LayerKV:
    return LayerKV(*(t.to(device, copy=True) if t is not None else None for t in kv))  # type: ignore[arg-type]


def poisoned(kv: LayerKV, ready: Prepared) -> LayerKV:
    """NaN in the scales and kept values of SINK, of blocks of no row, and behind the last key of a row."""
    live = torch.zeros(kv.k.shape[:2], dtype=torch.bool)
    live[0] = True
    for row, (context, _) in enumerate(ready.case.rows):
        for place in range(context):
            live[ready.inputs.blocks[row, place // ready.case.block], place % ready.case.block] = True
    made = clones(kv, torch.device("cpu"))
    for t in made[2:5]:
        if t is not None:
            t[~live] = float("nan")
    return made


def reference(case: Case, ready: Prepared, cache: LayerKV) -> tuple[torch.Tensor, LayerKV]:
    """The reference on float32 values of q, k and v after rotary in the case's type."""
    ops, n = ReferenceOps(), len(ready.inputs.tokens)
    backend = make_backend(BackendConfig(block_size=case.block, options={"threads": "1"}))
    program: Any = backend.program(Bucket(Stage.PREFILL, (n, len(case.rows))), print)
    backend.fill(program, ready.inputs)
    attn, kv = program.inputs.attn, clones(cache, torch.device("cpu"))
    rotary = ops.rotary(program.inputs.positions, *frequencies(case.d))
    q, k, v = (t[:n].cpu().float() for t in (ready.q, ready.k, ready.v))
    plain = LayerKV(*(torch.zeros(cache.k.shape) for _ in range(2)))
    q, k, v = (t.to(case.dtype).float() for t in ops.rope_store(q, k, v, rotary, plain, attn))
    store(k, v, kv, attn.slot_map)
    return ops.attend(q, k, v, kv, attn, case.d**-0.5), kv


def check(case: Case, kind: str, kept: int, device: torch.device, static: bool = False) -> None:
    ready = prepared(case, device)
    generator = torch.Generator().manual_seed(3)
    blocks = ready.cache.k.shape[0]
    cache = filled(kind, blocks, case.block, case.kv_heads, case.d, kept, case.dtype, generator)
    for t in cache[:5]:
        if t is not None:
            t[0] = 0
    if static:
        cache = cache._replace(static=torch.tensor([0.04, 0.03]))
    want, stored = reference(case, ready, cache)
    held = clones(poisoned(cache, ready), device)
    ops, attn, n = CudaOps(), ready.tensors.attn, len(ready.inputs.tokens)
    q, k, v = ops.rope_store(ready.q, ready.k, ready.v, Rotary(ready.cos, ready.sin), held, attn)
    out = ops.attend(q, k, v, held, attn, case.d**-0.5).cpu()
    assert not out[n:].any(), "surplus tokens get 0"
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out[:n].float(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
    real = attn.slot_map[:n].cpu()
    pairs = zip(*(read_slots(t, real, torch.float32) for t in (clones(held, torch.device("cpu")), stored)), strict=True)
    for got, wanted in pairs:
        assert float((got - wanted).abs().mean()) < 2e-3, "a code beside a boundary may differ, no more"
    if static:
        scales = (t.k_scale.cpu().flatten(0, 1)[real] for t in (held, stored))  # type: ignore[union-attr]
        assert torch.equal(*scales)


ROWS = ((0, 5), (21, 3), (17, 1), (40, 9))
SINGLE = ((9, 1), (0, 1), (75, 1), (15, 1))


@pytest.mark.parametrize(
    ("case", "kind", "kept", "static"),
    [
        (Case(ROWS), "int8", 8, False), (Case(ROWS, dtype=torch.float16, d=32), "fp8", 8, False),
        (Case(ROWS, dtype=torch.bfloat16, invariant=True), "fp8", 0, False),
        (Case(SINGLE, decode=True), "fp8", 8, True),
        (Case(SINGLE, decode=True, dtype=torch.bfloat16, group=3), "int8", 8, False),
        (Case(SINGLE, decode=True, dtype=torch.float16), "int8", 0, True),
    ],
)  # fmt: skip
def test_kernels_are_the_reference(case: Case, kind: str, kept: int, static: bool, device: torch.device) -> None:
    check(case, kind, kept, device, static)


@pytest.mark.long
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kept", [0, 8])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [16, 80, 128])
@pytest.mark.parametrize("decode", [False, True])
def test_kernels_are_the_reference_long(
    decode: bool, d: int, dtype: torch.dtype, kind: str, kept: int, static: bool, device: torch.device
) -> None:
    for group, block in ((1, 16), (7, 64)):
        rows = SINGLE if decode else ROWS
        check(Case(rows, decode=decode, d=d, dtype=dtype, group=group, block=block), kind, kept, device, static)
