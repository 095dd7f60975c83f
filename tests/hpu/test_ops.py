"""The Gaudi ops equal the reference over ragged rows, whatever lies in SINK and in the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.gaudi_launches import BLOCK, LAUNCHES, AttentionLayer, reference, step_inputs
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.hpu.hpu_settings import settings
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import ProgramState, Segments
from trencadis.core.launches.kv_cache_and_state_allocation import by_block


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("kernels", [True, False])
def test_text_attention(name: str, kernels: bool, hpu: Callable[..., Any]) -> None:
    stage, dims, lengths = LAUNCHES[name]
    inputs = step_inputs(lengths, np.random.default_rng(1))
    n = len(inputs.tokens)
    want, want_kv = reference(inputs)
    seen = []
    for sink in (0.0, float("nan")):
        backend = hpu(block_size=BLOCK, kernels=kernels)
        layer = AttentionLayer(backend, sink)
        program = backend.program(Bucket(stage, dims), layer)
        backend.fill(program, inputs)
        if sink != 0.0:
            poison(program, n, stage, dims, lengths)
        program.run()
        ran = layer.out.cpu()[1 : n + 1]
        seen.append(ran)
        assert program.state is ProgramState.COMPILED
        program.capture()
        layer.out.zero_()
        program.replay()
        assert torch.equal(layer.out.cpu()[1 : n + 1], ran), "a replay equals the run bit for bit"
        for got, wanted in zip(layer.kv[:2], want_kv[:2], strict=True):
            stored = by_block(got.cpu(), BLOCK)
            assert not stored[0].any(), "ZERO was written"
            torch.testing.assert_close(stored[2:], wanted[2:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen[0], want, rtol=1e-5, atol=1e-5)
    assert torch.equal(seen[0], seen[1]), "SINK or padding reached a real row"


@pytest.mark.parametrize("name", ["fresh", "context", "decode"])
@pytest.mark.parametrize("kernels", [True, False])
def test_float32_softmax_is_a_switch(name: str, kernels: bool, hpu: Callable[..., Any]) -> None:
    """VLLM_FP32_SOFTMAX=1 and 0: in bfloat16 the float32 path lies nearer to the reference."""
    stage, dims, lengths = LAUNCHES[name]
    inputs = step_inputs(lengths, np.random.default_rng(1))
    n = len(inputs.tokens)
    want, _ = reference(inputs)
    errors = []
    for fp32 in (True, False):
        backend = hpu(block_size=BLOCK, kernels=kernels, switches=settings({"VLLM_FP32_SOFTMAX": str(int(fp32))}))
        layer = AttentionLayer(backend, 0.0, torch.bfloat16)
        program = backend.program(Bucket(stage, dims), layer)
        backend.fill(program, inputs)
        program.run()
        errors.append((layer.out.cpu()[1 : n + 1].float() - want).abs().mean().item())
    assert 0 < errors[0] < errors[1] < 0.02


def poison(program: Any, n: int, stage: Stage, dims: tuple[int, ...], lengths: list[tuple[int, int]]) -> None:
    """Random legal ids and positions in every padded token."""
    rng = np.random.default_rng(9)
    count = len(program.inputs.tokens)
    place = np.arange(n)
    if stage is Stage.FRESH:
        place = np.concatenate([row * dims[1] + np.arange(t) for row, (_, t) in enumerate(lengths)])
    pad = np.setdiff1d(np.arange(count), place)
    for tensor, high in ((program.inputs.tokens, 50), (program.inputs.positions, 99)):
        host = tensor.cpu().clone()
        host[..., pad] = torch.from_numpy(rng.integers(0, high, (*host.shape[:-1], len(pad)), dtype=np.int32))
        tensor.copy_(host)


@pytest.mark.parametrize("kernels", [True, False])
def test_vision_attention(kernels: bool, hpu: Callable[..., Any]) -> None:
    """Windows with padding inside, three images and a spare window."""
    segment, real = torch.tensor([0, 0, 1, 2, 3], dtype=torch.int32), torch.tensor([64, 16, 4, 64, 64]).int()
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(320, 2, 8, generator=generator) for _ in range(3))
    plain = ReferenceOps()
    seg = Segments(segment, real)
    wanted = [f(q, k, v, seg, 0.3) for f in (plain.attend_windows, plain.attend_images)]
    rows = (torch.arange(64) < real[:, None]).flatten()
    for noise in (0.0, 50.0):
        backend = hpu(kernels=kernels)
        ops, device = backend.ops, backend.device
        on_device = Segments(segment.to(device), real.to(device))
        parts = [torch.where(rows[:, None, None], t, noise).to(device) for t in (q, k, v)]
        with backend.card.launch():
            prepared = ops.prepare_segments(on_device)
            got = [f(*parts, prepared, 0.3) for f in (ops.attend_windows, ops.attend_images)]
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one.cpu()[rows], other[rows], rtol=1e-5, atol=1e-5)


def test_elementwise(hpu: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, weight = (torch.randn(*s, generator=generator) for s in ((5, 16), (5, 16), (16,)))
    plain = ReferenceOps()
    backend = hpu()
    ops, d = backend.ops, backend.device
    on = [t.to(d) for t in (x, residual, weight)]
    with backend.card.launch():
        normed, total = ops.rms_norm(on[0], on[2], 1e-6, on[1])
    want = plain.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(normed.cpu(), want[0]) and torch.equal(total.cpu(), want[1])
