"""Attention kernels against the reference, over ragged rows; whatever must not be read is NaN."""

from __future__ import annotations

import itertools
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracles.attention_cases import IMAGES, WINDOWS, Case, Prepared, check, moved, packed, prepared
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.kernels import tile_sizes, vision_attention
from trencadis.backends.cuda.kernels.attention_metadata import CudaSegments
from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes, arrays
from trencadis.backends.cuda.ops import CudaOps
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import Segments
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.vision_config import SlotForm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

MIXED = ((0, 6), (21, 1), (5, 3), (130, 1))
CASES = {
    "a_hundred_behind_a_prefix": Case(((700, 123), (40, 1), (0, 3)), group=1, kv_heads=1, d=128, dtype=BF16),
    "prompts": Case(((0, 12), (0, 2), (0, 11)), group=3, kv_heads=1),
    "mixed": Case(MIXED, group=7, kv_heads=1, d=80, shared=True),
    "two_heads": Case(((70, 9),), group=1, block=64, spare=(0, 0)),
    "bf16": Case(MIXED, group=4, kv_heads=1, d=128, block=32, dtype=BF16),
    "decode": Case(((9, 1), (0, 1), (600, 1), (16, 1)), decode=True, group=7, kv_heads=1, d=48, shared=True),
    "decode_bf16": Case(((300, 1), (699, 1)), decode=True, group=8, kv_heads=1, d=64, block=128, dtype=BF16),
    "decode_fp16": Case(((255, 1), (256, 1)), decode=True, group=1, d=112, dtype=FP16, spare=(0, 0)),
    "decode_alone": Case(((5, 1), (300, 1)), decode=True, group=2, kv_heads=1, invariant=True),
}


SEEN = {
    "window": Case(((0, 12), (70, 6), (150, 1), (3, 2)), group=2, kv_heads=1, window=9),
    "window_of_tiles": Case(((140, 9),), group=16, kv_heads=1, d=24, dtype=BF16, window=70, spare=(1, 3)),
    "spans": Case(((0, 21), (40, 12), (0, 1)), group=3, kv_heads=1, spans=True),
    "window_and_spans": Case(((60, 9), (0, 14)), group=2, kv_heads=1, block=32, window=11, spans=True),
    "decode_window": Case(((9, 1), (700, 1), (40, 1)), decode=True, group=2, kv_heads=1, window=33),
    "decode_window_bf16": Case(((900, 1), (3, 1)), decode=True, group=16, kv_heads=1, d=8, dtype=BF16, window=270),
    "sinks": Case(((0, 12), (70, 6), (150, 1)), group=8, kv_heads=1, d=64, sinks=True, window=24),
    "decode_sinks": Case(((9, 1), (700, 1), (1, 1)), decode=True, group=8, kv_heads=1, d=64, sinks=True),
    "invariant_sinks": Case(((600, 4), (0, 3)), group=4, kv_heads=1, sinks=True, invariant=True),
    "head_256": Case(((0, 9), (30, 3)), group=2, kv_heads=1, d=256, dtype=BF16),
    "head_512": Case(((0, 9), (30, 3)), group=2, kv_heads=1, d=512, dtype=BF16),
    "decode_head_512": Case(((65, 1),), decode=True, group=8, kv_heads=1, d=512),
    "planned_by_eight": Case(((0, 21), (140, 5), (3, 1)), group=3, kv_heads=2, planned=8, window=40),
    "invariant_planned_by_eight": Case(((600, 4), (0, 9)), group=2, kv_heads=1, planned=8, invariant=True),
    "decode_head_256": Case(((65, 1),), decode=True, group=4, kv_heads=1, d=256, dtype=BF16, window=20),
}


ways = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["two", "every"])
"""Orders of the grid: there and back, or random ones too."""


def in_orders(run: Any, every: bool = True) -> Any:
    """One result of ``run()``; under the interpreter, equal bits for both ways or every order of the grid."""
    if INTERPRETED:
        from tests.oracles import interpreter

        return interpreter.in_all_orders(run, every)
    return run()


def in_order(kind: str) -> AbstractContextManager[None]:
    """Walks the grid in the order ``kind`` under the interpreter; a card has an order of its own."""
    if INTERPRETED:
        from tests.oracles import interpreter

        return interpreter.order(kind)
    return nullcontext()


@ways
@pytest.mark.parametrize("name", CASES)
def test_text(name: str, every: bool, device: torch.device) -> None:
    ready = prepared(CASES[name], device)
    check(ready, in_orders(ready.run, every))


@pytest.mark.parametrize("name", SEEN)
def test_windows_spans_and_wide_heads(name: str, device: torch.device) -> None:
    """Stored keys before every window of a row are NaN: whole steps of them are skipped, the rest is hidden."""
    ready = prepared(SEEN[name], device)
    check(ready, ready.run())


@pytest.mark.long
@pytest.mark.parametrize("name", SEEN)
def test_windows_in_every_order_of_the_grid(name: str, device: torch.device) -> None:
    ready = prepared(SEEN[name], device)
    check(ready, in_orders(ready.run))


@st.composite
def cases(draw: st.DrawFn, longest: int = 700, most: int = 6) -> Case:
    """Rows of up to ``longest`` keys; ``most``: rows."""
    decode = draw(st.booleans())
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    counts = [1 if decode else draw(st.integers(1, length)) for length in lengths]
    return Case(
        tuple((length - count, count) for length, count in zip(lengths, counts, strict=True)),
        decode,
        group=draw(st.integers(1, 16)),
        kv_heads=draw(st.integers(1, 2)),
        d=8 * draw(st.integers(1, 16)),
        block=draw(st.sampled_from((16, 32, 64, 128))),
        dtype=draw(st.sampled_from((FP32, BF16, FP16))),
        spare=(draw(st.integers(0, 3)), draw(st.integers(0, 20))),
        invariant=draw(st.booleans()),
        shared=draw(st.booleans()),
        processors=draw(st.integers(1, 16)),
        seed=draw(st.integers(0, 1000)),
        window=draw(st.sampled_from((0, 0, 1, 16, 129, 300))),
        spans=draw(st.booleans()),
    )


QUIET: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=8, phases=[Phase.generate], **QUIET)
@given(case=cases(longest=70, most=2))
def test_drawn(case: Case, device: torch.device) -> None:
    ready = prepared(case, device)
    check(ready, ready.run())


@pytest.mark.long
@pytest.mark.parametrize("part", range(12))
def test_drawn_long(part: int, device: torch.device) -> None:
    """Ten cases each, under the interpreter in a drawn order of the grid."""
    found: list[float] = []

    @seed(part)
    @settings(max_examples=10, phases=[Phase.generate], **{**QUIET, "derandomize": False})
    @given(case=cases(most=4), kind=st.sampled_from(("forwards", "backwards", "random 1", "random 2")))
    def run(case: Case, kind: str) -> None:
        ready = prepared(case, device)
        with in_order(kind):
            found.append(check(ready, ready.run()))

    run()
    print(f"\ndrawn cases, part {part}: {len(found)}, largest error {max(found):.1e}")


@pytest.mark.long
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_matrix(dtype: torch.dtype, decode: bool, device: torch.device) -> None:
    """Every head size, group and block size."""
    rows = ((0, 1), (130, 1), (300, 1)) if decode else ((0, 21), (37, 5), (130, 1))
    found = []
    for d, group, block in itertools.product(range(16, 129, 16), range(1, 9), (16, 32, 64, 128)):
        ready = prepared(Case(rows, decode, group, 1, d, block, dtype, seed=len(found)), device)
        found.append(check(ready, ready.run()))
    print(f"\n{dtype}, {'decode' if decode else 'prefill'}: {len(found)} cases, largest error {max(found):.1e}")


IMAGES_OF = {
    "one": [[64, 16, 4]],
    "several": [[48, 64, 7], [1], [64]],
}


@ways
@pytest.mark.parametrize(
    ("name", "dtype", "d"),
    [
        ("one", BF16, 80),
        ("several", BF16, 72),
        ("several", FP32, 96),
        ("several", FP16, 16),
    ],
)
def test_vision(name: str, dtype: torch.dtype, d: int, every: bool, device: torch.device) -> None:
    launch, windows, images = packed(IMAGES_OF[name], 1, d, dtype, device)
    for kernel, want in ((WINDOWS, windows), (IMAGES, images)):
        out = in_orders(lambda kernel=kernel: launch.run(kernel), every)
        launch.check(out, want)
        assert torch.isfinite(out).all(), "padding stays finite"


def test_heads_in_two_parts() -> None:
    found = {d: vision_attention.halves(d) for d in (*range(16, 129, 16), 24, 40, 72, 88, 104)}
    assert found == {
        16: (16, 0), 32: (32, 0), 48: (32, 16), 64: (64, 0), 80: (64, 16), 96: (64, 32), 112: (128, 0), 128: (128, 0),
        24: (32, 0), 40: (32, 16), 72: (64, 16), 88: (64, 32), 104: (128, 0),
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("d", range(16, 129, 8))
def test_vision_matrix(d: int, device: torch.device) -> None:
    """Random packings at every head size and dtype; the larger ones take the tables' long class."""
    generator = torch.Generator().manual_seed(d)
    for dtype, images in itertools.product((FP32, BF16, FP16), (1, 3, 8)):
        sizes = torch.randint(1, 4, (images,), generator=generator).tolist()
        counts = [torch.randint(1, 65, (size,), generator=generator).tolist() for size in sizes]
        launch, windows, whole = packed(counts, 2, d, dtype, device, seed=d)
        launch.check(launch.run(WINDOWS), windows)
        launch.check(launch.run(IMAGES), whole)


FORCED = {
    "attend_prefill": "prompts",
    "attend_decode": "decode_alone",
    "attend_windows": "several",
    "attend_images": "several",
}


def forced(kernel: str, tile: tile_sizes.Tile, device: torch.device) -> None:
    """One small launch with ``tile``, whatever the tables say."""
    tile_sizes.FORCED[kernel] = tile
    try:
        if kernel in ("attend_prefill", "attend_decode"):
            ready = prepared(CASES[FORCED[kernel]], device)
            check(ready, ready.run())
            return
        launch, windows, images = packed(IMAGES_OF[FORCED[kernel]], 1, 16, FP16, device)
        whole = kernel == "attend_images"
        launch.check(launch.run(IMAGES if whole else WINDOWS), images if whole else windows)
    finally:
        tile_sizes.FORCED.clear()


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        ("attend_prefill", tile_sizes.Tile(128, 64, 8, 3)),
        ("attend_prefill", tile_sizes.Tile(128, 128, 8, 2)),
        ("attend_prefill", tile_sizes.Tile(128, 32, 4, 3)),
        ("attend_decode", tile_sizes.Tile(16, 128, 4, 3)),
        ("attend_images", tile_sizes.Tile(128, 64, 8, 3)),
        ("attend_images", tile_sizes.Tile(64, 32, 4, 2)),
    ],
    ids=str,
)
def test_large_tiles(kernel: str, tile: tile_sizes.Tile, device: torch.device) -> None:
    """Tiles of long launches, on small ones: Q-blocks longer than rows, queries of several images in one tile."""
    forced(kernel, tile, device)


@pytest.mark.long
@pytest.mark.parametrize("kernel", FORCED)
def test_all_tiles(kernel: str, device: torch.device) -> None:
    """Every shape of every table."""
    shapes = {e.tile[:2] for e in tile_sizes.table(kernel)}
    for m, n in shapes:
        forced(kernel, tile_sizes.Tile(m, n, 4, 1), device)
    print(f"\n{kernel}: {sorted(shapes)}")


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_token_does_not_depend_on_its_launch(dtype: torch.dtype, device: torch.device) -> None:
    """``--batch-invariant``: the same bits in a chunk, a shorter chunk, a mixed launch, and decoded alone or not."""

    def case(rows: tuple[tuple[int, int], ...], decode: bool = False) -> Prepared:
        return prepared(Case(rows, decode, kv_heads=1, dtype=dtype, invariant=True, seed=len(rows)), device)

    source = case(((146, 5), (30, 7)))
    wanted = source.run()[0][4]
    for target, row, count in (
        (case(((148, 3),)), 0, 3),
        (case(((20, 9), (150, 1), (0, 20))), 1, 1),
        (case(((150, 1),), decode=True), 0, 1),
        (case(((5, 1), (150, 1), (40, 1)), decode=True), 1, 1),
    ):
        assert torch.equal(moved(source, 4, target, row, count), wanted), target.case.rows


@pytest.mark.parametrize("runs", [3, pytest.param(100, marks=pytest.mark.long)])
def test_same_bits_every_time(runs: int, device: torch.device) -> None:
    for name in ("bf16", "decode_fp16"):
        ready = prepared(CASES[name], device)
        first = ready.run()
        count = runs if INTERPRETED or runs == 3 else 1000
        for _ in range(count):
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(ready.run(), first, strict=True))


class NothingElse(TorchDispatchMode):
    """No tensor is made, copied or read while a launcher runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a launcher calls {func}")


def test_launchers_allocate_nothing_and_read_nothing(device: torch.device) -> None:
    from trencadis.backends.cuda.kernels import rotary_kernels

    for name in ("two_heads", "decode_alone"):
        ready = prepared(CASES[name], device)
        turned = torch.empty_like(ready.q)
        with NothingElse():
            rotary_kernels.rope_vision(ready.q, ready.k, ready.cos, ready.sin, ready.q, ready.k)
            caches, slots = ready.cache[:2], ready.tensors.attn.slot_map
            rotary_kernels.rope_store(ready.q, ready.k, ready.v, ready.cos, ready.sin, *caches, slots, ready.q)
            ready.attend(turned)
    launch, _, _ = packed([[64, 3]], 1, 16, FP32, device)
    with NothingElse():
        for kernel in (WINDOWS, IMAGES):
            kernel(launch.q, launch.k, launch.v, launch.seg, 0.25, launch.out)
    with pytest.raises(AssertionError, match="calls"), NothingElse():
        torch.empty(1)


def test_padding_windows_are_blind_to_each_other(device: torch.device) -> None:
    """Images with windows that the others see, one of them without; keys and values of padding are NaN."""
    real = np.array([64, 20, 64, 7, 40, 64, 9], np.int32)
    padding_window, segment = np.array([0, 0, 1, 1, 0, 0, 1], np.int32), np.array([0, 0, 0, 0, 4, 5, 5], np.int32)
    slots, d = 64 * len(real), 16
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(slots, 2, d, generator=generator) for _ in range(3))
    inside = (torch.arange(64) < torch.from_numpy(real)[:, None]).flatten()
    want = ReferenceOps().attend_images(q, k, v, Segments(*map(torch.from_numpy, (segment, real, padding_window))), 0.3)
    other = ReferenceOps().attend_images(q, k, v, Segments(*map(torch.from_numpy, (segment, real))), 0.3)
    none = np.zeros((slots, 1), np.uint8)
    packed_inputs = VisionInputs(none, np.zeros((slots, 2), np.int32), segment, real, np.zeros(slots, np.int32))
    packed_inputs.padding_window = padding_window
    made = arrays(
        Bucket(Stage.VISION, (slots,)), packed_inputs, Sizes(16, 1, 8, slot=SlotForm(1, 1, padding_windows=True))
    )
    seg = CudaSegments(*(torch.from_numpy(a).to(device) for a in made.segments))
    for t in (k, v):
        t[~inside] = float("nan")
    on = [t.to(device) for t in (q, k, v)]
    got = CudaOps().attend_images(on[0], on[1], on[2], seg, 0.3).cpu()  # type: ignore[arg-type]
    assert (got[inside] - want[inside]).abs().max() < 2e-5 < (other[inside] - want[inside]).abs().max()
