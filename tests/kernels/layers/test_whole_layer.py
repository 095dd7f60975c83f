"""A decoder layer of few rows in six launches equals the reference, whoever arrives last."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles import interpreter
from tests.oracles.layers.layer_cases import LayerCase, LayerRun
from trencadis.backends.cpu.reference_ops import PlainWeight
from trencadis.backends.cuda.kernels.layers import fused_layer, skinny_gemm
from trencadis.backends.cuda.ops import CudaOps
from trencadis.core.checkpoint.decoder_layer_config import ExpertsConfig
from trencadis.core.checkpoint.model_config import LAYER, POST, RMS_ONE, SANDWICH
from trencadis.core.models.moe import ExpertMLP

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

CASES = {
    "one row": LayerCase((5,), spare=0),
    "rows of many lengths": LayerCase((0, 15, 16, 40, 3)),
    "sixteen rows": LayerCase(tuple(range(16)), spare=0),
    "groups of seven, heads of 24": LayerCase((33, 2), group=7, kv_heads=1, d=24, hidden=168),
    "norms of heads": LayerCase((20, 1), changes={"qk_norm": True, "qkv_bias": False}),
    "columns are cut": LayerCase((9, 4), hidden=640, inner=320),
    "weights above one": LayerCase((9,), changes={"norm": RMS_ONE}),
    "gates beside a window, heads of 24": LayerCase((70, 3), d=24, changes={"output_gate": True, "window": 24}),
}  # fmt: skip

GATED = {"output_gate": True, "qk_norm": True, "qkv_bias": False}

SAMPLE = {
    "the output is gated": LayerCase((33, 2, 520), group=3, changes=GATED),
    "sinks, some beside cut keys, and a bias": LayerCase((33, 2, 520), changes={"sinks": True, "out_bias": True}),
    "experts": LayerCase((33, 5), changes={"experts": ExpertsConfig(8, 2, 32, True, shared=32)}),
    "another activation": LayerCase((33, 5), changes={"activation": "gelu_tanh"}),
    "long keys are cut and joined": LayerCase((520,), spare=0, kv_heads=1, hidden=32, inner=32),
    "a window, norms of heads, odd widths": LayerCase(
        (70, 3), hidden=88, inner=40, changes={"window": 24, "qk_norm": True, "qkv_bias": False}
    ),
}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float().cpu() - want).abs().max() / want.abs().max())


def launches_behind(mlp: object) -> int:
    """Launches of our kernels behind attention: those of experts, or two products, or a norm and an activation."""
    return 6 if isinstance(mlp, ExpertMLP) else 2


def checked(case: LayerCase, device: torch.device, first: bool = False) -> float:
    """The largest error of the stream and of what was stored; the cache beyond is as it was."""
    run = LayerRun(case, device)
    ops: Any = CudaOps()
    ops.query_group = case.planned
    layer = run.layer(ops)
    layer.attention.bind(run.ready.cache)
    assert fused_layer.can_fuse(layer, run.x, run.ready.tensors.attn)
    before = interpreter.launches()
    stream, k, v, _ = run.run(layer, ops, first)
    assert not INTERPRETED or interpreter.launches() - before == 4 + launches_behind(layer.mlp)
    want, want_kv = run.expected(first)
    n = len(run.ready.inputs.tokens)
    slots = run.ready.tensors.attn.slot_map[:n].cpu()
    errors = [error(stream[:n], want)]
    for got, wanted, old in ((k, want_kv.k, run.ready.poisoned.k), (v, want_kv.v, run.ready.poisoned.v)):
        errors.append(error(got.flatten(0, 1)[slots.to(got.device)], wanted.flatten(0, 1)[slots]))
        rest = torch.ones(len(got.flatten(0, 1)), dtype=torch.bool)
        rest[slots] = False
        assert torch.equal(got.flatten(0, 1).cpu()[rest].nan_to_num(7), old.flatten(0, 1).cpu()[rest].nan_to_num(7))
    run.ready.guards.check()
    assert ops._arrived is not None and not ops._arrived.any(), "counters are left as they were found"
    return float(np.max(errors))  # NaN, if one of them is


@pytest.mark.parametrize("name", SAMPLE)
def test_a_layer_equals_the_reference(name: str, device: torch.device) -> None:
    assert checked(SAMPLE[name], device) <= TOLERANCE[torch.float32]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_layer_equals_the_reference(name: str, device: torch.device) -> None:
    error = checked(CASES[name], device)
    print(f"\n{name}: {error:.1e}")
    assert error <= TOLERANCE[torch.float32]


def test_the_first_layer_has_no_residual(device: torch.device) -> None:
    assert checked(LayerCase((9,), spare=0, kv_heads=1), device, first=True) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("peers", [False, True])
def test_ranks_sum_before_the_stream_is_added(peers: bool, device: torch.device) -> None:
    """Through memory of peers with the stream at once; through the library before the next norm adds it."""
    run, ops = LayerRun(LayerCase((9,), spare=0, kv_heads=1), device), CudaOps()
    layer, messages = run.layer(ops), list[int]()

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        messages.append(x.numel())
        return x

    comm = SimpleNamespace(world=2, all_reduce=all_reduce)
    if peers:
        comm.sum_added = lambda x, residual: all_reduce(x) + residual
    layer.attention.out.comm = layer.mlp.down.comm = comm  # type: ignore[union-attr, assignment]
    stream, *_ = run.run(layer, ops)
    assert messages == [64, 64] and error(stream, run.expected()[0]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(dtype: torch.dtype, device: torch.device) -> None:
    for changes in ({"qk_norm": True}, {"output_gate": True}):
        case = LayerCase((40, 2), kv_heads=1, spare=0, dtype=dtype, changes=changes)
        assert checked(case, device) <= TOLERANCE[dtype]


def test_float16_takes_a_stream_near_its_largest_value(device: torch.device) -> None:
    """x times the norm's weight is beyond float16; what the norm makes of it is not."""
    run = LayerRun(LayerCase((4,), spare=0, dtype=torch.float16), device)
    ops = CudaOps()
    layer = run.layer(ops)
    x = torch.full_like(run.x, 30_000).to(device)
    weight = torch.full((64,), 4.0, dtype=torch.float16, device=device)
    qkv = skinny_gemm.product(
        x,
        layer.attention.qkv.weights[0],  # type: ignore[arg-type]
        skinny_gemm.counters(device),
        skinny_gemm.NormOf(weight, 1e-6),
    )
    raw, bias = run.weights["qkv"]
    assert bias is not None and error(qkv, torch.ones(1, 64) * 4 @ raw.float().t() + bias.float()) <= 3e-3


def test_bits_do_not_depend_on_who_arrives_last(
    device: torch.device, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of columns, a piece each."""
    monkeypatch.setattr(skinny_gemm, "LEAST_STEPS", 1)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 192, generator=generator) for n in (3, 80))
    arrived, norm = skinny_gemm.counters(device), skinny_gemm.NormOf(weight[0], 1e-6)
    w = PlainWeight(weight, weight[:, 0].contiguous(), 80, 192)
    interpreter.in_all_orders(lambda: skinny_gemm.product(x, w, arrived, norm, gate=True))
    assert not arrived.any()


@pytest.mark.parametrize(
    "changes",
    [{"norm": LAYER}, {"norm_placement": POST}, {"norm_placement": SANDWICH}, {"residual_scale": 0.5},
     {"v_norm": True}, {"joint_qk_norm": True}, {"layer_scale": True}],
    ids=str,
)  # fmt: skip
def test_other_layers_run_op_by_op(changes: dict[str, Any], device: torch.device) -> None:
    case = LayerCase((3,), spare=0, changes=changes)
    run = LayerRun(LayerCase((3,), spare=0), device)
    ops = CudaOps()
    layer = run.layer(ops)
    layer.attention.bind(run.ready.cache)
    attn = run.ready.tensors.attn
    assert fused_layer.can_fuse(layer, run.x, attn)
    other = LayerRun.layer.__globals__["DecoderLayer"](
        type("B", (), {
            "ops": ops, "comm": layer.attention.out.comm, "device": device, "values": True, "dtype": torch.float32,
        }),
        case.config,
    )  # fmt: skip
    other.attention.bind(run.ready.cache)
    assert not fused_layer.can_fuse(other, run.x, attn)


def test_launches_that_do_not_fit_run_op_by_op(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LayerRun(LayerCase((3, 5), spare=0), device)
    ops = CudaOps()
    layer = run.layer(ops)
    layer.attention.bind(run.ready.cache)
    attn = run.ready.tensors.attn
    assert not fused_layer.can_fuse(layer, torch.empty(17, 64), attn), "more rows than tiles have"
    assert not fused_layer.can_fuse(layer, run.x.half(), attn), "weights of another type"
    assert not fused_layer.can_fuse(layer, run.x, attn._replace(upto=attn.context))
    layer.attention.bind(run.ready.cache._replace(k_scale=run.x))
    assert not fused_layer.can_fuse(layer, run.x, attn), "a cache of codes"
    layer.attention.bind(run.ready.cache)
    mlp: Any = layer.mlp
    assert fused_layer.can_fuse_mlp(mlp, run.x)
    for linear in (mlp.down, layer.attention.out):
        linear.weights = linear.weights * 2
    assert not fused_layer.can_fuse_mlp(mlp, run.x), "a product of several weights"
    assert not fused_layer.can_fuse(layer, run.x, attn), "a product of several weights"
    monkeypatch.setenv("TRENCADIS_CUDA_WHOLE_LAYERS", "0")
    off = CudaOps()
    run.layer(off)
    assert off._arrived is None, "the switch is off"
