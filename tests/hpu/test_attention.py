"""Attention of the Gaudi backend: no token of a launch is read back, slices equal the whole, limits of the kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.oracles.gaudi_launches import BLOCK, BLOCKS, LAUNCHES, AttentionLayer, reference, references, step_inputs
from tests.traffic.launch_lines import LINES, plan_of
from trencadis.backends.hpu.attention import plain_attention, prefill_attention, sliding_window_attention
from trencadis.backends.hpu.attention.attention_input_types import (
    AttentionKernels,
    ContextAttn,
    FreshAttn,
    SlicedContext,
)
from trencadis.backends.hpu.attention.prefill_attention import check_bucket, largest_mask
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_errors import Refused
from trencadis.backends.hpu.emulator.fused_kernels import Kernels, block_softmax_adjustment
from trencadis.backends.hpu.hpu_settings import SYMBOLS, HpuSettings, settings
from trencadis.backends.hpu.shape_policy import input_bytes, policy
from trencadis.backends.hpu.start import bridge_loader
from trencadis.backends.hpu.start.bridge_loader import find_symbols
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import BackendConfig, LayerKV, Rotary, Segments
from trencadis.core.device_shape_policy import InputSizes
from trencadis.core.errors import StartupError
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.launches.host_inputs import own_positions
from trencadis.core.memory import memory_estimator

Make = Callable[..., Any]


@contextmanager
def calls(card: Any) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """(name, shapes of the tensors) of every operation that the card runs meanwhile."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    execute = card.execute

    def seen(function: Any, name: str, args: Any, kwargs: Any) -> Any:
        found.append((name, tuple(tuple(a.shape) for a in args if isinstance(a, Tensor))))
        return execute(function, name, args, kwargs)

    card.execute = seen
    try:
        yield found
    finally:
        del card.execute


@pytest.mark.parametrize("name", ["fresh", "context", "decode"])
def test_no_token_is_read_back_but_in_stored_blocks(name: str, hpu: Make) -> None:
    """FRESH reads nothing of the cache, CONTEXT and DECODE the listed blocks alone."""
    stage, dims, lengths = LAUNCHES[name]
    backend = hpu(block_size=BLOCK)
    program = backend.program(Bucket(stage, dims), AttentionLayer(backend, 0.0))
    backend.fill(program, step_inputs(lengths, np.random.default_rng(1)))
    with calls(backend.card) as found:
        program.run()
    rows = [shapes for op, shapes in found if "index_select" in op and shapes[0][0] in (BLOCKS, BLOCKS * BLOCK)]
    listed = {Stage.FRESH: 0, Stage.CONTEXT: dims[1], Stage.DECODE: dims[1]}[stage]
    assert [shape[1] for shape in rows] == [(listed,)] * (2 if listed else 0), rows


def with_spans(inputs: StepInputs) -> StepInputs:
    """``inputs`` in which the later half of each row's tokens see each other."""
    inputs.upto = own_positions(inputs.row_start, inputs.context)
    for row, before in enumerate(inputs.context):
        start, stop = inputs.row_start[row], inputs.row_start[row + 1]
        inputs.upto[start + (stop - start) // 2 : stop] = before + stop - start - 1
    return inputs


SEEN = (0, 3, 8, 15, 1000)
"""Windows: inside a block, whole blocks, longer than a chunk, longer than all."""


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("spans", [False, True])
def test_windows_and_spans_hide_and_show_what_the_reference_does(name: str, spans: bool, hpu: Make) -> None:
    """With fused kernels and without, lazily and in compile mode, where a region makes the masks of a launch."""
    stage, dims, lengths = LAUNCHES[name]
    inputs = step_inputs(lengths, np.random.default_rng(1))
    if spans:
        inputs = with_spans(inputs)
    n = len(inputs.tokens)
    wanted, _ = references(inputs, SEEN)
    for kernels, lazy, own in ((True, True, SEEN), (False, True, SEEN), (True, False, SEEN), (True, True, (8,))):
        backend = hpu(block_size=BLOCK, kernels=kernels, windows=own, upto=spans, lazy=lazy)
        layer = AttentionLayer(backend, float("nan"), windows=own)
        program = backend.program(Bucket(stage, dims), layer)
        backend.fill(program, inputs)
        program.run()
        for window, out in zip(own, layer.outs, strict=True):
            want = wanted[SEEN.index(window)]
            torch.testing.assert_close(out.cpu()[1 : n + 1], want, rtol=1e-5, atol=1e-5)


def test_only_models_that_need_them_have_more_inputs(hpu: Make) -> None:
    """And the planner counts them to the byte."""
    for name, (stage, dims, _) in LAUNCHES.items():
        found = {}
        for seen in ({}, {"windows": (0, 8)}, {"upto": True}):
            backend = hpu(block_size=BLOCK, vocab_size=50, **seen)
            made = backend.program(Bucket(stage, dims), lambda x: None)
            sizes = InputSizes(50, BLOCK, windows="windows" in seen, upto="upto" in seen)
            assert input_bytes(made.bucket, sizes) == made.bytes, (name, seen)
            found[next(iter(seen), "")] = made.bytes
        assert (found["windows"] > found[""]) == (stage is Stage.DECODE)
        assert (found["upto"] > found[""]) == (stage is not Stage.DECODE)


def test_long_chunks_take_windows_in_tiles(hpu: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 queries: later ones leave out stored tokens, and their own that no query sees."""
    monkeypatch.setattr(sliding_window_attention, "mask_rows", lambda keys: 8)
    chunks = [(Stage.CONTEXT, (32, 8), [row]) for row in ((21, 30), (3, 29))]
    for stage, dims, lengths in (*chunks, (Stage.FRESH, (2, 32), [(0, 31), (0, 9)])):
        for spans in (False, True):
            inputs = step_inputs(lengths, np.random.default_rng(1))
            if spans:
                inputs = with_spans(inputs)
            wanted, _ = references(inputs, SEEN)
            backend = hpu(block_size=BLOCK, windows=SEEN, upto=spans)
            layer = AttentionLayer(backend, float("nan"), windows=SEEN)
            program = backend.program(Bucket(stage, dims), layer)
            backend.fill(program, inputs)
            program.run()
            n, place = len(inputs.tokens), slice(1, len(inputs.tokens) + 1)
            for want, out in zip(wanted, layer.outs, strict=True):
                torch.testing.assert_close(out.cpu()[place], want[:n], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", [1, 7, 8, 21, 32])
@pytest.mark.parametrize("kernels", [True, False])
def test_slices_equal_the_whole(stored: int, kernels: bool, hpu: Make) -> None:
    """Slices of two blocks in a bucket of eight: full ones, one that ends inside, and some that hold nothing."""
    inputs = step_inputs([(stored, 6)], np.random.default_rng(1))
    want, _ = reference(inputs)
    for tokens in (8, 4096):
        backend = hpu(block_size=BLOCK, kernels=kernels, switches=HpuSettings(context_slice=tokens))
        layer = AttentionLayer(backend, float("nan"))
        program = backend.program(Bucket(Stage.CONTEXT, (8, 8)), layer)
        backend.fill(program, inputs)
        program.run()
        torch.testing.assert_close(layer.out.cpu()[1:7], want, rtol=1e-5, atol=1e-5)


def dense(q: Tensor, k: Tensor, v: Tensor, stored: int, scale: float) -> Tensor:
    """float64 [T, h, d] over [stored + T, g, d], causal behind the stored ones."""
    repeat = q.shape[1] // k.shape[1]
    queries, keys, values = (t.double().transpose(0, 1) for t in (q, k, v))
    keys, values = (t.repeat_interleave(repeat, 0) for t in (keys, values))
    hidden = torch.arange(len(k)) > stored + torch.arange(len(q))[:, None]
    scores = (queries @ keys.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize(("count", "stored"), [(1024, 5), (1100, 40), (64, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_chunks_are_causal_in_whole_steps(count: int, stored: int, dtype: torch.dtype, hpu: Make) -> None:
    """The fused kernel's causal call takes multiples of 1024; the rest of a chunk is masked."""
    torch.manual_seed(0)
    size, blocks = 16, 4
    backend = hpu(block_size=size)
    q, k, v = (torch.randn(count, h, 8, dtype=dtype) for h in (4, 2, 2))
    caches = [torch.randn(8 * size, 2, 8, dtype=dtype) for _ in range(2)]
    listed = torch.tensor([5, 3, 7, 2], dtype=torch.int32)
    used = -(-stored // size)
    for cache in caches:
        cache[:size] = 0
    attn = ContextAttn(
        torch.zeros(count, dtype=torch.int64), torch.where(torch.arange(blocks) < used, listed, 0).int(),
        torch.tensor([stored], dtype=torch.int32),
    )  # fmt: skip
    on = [t.to(backend.device) for t in (q, k, v, *caches)]
    moved = ContextAttn(*(t.to(backend.device) for t in attn[:3]))
    with backend.card.launch():
        ready = prefill_attention.prepare_context(moved, size, 2 * size)
        assert isinstance(ready, SlicedContext) and len(ready.visible) == 2
        got = prefill_attention.attend_context(
            on[0], on[1], on[2], LayerKV(on[3], on[4]), ready, size, 0.4, True, backend.ops.kernels
        )
    rows = (listed[:used, None] * size + torch.arange(size)).flatten()[:stored]
    keys, values = (torch.cat([cache[rows], own]) for cache, own in zip(caches, (k, v), strict=True))
    want = dense(q, keys, values, stored, 0.4)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fused", [True, False])
def test_asked_for_float32_scores_are_made_in_float32(fused: bool) -> None:
    """VLLM_FP32_SOFTMAX: errors of scores and weights against float64, before the output is rounded.

    Before, the product left the matrix engine in bfloat16 and was widened then.
    """
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(2, 2, n, 128, generator=generator).bfloat16() * 2 for n in (64, 256))
    seen = torch.ones(1, 1, 1, 256, dtype=torch.bool)
    scale = 128**-0.5
    exact = q.double() @ k.double().transpose(2, 3)
    kernels = AttentionKernels(product=(lambda a, b: a.float() @ b.float()) if fused else None, exact=True)
    errors = []
    for scores in ((q @ k.transpose(2, 3)).float(), plain_attention.times(q, k.transpose(2, 3), True, kernels)):
        share = plain_attention.weights(scores, scale, seen)
        errors.append(
            [float((a.double() - b).abs().max()) for a, b in ((scores, exact), (share, (exact * scale).softmax(-1)))]
        )
    print("scores, weights:", *(f"{e:.1e}" for e in errors[0]), "before;", *(f"{e:.1e}" for e in errors[1]), "now")
    assert scores.dtype == torch.float32
    assert all(5 * now <= before for before, now in zip(*errors, strict=True)), errors


def multiplied(backend: Any, stage: Stage, dims: tuple[int, ...], lengths: Any) -> list[tuple[torch.dtype, int]]:
    """Type and elements of the second matrix of every product that a launch in bfloat16 takes."""
    program = backend.program(Bucket(stage, dims), AttentionLayer(backend, 0.0, torch.bfloat16))
    backend.fill(program, step_inputs(lengths, np.random.default_rng(1)))
    found: list[tuple[torch.dtype, int]] = []
    execute = backend.card.execute

    def seen(function: Any, name: str, args: Any, kwargs: Any) -> Any:
        if "bmm" in name:
            found.append((args[1].dtype, args[1].numel()))
        return execute(function, name, args, kwargs)

    backend.card.execute = seen
    program.run()
    return found


def test_keys_and_values_are_multiplied_in_their_own_type(hpu: Make) -> None:
    """Also with softmax in float32, the default of Qwen: as float32 they would be copied at twice their bytes.

    VLLM_FP32_SOFTMAX=1 asks for float32 products of the scores; values are weighted in their own type always.
    """
    for name, (stage, dims, lengths) in LAUNCHES.items():
        for exact in (False, True):
            switches = HpuSettings(fp32_softmax=True, fused_sdpa=False, fp32_products=exact)
            backend = hpu(block_size=BLOCK, switches=switches)
            types = [dtype for dtype, count in multiplied(backend, stage, dims, lengths) if count > 64]
            own = [dtype for dtype in types if dtype == torch.bfloat16]
            assert own and (len(own) == len(types)) is not exact, (name, exact, types)


def test_a_fused_call_a_block_joins_to_the_same_rows(hpu: Make) -> None:
    """TRENCADIS_HPU_DECODE_FUSEDSDPA: keys and values are read once, by the kernel that returns its statistics."""
    stage, dims, lengths = LAUNCHES["decode"]
    inputs = step_inputs(lengths, np.random.default_rng(1))
    want, _ = reference(inputs)
    for lazy in (True, False):
        backend = hpu(block_size=BLOCK, lazy=lazy, switches=settings({"TRENCADIS_HPU_DECODE_FUSEDSDPA": "1"}))
        layer = AttentionLayer(backend, float("nan"))
        program = backend.program(Bucket(stage, dims), layer)
        backend.fill(program, inputs)
        program.run()
        torch.testing.assert_close(layer.out.cpu()[1 : len(inputs.tokens) + 1], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SYMBOLS)
def test_a_kernel_that_is_asked_for_and_missing_is_one_line(name: str) -> None:
    bridge = make_bridge(EmulatedDevice(profile("gaudi3")), lazy=False)
    HpuBackend(BackendConfig(), policy(""), bridge, settings({name: "1"}))
    for value, field in (("1", SYMBOLS[name][0]), ("0", SYMBOLS[name][0])):
        without: dict[str, Any] = {field: None}
        lacking = dataclasses.replace(bridge, **without)
        if value == "0":
            HpuBackend(BackendConfig(), policy(""), lacking, settings({name: value}))
            continue
        with pytest.raises(StartupError, match=f"{name}.*{SYMBOLS[name][1]}.*unset it") as found:
            HpuBackend(BackendConfig(), policy(""), lacking, settings({name: value}))
        assert "\n" not in str(found.value)


@pytest.mark.parametrize(("form", "found"), [("exact", True), ("rounded", False), ("refused", False)])
def test_a_product_into_float32_is_taken_where_it_is_exact(
    form: str, found: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that runs and is rounded has a warning; one that is refused is what most releases have."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        if form == "refused":
            raise RuntimeError("Expected out tensor to have dtype c10::BFloat16, but got float instead")
        return a.float() @ b.float() if form == "exact" else (a @ b).float()

    monkeypatch.setattr(bridge_loader, "FORMS", (multiply, multiply))
    with caplog.at_level("WARNING", "trencadis.engine"):
        bridge_loader.find_product(torch.device("cpu"), None)
    assert ["are off by" in record.getMessage() for record in caplog.records] == [True] * (form == "rounded")
    assert (bridge_loader.find_product(torch.device("cpu"), None) is not None) is found
    assert (bridge_loader.find_product(torch.device("cpu"), lambda f: f) is not None) is found


def test_rotary_is_applied_in_float32(hpu: Make) -> None:
    """At position 100,000 a bfloat16 factor is off by 2**-9; what is left is the rounding of the result."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 2, 64, generator=generator).bfloat16()
    angle = (100_000 + torch.arange(64.0))[:, None] * torch.logspace(0, -6, 32).repeat(2)
    cos, sin = angle.double().cos(), angle.double().sin()
    half = torch.cat([-x.double()[..., 32:], x.double()[..., :32]], -1)
    want = x.double() * cos[:, None] + half * sin[:, None]
    limit = 1.01 * (want.bfloat16().double() - want).abs().max()
    for kernels in (True, False):
        backend = hpu(kernels=kernels)
        on, slot, row, cache = (
            t.to(backend.device)
            for t in (x, torch.arange(64), torch.ones(1).int(), torch.zeros(80, 2, 64, dtype=torch.bfloat16))
        )
        kv = LayerKV(cache, cache.clone())
        rotary = Rotary(*(t.float().to(backend.device) for t in (cos, sin)))
        with backend.card.launch():
            got, own, _ = backend.ops.rope_store(on, on, on, rotary, kv, FreshAttn(slot, row))
        for found in (got.cpu(), own.cpu(), kv.k.cpu()[:64]):
            assert found.dtype == torch.bfloat16 and (found.double() - want).abs().max() < limit


def test_windows_are_one_fused_call(hpu: Make) -> None:
    """[W, h, 64, d] with a mask of the padding, instead of scores in plain operations."""
    backend = hpu(dtype=torch.bfloat16)
    seg = Segments(torch.tensor([0, 0, 1]).int(), torch.tensor([64, 16, 4]).int())
    on = [torch.randn(192, 2, 8).bfloat16().to(backend.device) for _ in range(3)]
    moved = Segments(*(t.to(backend.device) for t in seg if t is not None))
    with calls(backend.card) as found, backend.card.launch():
        prepared = backend.ops.prepare_segments(moved)
        found.clear()
        backend.ops.attend_windows(*on, prepared, 0.3)
    fused = [shapes for op, shapes in found if op == "sdpa_recomp_fwd"]
    assert fused == [((3, 2, 64, 8), (3, 2, 64, 8), (3, 2, 64, 8), (3, 1, 1, 64))]
    assert not [op for op, _ in found if "mm" in op or "softmax" in op]


def joined(bridge: Any, inputs: Any, bucket: Bucket, switches: HpuSettings) -> Tensor:
    """The outputs of one launch on ``bridge``."""
    backend = HpuBackend(BackendConfig(block_size=BLOCK), policy(""), bridge, switches)
    layer = AttentionLayer(backend, float("nan"))
    program = backend.program(bucket, layer)
    backend.fill(program, inputs)
    program.run()
    out: Tensor = layer.out.cpu()[1 : len(inputs.tokens) + 1]
    return out


def test_blocks_are_joined_by_gaudi_3s_kernel() -> None:
    """The kernel's formula on figures worked out by hand, and the kernel against plain operations on ragged rows."""
    high, total = torch.tensor([2.0, 3.0, 0.0]), torch.tensor([1.3679, 1.0, 1.0])
    shape = [3, 1, 1, 1, 1]
    got = block_softmax_adjustment(high.view(shape), total.view(shape), torch.tensor([0, 0, -1]).int(), 1, shape)
    torch.testing.assert_close(got.flatten()[:2], torch.tensor([0.2447, 0.6652]), atol=1e-4, rtol=0)
    assert torch.isfinite(got).all()
    outs = []
    for kind in ("gaudi2", "gaudi3"):
        bridge = make_bridge(EmulatedDevice(profile(kind)))
        assert (bridge.block_adjustment is None) == (kind == "gaudi2")
        stage, dims, lengths = LAUNCHES["decode"]
        inputs = step_inputs(lengths, np.random.default_rng(1))
        outs.append(joined(bridge, inputs, Bucket(stage, dims), HpuSettings()))
        off = joined(bridge, inputs, Bucket(stage, dims), HpuSettings(block_adjustment=False))
        assert torch.equal(off, outs[0])
    want, _ = reference(inputs)
    torch.testing.assert_close(outs[1], want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("version", "card", "has"),
    [
        (None, "GAUDI2", ""), ("1.19.0.561", "GAUDI2", ""), ("1.21.0", "GAUDI3", ""), ("1.22.0.493", "GAUDI3", ""),
        ("1.22.0.740", "GAUDI3", "a"), ("1.22.0.740", "GAUDI2", ""), ("1.24.0.170", "GAUDI2", ""),
        ("1.24.1.35", "GAUDI3", "a"), ("1.24.2", "Gaudi 3", "a"),
    ],
)  # fmt: skip
def test_what_a_release_offers(version: str | None, card: str, has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "hpu", type("Ops", (), {"block_softmax_adjustment": 1}), raising=False)
    found = find_symbols(version, card)
    assert found.sdpa_parts is None, "this one lacks the operation"
    assert (found.block_adjustment is not None) == ("a" in has)


def test_limits_of_the_fused_kernel_are_the_emulators() -> None:
    """huge-mask, float32-in-mode-fp32, causal-statistics, blind-query: a card answers some with NaN and no error."""
    shapes = EmulatedDevice(profile(""), computes=False)
    make_bridge(shapes)
    tall = torch.empty(1, 1, 1 << 16, 8, dtype=torch.bfloat16, device="lazy")
    mask = torch.empty(1, 1, 1 << 16, 1 << 14, dtype=torch.bool, device="lazy")
    with pytest.raises(Refused, match="2\\^31"):
        Kernels(shapes).sdpa(tall, tall[:, :, : 1 << 14], tall[:, :, : 1 << 14], mask)
    rows = plain_attention.mask_rows(1 << 21)
    assert 64 <= rows < plain_attention.QUERY_TILE and rows * (1 << 21) * plain_attention.MASK_ITEM < 1 << 31
    card = EmulatedDevice(profile(""))
    make_bridge(card)
    kernels = Kernels(card)
    x = torch.randn(1, 2, 64, 8).to("lazy")
    with pytest.raises(AssertionError, match="bfloat16 alone"):
        kernels.sdpa(x, x, x, softmax_mode="fp32")
    with pytest.raises(Refused, match="multiples of 1024"):
        kernels.parts(x, x, x, None, True, 0.3, "None")
    blind = kernels.sdpa(x, x, x, torch.zeros(1, 1, 64, 64, dtype=torch.bool).to("lazy"))
    assert blind.cpu().isnan().all(), "a query that sees nothing"


def test_the_ledger_counts_with_the_same_sizes() -> None:
    assert (HpuSettings.context_slice, plain_attention.QUERY_TILE) == (memory_estimator.SLICE, memory_estimator.TILE)
    assert plain_attention.QUERY_TILE % prefill_attention.CAUSAL_STEP == 0


@pytest.mark.parametrize("name", LINES)
def test_no_planned_bucket_passes_the_kernels_limit(name: str) -> None:
    plan, limits = plan_of(name)
    for bucket in plan.buckets:
        check_bucket(bucket, limits.block_size, HpuSettings.context_slice)
        assert largest_mask(bucket, limits.block_size, HpuSettings.context_slice) < 1 << 31


@pytest.mark.parametrize("bucket", [Bucket(Stage.CONTEXT, (8, 8)), Bucket(Stage.CONTEXT, (48, 8))])
@pytest.mark.parametrize("tokens", [4096, 64, 8])
def test_the_largest_mask_is_the_one_that_the_kernel_gets(bucket: Bucket, tokens: int, hpu: Make) -> None:
    backend = hpu(block_size=BLOCK, switches=HpuSettings(context_slice=tokens))
    program = backend.program(bucket, AttentionLayer(backend, 0.0))
    backend.fill(program, step_inputs([(21, 6)], np.random.default_rng(1)))
    with calls(backend.card) as found:
        program.run()
    masks = [shapes[-1] for op, shapes in found if op.startswith("sdpa_recomp") and len(shapes) == 4]
    assert max(2 * s[-2] * s[-1] for s in masks) == largest_mask(bucket, BLOCK, tokens)
    with pytest.raises(StartupError, match=r"attention mask of .* lower --max-num-batched-tokens"):
        backend.program(Bucket(Stage.CONTEXT, ((1 << 21) + 1023, 1)), AttentionLayer(backend, 0.0))
