"""Attention of prompts and images on the CPU: held to float64, by each kind of kernels and by torch.

With own kernels, the bits of a query depend on what it sees alone; torch does not promise that. Padding is never read,
and is zero in the result, whoever serves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import kernel_kinds
from trencadis.backends.cpu.attention_plan import CpuAttn
from trencadis.backends.cpu.native import attention_and_row_kernels
from trencadis.backends.cpu.native.kernel_choice_by_cpu import EMULATED, TORCH, Op
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.device.backend import LayerKV, Segments
from trencadis.core.models import kv_cache_quantisation
from trencadis.core.vision_config import WINDOW_SLOTS

BLOCK = 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = (
    # rows as (stored tokens, tokens), query heads, KV heads, values of a head, window
    ([(0, 2)], 1, 1, 16, 0),
    ([(0, 63), (1, 64), (0, 65)], 4, 2, 64, 0),
    ([(0, 1000)], 2, 1, 64, 0),
    ([(70, 130), (0, 3), (500, 65)], 14, 2, 64, 0),
    ([(3, 200), (0, 40)], 6, 2, 80, 33),
    ([(190, 150)], 4, 4, 72, 64),
    ([(5, 90), (128, 64)], 3, 1, 128, 0),
    ([(9, 70)], 8, 2, 256, 0),
    ([(30, 66)], 5, 1, 24, 7),
    ([(64, 70)], 2, 2, 7, 0),
)


@dataclass
class Prompts:
    """Rows of several tokens over a cache whose blocks lie in any order; what no row holds is no number."""

    q: Tensor
    kv: LayerKV
    attn: CpuAttn
    window: int

    def run(self, ops: ReferenceOps) -> Tensor:
        return ops.attend(self.q, self.q, self.q, self.kv, self.attn, self.q.shape[-1] ** -0.5, self.window)

    def exact(self, cache: LayerKV) -> Tensor:
        """float64 [tokens, heads, size] over keys and values of ``cache``."""
        out, starts = [], self.attn.row_start.tolist()
        each = self.q.shape[1] // self.kv.k.shape[2]
        for row, context in enumerate(self.attn.context.tolist()[:-1]):
            tokens = slice(starts[row], starts[row + 1])
            own = np.arange(context, context + tokens.stop - tokens.start)
            last = own if self.attn.upto is None else self.attn.upto[tokens].numpy()
            place = np.arange(context + len(own))
            slot = self.attn.blocks[row].numpy()[place // BLOCK] * BLOCK + place % BLOCK
            k, v = (t.flatten(0, 1).double()[slot].repeat_interleave(each, 1) for t in (cache.k, cache.v))
            hidden = place > last[:, None]
            if self.window:
                hidden |= place <= own[:, None] - self.window
            scores = torch.einsum("nhd,jhd->hnj", self.q[tokens].double(), k) * self.q.shape[-1] ** -0.5
            weights = scores.masked_fill(torch.from_numpy(hidden), -torch.inf).softmax(-1)
            out.append(torch.einsum("hnj,jhd->nhd", weights, v))
        return torch.cat(out)


def prompts(
    case: tuple[list[tuple[int, int]], int, int, int, int], dtype: torch.dtype, shuffled: bool = True
) -> Prompts:
    """Random rows; queries are views of a fused projection, as a model hands them over."""
    rows, heads, groups, size, window = case
    generator = torch.Generator().manual_seed(0)
    per = -(-max(sum(row) for row in rows) // BLOCK)
    shape = (len(rows) * per + 2, BLOCK, groups, size)
    k, v = (torch.full(shape, float("nan")).to(dtype) for _ in "kv")
    order = torch.randperm(len(rows) * per, generator=generator) if shuffled else torch.arange(len(rows) * per)
    table = torch.zeros(len(rows) + 1, per + 3, dtype=torch.int32)
    table[:-1, :per] = (order + 2).int().view(len(rows), per)
    for row, (context, count) in enumerate(rows):
        place = torch.arange(context + count)
        slot = table[row, place // BLOCK].long() * BLOCK + place % BLOCK
        for cache in (k, v):
            cache.flatten(0, 1)[slot] = torch.randn(len(slot), groups, size, generator=generator).to(dtype)
    starts = np.cumsum([0, *(count for _, count in rows)])
    attn = CpuAttn(
        torch.tensor([*starts, starts[-1]], dtype=torch.int32),
        torch.tensor([*(context for context, _ in rows), 0], dtype=torch.int32),
        table, torch.zeros(int(starts[-1]), dtype=torch.int64),
    )  # fmt: skip
    fused = torch.randn((int(starts[-1]), heads + groups, size), generator=generator).to(dtype)
    return Prompts(fused[:, :heads], LayerKV(k, v), attn, window)


def off(found: Tensor, exact: Tensor) -> float:
    """The largest difference, of the largest value."""
    return float((found.double() - exact).abs().max() / exact.abs().max())


def step(dtype: torch.dtype) -> float:
    return 3e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps


@pytest.fixture(params=kernel_kinds.EVERY)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    made = CpuOps()
    made.table = kernel_kinds.table(request.param)
    return made


def own(ops: CpuOps, dtype: torch.dtype) -> bool:
    """Whether an own kernel attends; a table of AMX leaves bfloat16 to torch."""
    return ops.table.serves(Op.ATTENTION, str(dtype).removeprefix("torch."))


def bound(ops: CpuOps, dtype: torch.dtype) -> float:
    """torch rounds weights to the type before it multiplies by them."""
    return step(dtype) if own(ops, dtype) else 2 * step(dtype)


@pytest.mark.parametrize(("shuffled", "dtype"), [
    *((True, dtype) for dtype in DTYPES), (False, torch.float32),
    *(pytest.param(False, dtype, marks=pytest.mark.long) for dtype in DTYPES[1:]),
])  # fmt: skip
def test_prompts_attend_as_float64_does(ops: CpuOps, dtype: torch.dtype, shuffled: bool) -> None:
    for case in CASES:
        made = prompts(case, dtype, shuffled)
        exact = made.exact(made.kv)
        with kernel_kinds.served("attention", ops.table, own(ops, dtype)):
            found = made.run(ops)
        assert off(found, exact) <= bound(ops, dtype), case
        made.kv = LayerKV(*(t.nan_to_num(0.0) for t in made.kv[:2]))  # the reference reads every slot
        assert off(made.run(ReferenceOps()), exact) <= step(dtype), case


def test_tokens_see_as_far_as_their_spans_say(ops: CpuOps) -> None:
    for window in (0, 50):
        made = prompts(([(20, 150), (0, 70)], 4, 2, 64, window), torch.float32)
        upto = torch.cat([torch.arange(20, 170), torch.arange(70)]).int()
        upto[40:120], upto[150:] = 139, 69  # an image inside the first row; all of the second sees all of it
        made.attn = CpuAttn(*made.attn[:4], upto=upto)
        assert off(made.run(ops), made.exact(made.kv)) <= step(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_what_a_query_sees_alone(ops: CpuOps, dtype: torch.dtype) -> None:
    """The last row of three is run alone, and its tokens in two launches instead of one."""
    if not own(ops, dtype):
        pytest.skip("torch's attention does not promise it")
    for case in (CASES[3], CASES[4]):
        made = prompts(case, dtype)
        rows, found = case[0], made.run(ops)
        row, (context, count) = len(rows) - 1, rows[-1]
        first = len(found) - count
        for start, stop in ((0, count), (0, 17), (17, count)):
            attn = CpuAttn(
                torch.tensor([0, stop - start, stop - start], dtype=torch.int32),
                torch.tensor([context + start, 0], dtype=torch.int32),
                made.attn.blocks[[row, -1]], torch.zeros(stop - start, dtype=torch.int64),
            )  # fmt: skip
            part = Prompts(made.q[first + start : first + stop], made.kv, attn, made.window)
            assert torch.equal(part.run(ops), found[first + start : first + stop]), (case, start, stop)


def test_bits_do_not_depend_on_threads(ops: CpuOps) -> None:
    if not own(ops, torch.bfloat16):
        pytest.skip("torch's attention does not promise it")
    made, outs = prompts(CASES[3], torch.bfloat16), []
    for count in (1, 2, 5):
        with kernel_kinds.threads(count):
            outs.append(made.run(ops))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_codes_of_eight_bits_are_opened(ops: CpuOps) -> None:
    made = prompts(CASES[3], torch.bfloat16)
    k, v = (t.nan_to_num(0.0) for t in made.kv[:2])
    codes, scales = ([torch.zeros(shape, dtype=dtype) for _ in "kv"] for shape, dtype in
                     ((k.shape, torch.int8), (k.shape[:3], torch.float16)))  # fmt: skip
    made.kv = LayerKV(codes[0], codes[1], scales[0], scales[1])
    kv_cache_quantisation.store(k.flatten(0, 1), v.flatten(0, 1), made.kv, torch.arange(k.shape[0] * BLOCK))
    opened = kv_cache_quantisation.read_slots(made.kv, slice(0, k.shape[0] * BLOCK), torch.bfloat16)
    exact = made.exact(LayerKV(*(t.view(k.shape) for t in opened)))
    assert off(made.run(ops), exact) <= bound(ops, torch.bfloat16)


def make_images(
    dtype: torch.dtype, size: int, padding_windows: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Segments, Tensor]:
    """(q, k and v of a fused projection, images of 17, 1 and 3 windows and an empty one, which slots are real)."""
    count, heads = 22, 3
    real = torch.full((count,), WINDOW_SLOTS, dtype=torch.int32)
    real[[5, 16, 17, 19]], real[21] = torch.tensor([48, 1, 63, 40], dtype=torch.int32), 0
    segment = torch.tensor([0] * 17 + [1] + [2] * 3 + [3], dtype=torch.int32)
    padding_window = torch.zeros(count, dtype=torch.int32)
    padding_window[19] = 1
    fused = torch.randn((count * WINDOW_SLOTS, 3 * heads, size), generator=torch.Generator().manual_seed(1)).to(dtype)
    inside = (torch.arange(WINDOW_SLOTS) < real[:, None]).flatten()
    fused[~inside, heads:] = float("nan")
    q, k, v = fused.split(heads, dim=1)
    return (q, k, v), Segments(segment, real, padding_window if padding_windows else None), inside


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 72, 80, 128])
@pytest.mark.parametrize("padding_windows", [False, True])
def test_images_attend_as_the_reference_does(ops: CpuOps, dtype: torch.dtype, size: int, padding_windows: bool) -> None:
    (q, k, v), seg, inside = make_images(dtype, size, padding_windows)
    clean, reference = [t.nan_to_num(0.0).double() for t in (q, k, v)], ReferenceOps()
    for name in ("attend_windows", "attend_images"):
        exact = getattr(reference, name)(*clean, seg, size**-0.5)[inside].double()
        with kernel_kinds.served("attention", ops.table, own(ops, dtype)):
            found = getattr(ops, name)(q, k, v, seg, size**-0.5)
        assert off(found[inside], exact) <= bound(ops, dtype), name
        assert not found[~inside].any(), f"{name}: padding"


def test_an_image_has_the_bits_that_it_has_alone(ops: CpuOps) -> None:
    if not own(ops, torch.bfloat16):
        pytest.skip("torch's attention does not promise it")
    (q, k, v), seg, inside = make_images(torch.bfloat16, 80, False)
    for name in ("attend_windows", "attend_images"):
        whole = getattr(ops, name)(q, k, v, seg, 0.1)
        some = slice(18 * WINDOW_SLOTS, 21 * WINDOW_SLOTS)
        alone = getattr(ops, name)(q[some], k[some], v[some], Segments(seg.segment[18:21], seg.real[18:21]), 0.1)
        assert torch.equal(alone[inside[some]], whole[some][inside[some]]), name


def test_what_the_kernel_does_not_know_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    avx2, q = kernel_kinds.table("avx2"), torch.zeros(2, 2, 64)
    assert attention_and_row_kernels.can_attend(q, avx2) and not attention_and_row_kernels.can_attend(
        q, kernel_kinds.table(TORCH)
    )
    assert not attention_and_row_kernels.can_attend(q.double(), avx2) and not attention_and_row_kernels.can_attend(
        torch.zeros(2, 2, 2 * attention_and_row_kernels.WIDEST), avx2
    )
    amx = kernel_kinds.table(EMULATED)
    assert attention_and_row_kernels.can_attend(q, amx) and not attention_and_row_kernels.can_attend(q.bfloat16(), amx)
    requested = list[int]()
    monkeypatch.setattr(attention_and_row_kernels, "attend_spans", lambda *a, **k: requested.append(1))
    made, torches = prompts(CASES[3], torch.float32), CpuOps()
    torches.table = kernel_kinds.table(TORCH)
    assert off(made.run(torches), made.exact(made.kv)) <= step(torch.float32)
    (q, k, v), seg, inside = make_images(torch.float32, 80, True)
    k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    wanted = ReferenceOps().attend_images(q, k, v, seg, 0.1)
    torch.testing.assert_close(torches.attend_images(q, k, v, seg, 0.1)[inside], wanted[inside], rtol=1e-5, atol=1e-5)
    assert not requested
