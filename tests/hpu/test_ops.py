"""The Gaudi ops equal the reference over ragged rows, whatever lies in SINK and in the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.reference import ReferenceOps
from trencadis.backends.hpu.settings import HpuSettings
from trencadis.core.backend import BackendConfig, LayerKV, ProgramState, Segments
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.step import StepInputs

BLOCK, BLOCKS, GROUPS, HEAD = 4, 60, 2, 16
WIDTH = 10 * HEAD
"""q (6 heads), k and v (2 each) of a token, side by side."""

LAUNCHES = {
    "fresh": (Stage.FRESH, (4, 16), [(0, 13), (0, 1), (0, 16)]),
    "fresh_one": (Stage.FRESH, (1, 8), [(0, 5)]),
    "context": (Stage.CONTEXT, (8, 8), [(21, 6)]),
    "context_full": (Stage.CONTEXT, (8, 4), [(16, 8)]),
    "decode": (Stage.DECODE, (8, 64), [(9, 1), (0, 1), (150, 1), (3, 1), (8, 1)]),
    "decode_exact": (Stage.DECODE, (2, 8), [(15, 1), (14, 1)]),
}


def step_inputs(lengths: list[tuple[int, int]], rng: np.random.Generator) -> StepInputs:
    """Rows of (context, tokens), their blocks in random order."""
    context = np.array([c for c, _ in lengths], np.int32)
    counts = np.array([t for _, t in lengths])
    held = [-(-(c + t) // BLOCK) for c, t in lengths]
    ids = 2 + rng.permutation(BLOCKS - 2)[: sum(held)]
    blocks = np.zeros((len(lengths), max(held)), np.int32)
    for row, part in enumerate(np.split(ids, np.cumsum(held)[:-1])):
        blocks[row, : len(part)] = part
    n = int(counts.sum())
    return StepInputs(
        tokens=rng.integers(0, 50, n, dtype=np.int32), from_slot=np.zeros(n, np.int32),
        positions=rng.integers(0, 99, (3, n), dtype=np.int32), image_row=np.zeros(n, np.int32),
        out_row=np.arange(1, n + 1, dtype=np.int32), row_start=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        context=context, blocks=blocks, slot=np.arange(1, len(lengths) + 1, dtype=np.int32),
        adapter=np.zeros(len(lengths), np.int32),
    )  # fmt: skip


def cache(sink: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(BLOCKS, BLOCK, GROUPS, HEAD, generator=generator) for _ in range(2)]
    for t in made:
        t[0], t[1] = 0, sink
    return made


class Layer:
    """Rotary, store, attend: a body whose activations are looked up by token id, so that padding has some too."""

    def __init__(self, backend: Any, sink: float, dtype: torch.dtype = torch.float32) -> None:
        self.ops, device = backend.ops, backend.device
        generator = torch.Generator().manual_seed(7)
        self.table = torch.randn(50, WIDTH, generator=generator).to(device, dtype)
        self.kv = LayerKV(*(t.to(device, dtype) for t in cache(sink)))
        self.out = torch.zeros(200, 6 * HEAD, dtype=dtype).to(device)
        self.frequency, self.axis = torch.linspace(1, 0.01, HEAD // 2).to(device), (torch.arange(8) % 3).to(device)

    def __call__(self, x: Any) -> None:
        n = x.tokens.shape[0]
        q, k, v = torch.split(self.table.index_select(0, x.tokens), [6 * HEAD, 2 * HEAD, 2 * HEAD], dim=1)
        rotary = self.ops.rotary(x.positions, self.frequency, self.axis)
        q = self.ops.rope_store(
            q.reshape(n, -1, HEAD), k.reshape(n, -1, HEAD), v.reshape(n, -1, HEAD), rotary, self.kv, x.attn
        )
        out = self.ops.attend(q, self.kv, x.attn, HEAD**-0.5)
        self.ops.scatter_rows(self.out, x.out_row, out.reshape(n, -1))
        self.ops.cut("layer")


def reference(inputs: StepInputs) -> tuple[torch.Tensor, LayerKV]:
    backend = make_backend(BackendConfig(block_size=BLOCK, options={"ops": "reference", "threads": "1"}))
    layer = Layer(backend, 0.0)
    n, r = len(inputs.tokens), len(inputs.context)
    program = backend.program(Bucket(Stage.PREFILL, (n, r)), layer)
    backend.fill(program, inputs)
    program.run()
    return layer.out[1 : n + 1], layer.kv


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
        layer = Layer(backend, sink)
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
        assert not layer.kv.k.cpu()[0].any() and not layer.kv.v.cpu()[0].any(), "ZERO was written"
        for got, wanted in zip(layer.kv, want_kv, strict=True):
            torch.testing.assert_close(got.cpu()[2:], wanted[2:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen[0], want, rtol=1e-5, atol=1e-5)
    assert torch.equal(seen[0], seen[1]), "SINK or padding reached a real row"


@pytest.mark.parametrize("name", ["fresh", "context", "decode"])
@pytest.mark.parametrize("kernels", [True, False])
def test_float32_softmax_is_a_switch(name: str, kernels: bool, hpu: Callable[..., Any]) -> None:
    """In bfloat16 the float32 path lies nearer to the reference; torch's own softmax is float32 inside on a CPU."""
    stage, dims, lengths = LAUNCHES[name]
    inputs = step_inputs(lengths, np.random.default_rng(1))
    n = len(inputs.tokens)
    want, _ = reference(inputs)
    errors = []
    for fp32 in (True, False):
        backend = hpu(block_size=BLOCK, kernels=kernels, switches=HpuSettings(fp32_softmax=fp32))
        layer = Layer(backend, 0.0, torch.bfloat16)
        program = backend.program(Bucket(stage, dims), layer)
        backend.fill(program, inputs)
        program.run()
        errors.append((layer.out.cpu()[1 : n + 1].float() - want).abs().mean().item())
    same = not kernels and name != "decode"
    assert 0 < errors[0] < 0.02 and (errors[0] == errors[1] if same else errors[0] < errors[1] < 0.02)


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
    """Windows with padding inside, three pictures and a spare window."""
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
            got = [f(*parts, on_device, 0.3) for f in (ops.attend_windows, ops.attend_images)]
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
