"""Host side of the CUDA launches: cuts of decoding rows, buffers, tile tables, limits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.attention_cases import Case, step_inputs
from trencadis.backends.cpu import make_backend
from trencadis.backends.cuda import runtime_of
from trencadis.backends.cuda.kernels import attention_metadata, paged_attention, tile_sizes, vision_attention
from trencadis.backends.cuda.launches.attention_work_items import END, STEP
from trencadis.backends.cuda.launches.bucket_capacity import input_bytes
from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes
from trencadis.backends.cuda.launches.input_buffers import InputBuffers, StageBuffer, buffer_bytes
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import BackendConfig, LayerKV
from trencadis.core.device_shape_policy import InputSizes
from trencadis.core.errors import StartupError
from trencadis.core.launch_inputs import HeadInputs, ResetInputs, VisionInputs
from trencadis.core.vision_config import SlotForm


def reference(case: Case) -> Any:
    backend = make_backend(BackendConfig(block_size=case.block, options={"policy": "padded", "threads": "1"}))
    program: Any = backend.program(case.bucket, print)
    backend.fill(program, step_inputs(case))
    return program.inputs


CASES = [
    Case(((0, 13), (21, 1), (5, 9)), seed=1),
    Case(((9, 1), (0, 1), (300, 1)), decode=True, seed=2),
]


@pytest.mark.parametrize("case", CASES, ids=["prefill", "decode"])
def test_text_buffers_equal_the_references(case: Case) -> None:
    """A short launch after a long one in the same buffers; what the long one left behind changes nothing."""
    full = Case(tuple((c + 7, t) for c, t in case.rows), case.decode, spare=case.spare, seed=7)
    assert full.bucket == case.bucket
    buffers = InputBuffers(case.bucket, full.sizes, runtime_of(torch.device("cpu")))

    def pointers(x: Any) -> list[int]:
        return [t.data_ptr() for t in (*x[:5], *x.attn) if t is not None]

    places = pointers(buffers.tensors)
    buffers.fill(step_inputs(full))
    buffers.fill(step_inputs(case))
    got, want = buffers.tensors, reference(case)
    assert pointers(got) == places
    assert all((place - places[0]) % 256 == 0 for place in places)
    for name in ("tokens", "from_slot", "positions", "image_row", "out_row"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for name in ("row_start", "context", "slot_map"):
        assert torch.equal(getattr(got.attn, name), getattr(want.attn, name)), name
    for row, (context, count) in enumerate(case.rows):
        held = -(-(context + count) // case.block)
        start, stop = got.attn.block_start[row : row + 2].tolist()
        assert torch.equal(got.attn.blocks[start:stop], want.attn.blocks[row, :held])


def test_only_models_that_need_it_have_upto_and_the_planner_counts_it() -> None:
    for spans in (False, True):
        for case in (replace(c, spans=spans) for c in CASES):
            sizes = case.sizes
            buffers = InputBuffers(case.bucket, sizes, runtime_of(torch.device("cpu")))
            planned = InputSizes(
                sizes.vocab, sizes.block_size, sizes.row_blocks, sizes.kv_heads, upto=spans, group=sizes.group
            )
            assert input_bytes(case.bucket, planned, processors=sizes.processors) == buffers.bytes
            held = getattr(buffers.tensors.attn, "upto", None)
            assert (held is not None) == (spans and not case.decode)


def test_longest_items_go_first() -> None:
    case = Case(((0, 13), (210, 1), (50, 9)), spare=(1, 3), group=16)
    buffers = InputBuffers(case.bucket, case.sizes, runtime_of(torch.device("cpu")))
    buffers.fill(step_inputs(case))
    attn, each = buffers.tensors.attn, 2
    used = int((attn.item_row >= 0).sum())
    assert attn.item_row[:used].tolist() == [1, *[2] * 5, *[0] * 7, *[4] * 2], "the surplus row is the last"
    assert attn.item_token[:used].tolist() == [0, 8, 6, 4, 2, 0, 12, 10, 8, 6, 4, 2, 0, 0, 2]
    assert each * len(attn.item_row) >= case.bucket.dims[0] and not attn.item_begin.any()
    assert (attn.item_stop[:used] == END).all() and (attn.join_row == -1).all() and (attn.item_part == -1).all()


def test_other_stages_equal_the_references() -> None:
    rng = np.random.default_rng(0)
    ids, real = np.array([3, 1], np.int32), np.array([0.5, 0.7], np.float32)
    inputs = {
        Bucket(Stage.VISION, (256,)): VisionInputs(
            rng.integers(0, 256, (128, 1176), dtype=np.uint8), rng.integers(0, 9, (128, 2), dtype=np.int32),
            np.array([0, 0], np.int32), np.array([64, 5], np.int32), np.arange(2, 34, dtype=np.int32),
        ),
        Bucket(Stage.SAMPLE, (4,), "full"): HeadInputs(
            ids, ids, real, ids, real, real, real, real, real, real, ids, ids, np.full((2, 13), 5, np.uint8)
        ),
        Bucket(Stage.RESET, (3,)): ResetInputs(
            ids, np.ones((2, 99), np.int32), np.ones((2, 13), np.uint8), np.ones((2, 300), np.int32),
            np.ones((2, 300), np.float32),
        ),
    }  # fmt: skip
    backend = make_backend(BackendConfig(options={"policy": "padded", "threads": "1"}))
    x: Any
    for bucket, x in inputs.items():
        buffers = InputBuffers(bucket, Sizes(16, 4, 99, slot=SlotForm(1176, 4)), runtime_of(torch.device("cpu")))
        buffers.fill(x)
        program: Any = backend.program(bucket, print)
        backend.fill(program, x)
        for name, want in program.inputs._asdict().items():
            got = getattr(buffers.tensors, name)
            if name == "segments":
                assert torch.equal(got.segment, want.segment) and torch.equal(got.real, want.real)
                assert got.first.tolist() == [0, 0, 2, 3] and got.stop.tolist() == [2, 2, 3, 4]
                assert got.order.tolist() == [0, 1, 2, 3] and got.whole.tolist() == [1, 1, 3, 4]
                continue
            if want is None:
                assert got is None, f"{bucket}: {name}"
                continue
            assert torch.equal(got[: len(want)], want), f"{bucket}: {name}"


KERNELS = {
    "attend_prefill": ("short", "long", "plain long"),
    "attend_decode": ("any",),
    "attend_windows": ("any",),
    "attend_images": ("short", "long"),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_tables_answer_every_launch(kernel: str) -> None:
    used = set()
    heads = (
        attention_metadata.HEADS if kernel in ("attend_prefill", "attend_decode") else attention_metadata.VISION_HEADS
    )
    axes = (tile_sizes.SHARED, (16, 32), heads, attention_metadata.GROUPS, KERNELS[kernel])
    for arch, bits, head, group, length in itertools.product(*axes):
        if group > 1 and kernel in ("attend_windows", "attend_images"):
            continue
        tile = tile_sizes.find(kernel, arch, bits, head, group, *length.split())
        used.add((arch, bits, tile))
        assert all(x & (x - 1) == 0 for x in tile[:3]) and tile.m >= 16 and tile.n >= 16
        if kernel in ("attend_prefill", "attend_decode"):
            assert tile.m >= group and STEP % tile.n == 0
        elif kernel == "attend_windows":
            assert vision_attention.WINDOW % tile.m == 0
        else:
            assert vision_attention.WINDOW % tile.n == 0
    listed = {(e.arch, e.bits, e.tile) for arch in tile_sizes.SHARED for e in tile_sizes.entries(kernel, arch)}
    assert used == listed, "an entry is never used"
    with pytest.raises(LookupError, match="no tile for sm_75"):
        tile_sizes.find(kernel, 75, 16, 64, 1, KERNELS[kernel][0])


@pytest.mark.parametrize(
    ("tokens", "arch", "more", "tile"),
    [
        (127, 90, {}, (32, 64)),
        (128, 90, {}, (128, 128)),
        (256, 90, {"block": 128}, (128, 64)),
        (256, 90, {"window": 64}, (128, 64)),
        (256, 90, {"upto": True}, (128, 64)),
        (256, 90, {"d": 80}, (128, 64)),
        (256, 90, {"dtype": torch.float32}, (16, 16)),
        (256, 100, {}, (128, 64)),
        (511, 80, {}, (32, 64)),
        (512, 80, {}, (128, 32)),
    ],
    ids=str,
)
def test_prompts_have_the_long_tiles_of_their_card(
    tokens: int, arch: int, more: dict[str, Any], tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 128 tokens on where products are by warp groups, from 512 on elsewhere; steps of 128 keys where they fit the
    registers.
    """
    monkeypatch.setattr(tile_sizes, "arch_of", lambda device: arch)
    given = {"d": 128, "block": 16, "dtype": torch.bfloat16, "window": 0, "upto": False, **more}
    q = torch.zeros(tokens, 14, given["d"], dtype=given["dtype"])
    kv = LayerKV(*(torch.zeros(4, given["block"], 2, given["d"], dtype=given["dtype"]) for _ in range(2)))
    x = torch.zeros(1, dtype=torch.int32)
    attn = attention_metadata.ItemAttn(*[x] * 13)._replace(upto=x if given["upto"] else None)
    lanes = paged_attention.block_lanes(attn, tokens, alike=False)
    classes = paged_attention.length_classes(q, kv, attn, lanes, given["window"])
    found = tile_sizes.pick("attend_prefill", q, 7, *classes)
    assert found[:2] == tile
    assert lanes == (32 if tokens < 128 else 128) and lanes % min(found.m, lanes) == 0


def test_limits_are_named() -> None:
    attention_metadata.check_supported(80, 7, 16, torch.bfloat16)
    wrong: dict[str, tuple[Any, ...]] = {
        "68 values": (68, 1, 16, torch.float32),
        "76 values": (76, 1, 16, torch.float32, attention_metadata.VISION_HEADS),
        "520 values": (520, 1, 16, torch.float32),
        "17 query heads": (64, 17, 16, torch.float32),
        "--block-size 8": (64, 1, 8, torch.float32),
        "float64": (64, 1, 16, torch.float64),
    }
    for text, args in wrong.items():
        with pytest.raises(StartupError, match=text):
            attention_metadata.check_supported(*args)


def test_buckets_may_share_their_memory() -> None:
    """Filled in turn, each launch sees its own values at addresses that never move."""
    one, two = CASES
    size = max(buffer_bytes(c.bucket, c.sizes) for c in CASES)
    room = StageBuffer(size, runtime_of(torch.device("cpu")))
    shared = [InputBuffers(c.bucket, c.sizes, room.runtime, room) for c in CASES]
    places = [b.tensors.attn.row_start.data_ptr() for b in shared]
    for _ in range(2):
        for case, buffers in ((one, shared[0]), (two, shared[1])):
            buffers.fill(step_inputs(case))
            alone = InputBuffers(case.bucket, case.sizes, room.runtime)
            alone.fill(step_inputs(case))
            used = int(alone.tensors.attn.block_start[-1])
            for name, want in alone.tensors.attn._asdict().items():
                got = getattr(buffers.tensors.attn, name)
                if want is None:
                    assert got is None and name == "upto"
                    continue
                assert got.shape == want.shape
                assert torch.equal(got[:used], want[:used]) if name == "blocks" else torch.equal(got, want), name
    assert places == [b.tensors.attn.row_start.data_ptr() for b in shared]
    with pytest.raises(AssertionError, match="bytes"):
        InputBuffers(one.bucket, one.sizes, room.runtime, StageBuffer(256, room.runtime))
