"""A decoder layer of rows of several tokens, as VERIFY has them, in six launches equals the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.layers.test_dependent import layers, nothing
from tests.kernels.layers.test_whole_layer import TOLERANCE, checked
from tests.oracles.layers.dependent_launches import unordered
from tests.oracles.layers.layer_cases import LayerCase, LayerRun
from tests.oracles.planted_mistakes import planted
from trencadis.backends.cuda.kernels.layers import fused_layer, fused_verify_attention, skinny_gemm
from trencadis.backends.cuda.ops import CudaOps, InvariantCudaOps
from trencadis.backends.cuda.shape_policy import SERVING
from trencadis.core.buckets import Stage, verify_variant
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits

NORMED: dict[str, Any] = {"qk_norm": True, "qkv_bias": False}

SAMPLE = {
    "the output is gated": LayerCase((33, 5), tokens=(4, 2), verify=4, changes={"output_gate": True}),
    "rows of one to four tokens": LayerCase((0, 15, 21), tokens=(1, 4, 3), verify=4, kv_heads=1),
    "new keys lie on both sides of a cut": LayerCase(
        (1022,), tokens=(8,), verify=8, spare=0, kv_heads=1, hidden=32, inner=32
    ),
    "a window within the new keys, norms of heads": LayerCase(
        (70, 2), tokens=(5, 4), verify=5, hidden=88, inner=40, changes={"window": 3, **NORMED}
    ),
    "groups of seven, blocks of several tiles": LayerCase(
        (33,), tokens=(6,), verify=6, group=7, kv_heads=1, d=24, hidden=168
    ),
}
CASES = {
    "sinks, cut keys": LayerCase((530, 3), tokens=(3, 1), verify=3, changes={"sinks": True}),
    "gates, cut keys": LayerCase((530, 3), tokens=(3, 1), verify=3, changes={"output_gate": True}),
    "sixteen tokens of one row": LayerCase((3,), tokens=(16,), verify=16, spare=0),
    "sixteen rows": LayerCase(tuple(range(16)), tokens=(1,) * 16, verify=1, spare=0),
    "a window of several tiles": LayerCase((70, 9), tokens=(5, 2), verify=5, changes={"window": 24}),
    "a small prompt": LayerCase((0, 30), tokens=(9, 3)),
    "planned by other heads": LayerCase((40,), tokens=(5,), verify=5, planned=4),
    "groups of sixteen": LayerCase((40,), tokens=(5,), verify=5, group=16, kv_heads=1),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_rows_of_several_tokens_equal_the_reference(name: str, device: torch.device) -> None:
    """Also what is stored: the new keys and values in their slots, and nothing elsewhere."""
    assert checked(SAMPLE[name], device) <= TOLERANCE[torch.float32]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_launch_of_several_tokens_equals_the_reference(name: str, device: torch.device) -> None:
    error = checked(CASES[name], device)
    print(f"\n{name}: {error:.1e}")
    assert error <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(dtype: torch.dtype, device: torch.device) -> None:
    case = LayerCase((40, 2), tokens=(3, 4), verify=4, kv_heads=1, spare=0, dtype=dtype, changes=NORMED)
    assert checked(case, device) <= TOLERANCE[dtype]


def test_launches_that_start_early_are_ordered(device: torch.device, interpreted: None) -> None:
    """Two layers that follow each other, by what the kernels of both read and write before and after their waits."""
    found = layers(device, case=LayerCase((5, 2), tokens=(2, 3), verify=3, kv_heads=1, spare=0, hidden=64, inner=64))
    assert [x.name for x in found[:3]] == ["skinny_kernel", "verify_items_kernel", "join_kernel"] and len(found) == 12
    assert all(x.dependent and x.waits == x.programs for x in found)
    assert unordered(found) == []


def test_a_layer_that_does_not_wait_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_verify_attention, "wait", nothing)
    case = LayerCase((5,), tokens=(2,), verify=3, kv_heads=1, spare=0, hidden=64, inner=64)
    said = "\n".join(unordered(layers(device, 1, case)))
    assert "verify_items_kernel reads before its wait what skinny_kernel writes" in said


MISTAKES = {
    "a token does not see itself": ("rows of one to four tokens", "new[None, :] <= own", "new[None, :] < own"),
    "a token sees the next one": ("rows of one to four tokens", "new[None, :] <= own", "new[None, :] <= 1 + own"),
    "new keys of another row": ("rows of one to four tokens", "(start + tl.where(there", "(tl.where(there"),
    "the value is stored as key": ("rows of one to four tokens", "tl.store(k + at, key,", "tl.store(k + at, value,"),
    "each piece takes all new keys": (
        "new keys lie on both sides of a cut", "(before + new >= begin) & (before + new < limit)", "(new >= 0)"),
    "the window is one key longer": (
        "a window within the new keys, norms of heads", "own[:, None] - WINDOW", "own[:, None] - WINDOW - 1"),
    "tiles of a block beyond the first store nothing": (
        "groups of seven, blocks of several tiles", "(first_lane < sub + M)", "(first_lane < M)"),
    "heads are those of the tile": (
        "groups of seven, blocks of several tiles", "head = group * GROUP + lane % GROUP",
        "head = group * GROUP + (lane - sub) % GROUP"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, device: torch.device, interpreted: None) -> None:
    case, old, new = MISTAKES[name]
    with planted(fused_verify_attention, "verify_items_kernel", old, new):
        try:
            error = checked(SAMPLE[case], device)
        except AssertionError:
            return
    assert not error <= TOLERANCE[torch.float32], error


def test_which_launches_are_fused(device: torch.device) -> None:
    run = LayerRun(LayerCase((3, 5), tokens=(4, 2), verify=4, spare=0), device)
    ops: Any = CudaOps()
    layer = run.layer(ops)
    layer.attention.bind(run.ready.cache)
    attn = run.ready.tensors.attn
    assert fused_layer.can_fuse(layer, run.x, attn)
    assert not fused_layer.can_fuse(layer, torch.empty(17, 64), attn), "more tokens than a tile has rows"
    assert not fused_layer.can_fuse(layer, run.x, attn._replace(upto=attn.context)), "tokens that see later ones"
    assert not InvariantCudaOps.whole_layers, "--batch-invariant runs every launch op by op"


@pytest.mark.parametrize(("drafts", "rows"), [(1, 8), (4, 3), (6, 2), (15, 1), (16, 1)])
def test_the_plan_has_the_most_rows_whose_layers_are_fused(drafts: int, rows: int) -> None:
    """Three rows of five tokens do not run op by op as four."""
    assert SERVING.fused_tokens == skinny_gemm.FEW
    limits = ShapeLimits(block_size=16, max_model_len=512, max_rows=32, max_tokens=256, drafts=drafts)
    plan = make_plan(SERVING, limits, BucketOptions())
    assert rows in plan.sizes(Stage.VERIFY)
    assert plan.fit(Stage.VERIFY, (rows,), verify_variant(drafts + 1)).dims == (rows,)
