"""The library's attention of decoding rows: held to float64, and a row's bits depend on the row alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import kernel_kinds
from trencadis.backends.cpu.attention_plan import CpuAttn, get_plan
from trencadis.backends.cpu.native import attention_and_row_kernels
from trencadis.backends.cpu.native.kernel_choice_by_cpu import TORCH
from trencadis.backends.cpu.ops import CpuOps
from trencadis.core.device.backend import LayerKV
from trencadis.core.models import kv_cache_quantisation

BLOCK = 16
CASES = (
    # rows, keys of the shortest, of the longest, query heads, KV heads, values of a head, window
    (1, 1, 1, 4, 2, 64, 0),
    (3, 20, 33, 4, 4, 32, 0),
    (5, 255, 1030, 14, 2, 64, 0),
    (2, 512, 513, 3, 1, 128, 0),
    (3, 250, 700, 6, 2, 80, 100),
    (2, 40, 90, 12, 2, 16, 7),
    (2, 300, 300, 8, 8, 256, 0),
    (2, 9, 260, 16, 2, 128, 0),
    (1, 270, 270, 20, 2, 48, 0),
    (1, 70, 70, 5, 1, 32, 0),
)


@dataclass
class Decoding:
    """Rows of one token each over a cache whose blocks lie in any order."""

    q: Tensor
    kv: LayerKV
    attn: CpuAttn
    rows: int
    window: int

    def run(self, ops: CpuOps) -> Tensor:
        return ops.attend(self.q, self.q, self.q, self.kv, self.attn, self.q.shape[-1] ** -0.5, self.window)

    def alone(self, row: int) -> Decoding:
        start = torch.tensor([0, 1, 1], dtype=torch.int32)
        attn = CpuAttn(start, self.attn.context[[row, -1]], self.attn.blocks[[row, -1]], self.attn.slot_map[:1])
        return Decoding(self.q[row : row + 1], self.kv, attn, 1, self.window)

    def exact(self, keys: Tensor, values: Tensor) -> Tensor:
        """float64 [rows, heads, size] from keys and values [slots, groups, size]."""
        out = []
        each = self.q.shape[1] // keys.shape[1]
        for row in range(self.rows):
            end = int(self.attn.context[row]) + 1
            place = np.arange(max(end - self.window, 0) if self.window else 0, end)
            slot = self.attn.blocks[row].numpy()[place // BLOCK] * BLOCK + place % BLOCK
            k, v = (t.double()[slot].repeat_interleave(each, 1) for t in (keys, values))
            scores = torch.einsum("hd,jhd->hj", self.q[row].double(), k) * self.q.shape[-1] ** -0.5
            out.append(torch.einsum("hj,jhd->hd", scores.softmax(-1), v))
        return torch.stack(out)


def decoding(case: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Decoding:
    """Random rows; the block that padding writes to holds what is no number."""
    rows, least, most, heads, groups, size, window = case
    generator = torch.Generator().manual_seed(seed)
    per = -(-most // BLOCK)
    shape = (rows * per + 2, BLOCK, groups, size)
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in "kv")
    k[1], v[1] = float("nan"), float("nan")
    table = torch.zeros(rows + 1, per + 3, dtype=torch.int32)
    table[:rows, :per] = (torch.randperm(rows * per, generator=generator) + 2).int().view(rows, per)
    context = torch.linspace(least - 1, most - 1, rows).int()
    attn = CpuAttn(
        torch.tensor([*range(rows + 1), rows], dtype=torch.int32),
        torch.cat([context, torch.zeros(1, dtype=torch.int32)]), table, torch.zeros(rows, dtype=torch.int64),
    )  # fmt: skip
    fused = torch.randn((rows, heads + groups, size), generator=generator).to(dtype)
    return Decoding(fused[:, :heads], LayerKV(k, v), attn, rows, window)


def plain(cache: Tensor) -> Tensor:
    return cache.flatten(0, 1)


WITHOUT_PAIRS = "without pairs of bfloat16"


@pytest.fixture(params=[*kernel_kinds.OWN, *([WITHOUT_PAIRS] if "avx512_bf16" in kernel_kinds.FEATURES else [])])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    made, plain = CpuOps(), request.param == WITHOUT_PAIRS
    made.table = kernel_kinds.table(kernel_kinds.OWN[-1] if plain else request.param)
    if plain:
        made.table = replace(made.table, bfloat16_pairs=False)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_attend_as_float64_does_and_alone_as_in_company(ops: CpuOps, dtype: torch.dtype) -> None:
    for case in CASES:
        made = decoding(case, dtype)
        if case[5] % attention_and_row_kernels.LANES == 0:
            assert attention_and_row_kernels.can_decode(made.q, made.kv, ops.table), case
        own = case[5] % attention_and_row_kernels.LANES == 0
        with kernel_kinds.served("decode_attention", ops.table, own):
            found = made.run(ops)
        exact = made.exact(plain(made.kv.k), plain(made.kv.v))
        step = torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
        assert float((found.double() - exact).abs().max()) <= step * float(exact.abs().max()), case
        for row in range(made.rows):
            assert torch.equal(made.alone(row).run(ops)[0], found[row]), (case, row)


def test_bits_do_not_depend_on_threads(ops: CpuOps) -> None:
    made, threads = decoding(CASES[2], torch.bfloat16), torch.get_num_threads()
    try:
        outs = []
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            outs.append(made.run(ops))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("case", [CASES[2], CASES[4]])
@pytest.mark.parametrize("code", [torch.int8, torch.uint8])
@pytest.mark.parametrize("kept", [0, 4])
def test_codes_of_eight_bits_are_read_as_they_are_opened(
    ops: CpuOps, kept: int, code: torch.dtype, case: tuple[int, ...]
) -> None:
    made = decoding(case, torch.bfloat16)
    k, v = (t.nan_to_num(0.0) for t in made.kv[:2])
    codes = [torch.zeros(k.shape, dtype=code) for _ in "kv"]
    scales = [torch.zeros(k.shape[:3], dtype=torch.float16) for _ in "kv"]
    bias = torch.randn(k.shape[2:], generator=torch.Generator().manual_seed(1))
    more = (
        (torch.zeros(*k.shape[:3], kept, dtype=torch.bfloat16), kv_cache_quantisation.pairs_of(bias, kept))
        if kept
        else ()
    )
    coded = LayerKV(codes[0], codes[1], scales[0], scales[1], *more)
    kv_cache_quantisation.store(plain(k), plain(v), coded, torch.arange(len(plain(k))))
    exact = made.exact(*kv_cache_quantisation.read_slots(coded, slice(0, len(plain(k))), torch.float32))
    made.kv = coded
    assert attention_and_row_kernels.can_decode(made.q, made.kv, ops.table)
    with kernel_kinds.served("decode_attention", ops.table):
        found = made.run(ops)
    assert float((found.double() - exact).abs().max()) <= 2**-7 * float(exact.abs().max())
    for row in range(made.rows):
        assert torch.equal(made.alone(row).run(ops)[0], found[row]), row


def test_all_codes_of_8_bit_floats_are_read_as_torch_reads_them(ops: CpuOps) -> None:
    """One key: its value is the result. The code of no number is left out: no store writes it with a finite scale."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    kv = LayerKV(
        torch.zeros(1, BLOCK, 1, 256, dtype=torch.uint8), codes.repeat(BLOCK).view(1, BLOCK, 1, 256),
        torch.ones(1, BLOCK, 1).half(), torch.full((1, BLOCK, 1), 0.5).half(),
    )  # fmt: skip
    made = decoding((1, 1, 1, 6, 1, 256, 0), torch.float32)
    made.kv, made.attn = kv, CpuAttn(*made.attn[:2], torch.zeros(2, 1, dtype=torch.int32), made.attn.slot_map)
    wanted = codes.view(torch.float8_e4m3fn).float() / 2
    for kind in (torch.uint8, torch.float8_e4m3fn):
        made.kv = kv._replace(k=kv.k.view(kind), v=kv.v.view(kind))
        assert torch.equal(made.run(ops)[0], wanted.expand(6, 256))


def test_blocks_below_zero_hold_no_keys(ops: CpuOps) -> None:
    """A chunk of such blocks in a long row, and a row that has nothing else."""
    made = decoding((2, 700, 700, 7, 1, 64, 0), torch.float32)
    real = made.attn.blocks.clone()
    made.attn.blocks[0, 16:33] = -1
    made.attn.blocks[1] = -1
    found = made.run(ops)
    assert not found[1].any()
    real[0, 16:27] = real[0, 33:44]
    context = torch.tensor([700 - 17 * BLOCK - 1, 0, 0], dtype=torch.int32)
    made.attn = CpuAttn(torch.tensor([0, 1, 1, 1], dtype=torch.int32), context, real, made.attn.slot_map)
    whole, made.rows = made.run(ops)[0], 1
    torch.testing.assert_close(found[0], whole, rtol=1e-5, atol=1e-6)


def test_decoding_rows_beside_chunks_are_written_in_their_places(ops: CpuOps) -> None:
    made = decoding((3, 20, 90, 4, 2, 64, 0), torch.float32)
    start = torch.tensor([0, 1, 9, 10, 12], dtype=torch.int32)  # one, eight, one, two of no request
    made.attn = CpuAttn(start, made.attn.context, made.attn.blocks, torch.zeros(12, dtype=torch.int64))
    made.q = torch.randn(12, 4, 64, generator=torch.Generator().manual_seed(3))
    found = made.run(ops)
    torches = CpuOps()
    torches.table = kernel_kinds.table(TORCH)
    made.attn = CpuAttn(*made.attn)
    wanted = made.run(torches)
    assert float((found - wanted).abs().max()) < 1e-5 and not found[10:].any()


def test_what_the_kernel_does_not_know_is_left_to_torch() -> None:
    made = decoding((2, 30, 60, 4, 2, 24, 0), torch.float32)
    assert not attention_and_row_kernels.can_decode(made.q, made.kv, kernel_kinds.table("avx2"))
    found, exact = made.run(CpuOps()), made.exact(plain(made.kv.k), plain(made.kv.v))
    assert float((found.double() - exact).abs().max()) < 1e-5


def test_singles_hold_what_each_row_sees() -> None:
    made = decoding((3, 20, 90, 4, 2, 64, 0), torch.float32)
    plan = get_plan(made.attn, BLOCK, window=30, native=True)
    rows = plan.singles
    assert rows is not None and not plan.groups and not plan.spans
    assert rows.token.tolist() == [0, 1, 2] and rows.length.tolist() == [20, 55, 90]
    assert rows.first.tolist() == [0, 25, 60]
    assert {a.dtype for a in (rows.token, rows.row, rows.first, rows.length)} == {np.dtype(np.int32)}
