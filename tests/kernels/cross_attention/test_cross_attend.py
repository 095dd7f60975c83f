"""Attention to images in the arena against the reference; whatever must not be read is NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.kernels.cross_attention.cross_attention_cases import CrossAttentionCase, CrossAttentionLaunch, launched
from trencadis.backends.cuda.kernels import cross_attend, query_blocks_and_key_cuts
from trencadis.backends.cuda.launches import attention_work_items, bucket_capacity

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QUIET: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of 64 rows, so that small images have several."""
    for module in (query_blocks_and_key_cuts, bucket_capacity, cross_attend):
        monkeypatch.setattr(module, "IMAGE_SPAN", 64)
    monkeypatch.setattr(attention_work_items, "LEAST", 64)


CASES = {
    "a prompt before and behind": CrossAttentionCase(((150, 150),) * 3 + ((70, 0),) * 5 + ((70, 70),) + ((0, 9),) * 9),
    "neighbours, one twice": CrossAttentionCase(
        ((1, 0, 149), (1, 64, 149), (0, 65, 150)), ((1, 0, 2), (3, 1, 2), (0, 1, 7)), (2, 0, 3), group=3, kv_heads=1
    ),
    "no image": CrossAttentionCase(((0,),) * 4, group=4),
    "one of many": CrossAttentionCase(((0, 0, 0, 128, 0),) + ((0,) * 5,) * 20, group=16, kv_heads=1, spare=(0, 0)),
    "decode": CrossAttentionCase(((150, 0), (0, 0), (0, 1), (64, 130), (150, 0)), decode=True, group=4, kv_heads=2),
    "decode, cut": CrossAttentionCase(((150, 130, 64),), decode=True, group=7, kv_heads=1, processors=132, d=24),
    "prompt, cut": CrossAttentionCase(((150, 20, 129),) * 30, group=5, kv_heads=1, processors=132, d=80),
    "bf16": CrossAttentionCase(((150, 20),) * 8 + ((65, 0),) * 3, group=4, kv_heads=1, d=128, dtype=BF16,
        processors=64),
    "decode fp16": CrossAttentionCase(((100, 2), (7, 90)), decode=True, group=8, kv_heads=1, d=128, dtype=FP16),
    "head of 256": CrossAttentionCase(((70,),) * 3, group=2, kv_heads=1, d=256, dtype=BF16),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_images(name: str, device: torch.device) -> None:
    ready = launched(CASES[name], device)
    first = ready.run()
    print(f"\n{name}: {ready.check(first):.1e}")
    assert torch.equal(ready.run(), first), "partial results of an earlier launch change nothing"
    cut = int((ready.tensors.cross_attention.merge_token >= 0).sum())
    assert (cut > 0) == name.endswith(("cut", "bf16")), cut


@pytest.mark.parametrize("name", ["decode, cut", "neighbours, one twice"])
def test_every_order_of_the_grid(name: str, device: torch.device, interpreted: None) -> None:
    from tests.oracles import interpreter

    ready = launched(CASES[name], device)
    ready.check(interpreter.in_all_orders(ready.run, True))


def test_spans_of_their_own_length(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (query_blocks_and_key_cuts, bucket_capacity, cross_attend):
        monkeypatch.setattr(module, "IMAGE_SPAN", 512)
    case = CrossAttentionCase(((1100, 0), (1025, 700)), decode=True, group=4, kv_heads=1, length=1101, processors=132)
    ready = launched(case, device)
    ready.check(ready.run())
    assert ready.tensors.cross_attention.merge_part.tolist()[:2] == [0, 5]


@st.composite
def cases(draw: st.DrawFn, most: int = 12) -> CrossAttentionCase:
    """Tokens that see any rows of up to five images, some of them nothing."""
    units, length = draw(st.integers(1, 5)), draw(st.integers(1, 200))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    n = draw(st.integers(1, most))
    reach = rng.integers(1, length + 1, (n, units)) * (rng.random((n, units)) < rng.choice((0.2, 0.6, 1.0)))
    times = np.where(reach > 0, rng.integers(1, 4, (n, units)), 0)
    return CrossAttentionCase(
        tuple(map(tuple, reach.tolist())), tuple(map(tuple, times.tolist())),
        tuple(rng.permutation(units + 2)[:units].tolist()), draw(st.booleans()), length,
        group=draw(st.integers(1, 16)), kv_heads=draw(st.integers(1, 2)), d=8 * draw(st.integers(1, 16)),
        dtype=draw(st.sampled_from((FP32, BF16, FP16))), spare=(draw(st.integers(0, 9)), draw(st.integers(0, 3))),
        processors=draw(st.sampled_from((0, 4, 132))), seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


@settings(max_examples=15, phases=[Phase.generate], **QUIET)
@given(case=cases())
def test_drawn_images(case: CrossAttentionCase, device: torch.device) -> None:
    ready = launched(case, device)
    ready.check(ready.run())


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_many_drawn_images(part: int, device: torch.device) -> None:
    found: list[float] = []

    @settings(max_examples=30, phases=[Phase.generate], **{**QUIET, "derandomize": False})
    @given(case=cases(40))
    def run(case: CrossAttentionCase) -> None:
        ready = launched(case, device)
        found.append(ready.check(ready.run()))

    run()
    print(f"\npart {part}: {len(found)} launches, largest error {max(found):.1e}")


def moved(source: CrossAttentionLaunch, token: int, target: CrossAttentionLaunch, at: int) -> torch.Tensor:
    """What ``target`` gives for its token ``at`` if it has the query of ``source``'s token ``token``."""
    target.q[at] = source.q[token]
    return target.run()[at]


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_token_does_not_depend_on_its_company(dtype: torch.dtype, decode: bool, device: torch.device) -> None:
    """The same bits alone and among others, its images cut or whole; others' images hold NaN, or more rows."""
    sees, other, third = (130, 0, 70), (0, 150, 0), (150, 0, 150)
    base = CrossAttentionCase((sees,), ((2, 0, 1),), decode=decode, group=4, kv_heads=1, dtype=dtype, processors=0)
    images = torch.randn(4, base.length, 2 * base.d, generator=torch.Generator().manual_seed(5))
    alone = launched(base, device, images)
    assert int(alone.tensors.cross_attention.merge_token.max()) < 0
    wanted = alone.run()[0]
    for rows, at, processors in (
        ((sees,), 0, 132), ((other, other, sees), 2, 0), ((third,) * 5 + (sees,) + (third,) * 9, 5, 132),
        (((0, 0, 0), sees, other), 1, 132),
    ):  # fmt: skip
        times = tuple((2, 0, 1) if row == sees else tuple(min(n, 1) for n in row) for row in rows)
        case = replace(base, reach=rows, times=times, processors=processors)
        spoilt = images.clone()
        spoilt[1] = float("nan")
        target = launched(case, device, spoilt)
        assert (int(target.tensors.cross_attention.merge_token.max()) >= 0) == (processors > 0)
        assert torch.equal(moved(alone, 0, target, at), wanted), rows


def test_a_join_in_another_order_is_found(device: torch.device) -> None:
    """The same spans joined from the last to the first: other bits, so the test above compares something."""
    case = CrossAttentionCase(((150, 130, 64),), decode=True, group=4, kv_heads=1, processors=132)
    ready = launched(case, device)
    wanted = ready.run()[0]
    used = int(ready.tensors.cross_attention.merge_part[-1])
    for t in ready.workspace:
        t[:used] = torch.flip(t[:used], (0,))
    kernel = cross_attend.pictures_kernel

    class Skipped:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: None

    cross_attend.pictures_kernel = Skipped()
    try:
        again = ready.run()[0]
    finally:
        cross_attend.pictures_kernel = kernel
    assert used == 7 and not torch.equal(again, wanted)
    torch.testing.assert_close(again, wanted, rtol=1e-5, atol=1e-5)


def test_a_launch_that_the_kernel_could_not_take_is_refused(device: torch.device) -> None:
    ready = launched(CASES["no image"], device)
    k, v = torch.split(ready.held, ready.held.shape[1] // 2, dim=1)
    seen, room = ready.tensors.cross_attention, ready.workspace
    wide = torch.zeros(len(k), 2 * k.shape[1] + 1, device=device)
    for keys, values, items_of, out in (
        (k.half(), v, seen, ready.out),
        (wide[:, 1 : 1 + k.shape[1]], wide[:, : k.shape[1]], seen, ready.out),
        (k.contiguous(), v, seen, ready.out),
        (k, v, seen._replace(reach=seen.reach[:-1]), ready.out),
        (k, v, seen, ready.out[:, ::2]),
    ):
        with pytest.raises(AssertionError):
            cross_attend.cross_attend(ready.q, keys, values, items_of, 1.0, out, room)
