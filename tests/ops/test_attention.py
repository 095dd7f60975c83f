"""The fast text ops equal the reference over ragged rows, whatever the padding and whatever lies in SINK."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.traffic.ragged_rows import ragged_inputs
from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.batch_invariant import InvariantOps
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import BackendConfig, LayerKV, TextTensors
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.launches.host_inputs import own_positions

BLOCK, BLOCKS, GROUPS, HEAD = 4, 60, 2, 16
ROWS = {
    "decode": [(9, 1), (0, 1), (150, 1), (9, 1), (3, 1)],
    "prefill": [(0, 13), (0, 2), (0, 5)],
    "chunks": [(7, 6), (8, 4), (0, 3)],
    "mixed": [(0, 6), (21, 1), (5, 9), (30, 1), (0, 1)],
    "one": [(12, 1)],
}


def filled(inputs: StepInputs, policy: str) -> TextTensors:
    upto = inputs.upto is not None
    backend = make_backend(BackendConfig(block_size=BLOCK, upto=upto, options={"policy": policy, "threads": "1"}))
    n, r = len(inputs.tokens), len(inputs.context)
    stage, needs = (Stage.DECODE, (n,)) if n == r else (Stage.PREFILL, (n, r))
    sizes = tuple(-(-x // a) * a for x, a in zip(needs, backend.policy.alignment[stage], strict=True))
    program: Any = backend.program(Bucket(stage, sizes), print)
    backend.fill(program, inputs)
    tensors: TextTensors = program.inputs
    return tensors


def attended(ops: ReferenceOps, x: TextTensors, n: int, sink: float, window: int = 0) -> tuple[torch.Tensor, LayerKV]:
    """(output of the real tokens, the cache): rotary, store, attend on seeded values; padding gets other values."""
    generator = torch.Generator().manual_seed(5)
    kv = LayerKV(*(torch.randn(BLOCKS, BLOCK, GROUPS, HEAD, generator=generator) for _ in range(2)))
    for cache in kv[:2]:
        cache[0], cache[1] = 0, sink
    size, heads = len(x.tokens), 3 * GROUPS + 2 * GROUPS
    qkv = torch.full((size, heads * HEAD), 1.7)
    qkv[:n] = torch.randn(n, heads * HEAD, generator=generator)
    q, k, v = (t.view(size, -1, HEAD) for t in torch.split(qkv, [6 * HEAD, 2 * HEAD, 2 * HEAD], dim=1))
    rotary = ops.rotary(x.positions, torch.linspace(1, 0.01, HEAD // 2), torch.arange(HEAD // 2) % 3)
    attn = ops.prepare_attn(x.attn, 6, kv)
    q, k, v = ops.rope_store(q, k, v, rotary, kv, attn)
    return ops.attend(q, k, v, kv, attn, HEAD**-0.5, *((window,) if window else ()))[:n], kv


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("policy", ["serving", "padded"])
@pytest.mark.parametrize("make", [CpuOps, ReferenceOps])
def test_attend(rows: str, policy: str, make: type[ReferenceOps]) -> None:
    inputs = ragged_inputs(ROWS[rows], BLOCK, np.random.default_rng(1), shared=True)
    n = len(inputs.tokens)
    want, _ = attended(ReferenceOps(), filled(inputs, "serving"), n, 0.0)
    x = filled(inputs, policy)
    got, kv = attended(make(), x, n, 0.0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    poisoned, poisoned_kv = attended(make(), x, n, float("nan"))
    assert torch.equal(poisoned, got)
    assert not kv.k[0].any() and not kv.v[0].any()
    assert torch.equal(kv.k[2:], poisoned_kv.k[2:]) and torch.equal(kv.v[2:], poisoned_kv.v[2:])


def recompute_visible(inputs: StepInputs, window: int) -> torch.Tensor:
    """float32 [n, h, d]: each token over the keys that it sees, one token at a time, from the reference's cache."""
    n = len(inputs.tokens)
    x = filled(inputs, "serving")
    ops = ReferenceOps()
    _, kv = attended(ops, x, n, 0.0)
    generator = torch.Generator().manual_seed(5)
    torch.randn(2, BLOCKS, BLOCK, GROUPS, HEAD, generator=generator)
    q = torch.randn(n, 10 * HEAD, generator=generator)[:, : 6 * HEAD].reshape(n, 6, HEAD)
    rotary = ops.rotary(x.positions, torch.linspace(1, 0.01, HEAD // 2), torch.arange(HEAD // 2) % 3)
    q = q * rotary.cos[:, None] + torch.cat([-q[..., HEAD // 2 :], q[..., : HEAD // 2]], -1) * rotary.sin[:, None]
    out = []
    for row in range(len(inputs.context)):
        keys, values = (t[inputs.blocks[row]].flatten(0, 1) for t in kv[:2])
        for token in range(inputs.row_start[row], inputs.row_start[row + 1]):
            place = int(inputs.context[row] + token - inputs.row_start[row])
            stop = place + 1 if inputs.upto is None else int(inputs.upto[token]) + 1
            start = max(place - window + 1, 0) if window else 0
            some = [t[start:stop].repeat_interleave(6 // GROUPS, dim=1) for t in (keys, values)]
            share = (torch.einsum("hd,lhd->hl", q[token], some[0]) * HEAD**-0.5).softmax(-1)
            out.append(torch.einsum("hl,lhd->hd", share, some[1]))
    return torch.stack(out)


def with_spans(inputs: StepInputs, rng: np.random.Generator) -> StepInputs:
    """``inputs`` in which the tokens of each row see each other, or those of a part of it."""
    inputs.upto = own_positions(inputs.row_start, inputs.context)
    for row, before in enumerate(inputs.context):
        start, stop = inputs.row_start[row], inputs.row_start[row + 1]
        first = int(rng.integers(start, stop)) if row % 2 else start
        inputs.upto[first:stop] = before + stop - start - 1
    return inputs


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("make", [CpuOps, InvariantOps, ReferenceOps])
def test_windows_and_spans_hide_and_show_the_keys_that_they_name(
    rows: str, spans: bool, make: type[ReferenceOps]
) -> None:
    rng = np.random.default_rng(2)
    inputs = ragged_inputs(ROWS[rows], BLOCK, rng, shared=True)
    if spans:
        inputs = with_spans(inputs, rng)
    n = len(inputs.tokens)
    for window in (0, 1, 3, 8, 17, 149, 151):
        want = recompute_visible(inputs, window)
        for policy in ("serving", "padded"):
            x = filled(inputs, policy)
            got, _ = attended(make(), x, n, 0.0, window)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            assert torch.equal(attended(make(), x, n, float("nan"), window)[0], got)


@pytest.mark.parametrize("rows", ["decode", "mixed", "one"])
def test_keys_before_a_window_are_not_read(rows: str) -> None:
    inputs, window = ragged_inputs(ROWS[rows], BLOCK, np.random.default_rng(1)), 7
    x, ops, n = filled(inputs, "serving"), CpuOps(), len(inputs.tokens)
    want, _ = attended(ops, x, n, 0.0, window)
    kept = CpuOps._store

    class Poisoning(CpuOps):
        """Spoils what no token of a row sees, as if it had never been stored."""

        def _store(self, kv: LayerKV, k: torch.Tensor, v: torch.Tensor, slot_map: torch.Tensor) -> None:
            kept(self, kv, k, v, slot_map)
            for row, context in enumerate(inputs.context):
                place = np.arange(max(int(context) + 1 - window, 0))
                for cache in kv[:2]:
                    cache[inputs.blocks[row, place // BLOCK], place % BLOCK] = float("nan")

    assert torch.equal(attended(Poisoning(), x, n, 0.0, window)[0], want)
    assert attended(Poisoning(), x, n, 0.0)[0].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_elementwise(dtype: torch.dtype, bias: bool) -> None:
    fast, slow, tolerance = CpuOps(), ReferenceOps(), {torch.float32: 1e-5}.get(dtype, 2e-2)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 40, generator=generator).to(dtype) * 0.2
    offset = torch.randn(48, generator=generator).to(dtype) if bias else None
    packed = fast.pack_weight(weight, offset)
    assert (packed.out_features, packed.in_features) == (48, 40)
    for n in (1, 3, 33):
        x, residual = (torch.randn(n, 40, generator=generator).to(dtype) for _ in range(2))
        want = slow.linear(x, slow.pack_weight(weight, offset))
        torch.testing.assert_close(fast.linear(x, packed), want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(fast.silu_mul(want), slow.silu_mul(want), rtol=tolerance, atol=tolerance)
        for other in (None, residual):
            expected = slow.rms_norm(x, weight[0], 1e-6, other)
            for a, b in zip(fast.rms_norm(x.clone(), weight[0], 1e-6, other), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_embed() -> None:
    rng = np.random.default_rng(0)
    table, arena = (torch.from_numpy(rng.standard_normal((50, 8), np.float32)) for _ in range(2))
    last = torch.from_numpy(rng.integers(0, 50, 9, dtype=np.int32))
    tokens = torch.from_numpy(rng.integers(0, 50, 30, dtype=np.int32))
    from_slot = torch.from_numpy(np.where(rng.random(30) < 0.3, rng.integers(1, 9, 30), 0).astype(np.int32))
    rows = torch.from_numpy(np.where(rng.random(30) < 0.3, rng.integers(2, 50, 30), 0).astype(np.int32))
    for image_row in (rows, torch.zeros_like(rows)):
        want = []
        for i in range(30):
            known = last[from_slot[i]] if from_slot[i] else tokens[i]
            want.append(arena[image_row[i]] if image_row[i] else table[known])
        for ops in (CpuOps(), ReferenceOps()):
            assert torch.equal(ops.embed(tokens, from_slot, last, image_row, arena, table), torch.stack(want))
