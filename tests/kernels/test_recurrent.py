"""The kernels of the recurrent ops equal the reference and float64, in every order of programs."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from tests.oracles import interpreter
from tests.random_recurrent import NAN, DeltaCase, delta_case, exact_rule, exact_scan, off, rows_of, seeded
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.kernels import delta_rule
from trencadis.backends.cuda.kernels.attention_metadata import ItemAttn, ItemRows, SingleAttn
from trencadis.backends.cuda.ops import CudaOps
from trencadis.core.device.backend import Attn
from trencadis.core.device.launch_tensors import RecurrentRows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
BOUND = {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}


def on_device(
    rows: RecurrentRows, attn: Attn, device: torch.device, single: bool = False
) -> tuple[RecurrentRows, Attn]:
    """The rows of a launch as the backend fills them in; ``single``: one token per row, as in DECODE."""
    start, context, _, stored = (t.to(device) for t in attn[:4])
    kind = SingleAttn if single else ItemAttn
    return RecurrentRows(*(t.to(device) for t in rows)), kind(start, context, context, stored, *[start] * 9)  # type: ignore[return-value]


def ran(case: DeltaCase, rows: RecurrentRows, attn: Attn) -> Tensor:
    """Runs the delta rule as a launch does; changes the state of ``case``."""
    ops = CudaOps()
    return ops.delta_rule(*case, ops.prepare_recurrent(rows, attn), attn)


@dtypes
@pytest.mark.parametrize("heads", [(1, 3), (2, 2)])
def test_ragged_rows_equal_float64(dtype: torch.dtype, heads: tuple[int, int], device: torch.device) -> None:
    """Rows of several chunks, one token, and one token more than a chunk; padding and slots of NaN."""
    counts, begins, sources = [70, 1, 65, 3], [0, 2], [1, 2, 3, 6]
    case = delta_case(sum(counts) + 5, heads, 32, slots=7, dtype=dtype)
    case.state[[0, 1, 3]], case.q[-5:], case.k[-5:], case.v[-5:], case.g[-5:], case.beta[-5:] = (NAN,) * 6
    before = case.state.clone()
    case = DeltaCase(*(t.to(device) for t in case))
    rows, attn = on_device(*rows_of(counts, begins=begins, sources=sources, padding=5, padding_rows=1), device)
    found = ran(case, rows, attn).cpu()
    host, start = DeltaCase(*(t.cpu() for t in case)), 0
    assert not found[-5:].any()
    for row, count in enumerate(counts):
        part = slice(start, start + count)
        held = torch.zeros_like(before[0]) if row in begins else before[sources[row]]
        wanted, state = exact_rule(host.tokens(part), held)
        assert off(found[part], wanted) < BOUND[dtype], row
        assert off(host.state[row + 1], state) < 3e-6, row
        start += count
    assert torch.equal(host.state[5:], before[5:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_state_spaces_equal_float64(dtype: torch.dtype, device: torch.device) -> None:
    """Ragged rows and decoding rows, with padding and slots of NaN, in sizes of heads that differ."""
    counts, begins, sources, ops = [70, 1, 65, 3], [0, 2], [1, 2, 3, 6], CudaOps()
    case = delta_case(sum(counts) + 5, (1, 2), 32, slots=7, dtype=dtype)
    case = case._replace(v=case.v[..., :16].contiguous(), state=case.state[..., :16].contiguous())
    case.state[[0, 1, 3]], case.q[-5:], case.k[-5:], case.v[-5:], case.g[-5:], case.beta[-5:] = (NAN,) * 6
    before, mine = case.state.clone(), DeltaCase(*(t.clone().to(device) for t in case))
    rows, attn = on_device(*rows_of(counts, begins=begins, sources=sources, padding=5, padding_rows=1), device)
    found, start = ops.state_space(*mine, ops.prepare_recurrent(rows, attn), attn).cpu(), 0
    assert not found[-5:].any()
    for row, count in enumerate(counts):
        part, held = slice(start, start + count), before[sources[row]]
        wanted, state = exact_scan(case.tokens(part), torch.zeros_like(held) if row in begins else held)
        assert off(found[part], wanted) < BOUND[dtype] and off(mine.state.cpu()[row + 1], state) < 3e-6, row
        start += count
    assert torch.equal(mine.state.cpu()[5:], before[5:])
    last = case.tokens(slice(4))._replace(state=before.nan_to_num(0.5))
    mine = DeltaCase(*(t.clone().to(device) for t in last))
    rows, attn = on_device(*rows_of([1] * 4), device, single=True)
    found = ops.state_space(*mine, ops.prepare_recurrent(rows, attn), attn).cpu()
    for row in range(4):
        wanted, state = exact_scan(last.tokens(slice(row, row + 1)), last.state[row + 1])
        assert off(found[row], wanted[0]) < BOUND[dtype] and off(mine.state.cpu()[row + 1], state) < 3e-6


@dtypes
def test_decoding_rows_equal_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    case = delta_case(6, (2, 4), 48, slots=8, dtype=dtype)
    case.state[[0, 2]], case.v[4:] = NAN, NAN
    rows, attn = rows_of([1] * 4, [3, 2, 5, 1], [1], [3, 2, 7, 1], padding=2, padding_rows=1)
    wide = DeltaCase(*(t.float().clone() for t in case))
    wanted = ReferenceOps().delta_rule(*wide, rows, attn)
    mine = DeltaCase(*(t.to(device) for t in case))
    out = ran(mine, *on_device(rows, attn, device, single=True)).cpu()
    assert off(out[:4], wanted[:4]) < BOUND[dtype] and torch.isfinite(out.float()).all()
    assert off(mine.state.cpu()[1:], wide.state[1:]) < 3e-6


@pytest.mark.parametrize("alike", [0.9, 0.999])
def test_nearly_equal_keys_stay_near_float64(alike: float, device: torch.device) -> None:
    case = delta_case(130, (1, 1), 32, alike=alike)
    wanted, state = exact_rule(case, case.state[1])
    mine = DeltaCase(*(t.to(device) for t in case))
    found = ran(mine, *on_device(*rows_of([130]), device)).cpu()
    assert off(found, wanted) < 1e-5 and off(mine.state.cpu()[1], state) < 1e-5


def test_bits_depend_neither_on_cuts_nor_on_other_rows_nor_on_the_order(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [129, 40]
    case = delta_case(sum(counts), (1, 2), 16, slots=4)
    other = case.copied()
    out = ran(case, *on_device(*rows_of(counts, begins=[1]), device))
    for part, slot in ((slice(0, 64), 1), (slice(64, 128), 1), (slice(128, 129), 1), (slice(129, 169), 2)):
        rows = rows_of([part.stop - part.start], [slot], [0] if slot == 2 else [])
        assert torch.equal(ran(other.tokens(part), *on_device(*rows, device)), out[part]), part
    assert torch.equal(case.state, other.state)
    monkeypatch.setattr(delta_rule, "MOST_BYTES", 1)  # one head at a time
    if INTERPRETED:
        fresh = delta_case(sum(counts), (1, 2), 16, slots=4)

        def run() -> tuple[Tensor, Tensor]:
            own = fresh.copied()
            return ran(own, *on_device(*rows_of(counts, begins=[1]), device)), own.state

        interpreter.in_all_orders(run, False)
        assert torch.equal(run()[0], out)


@dtypes
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("taps", [2, 4])
def test_causal_conv(dtype: torch.dtype, single: bool, taps: int, device: torch.device) -> None:
    counts = [1] * 4 if single else [1, 37, 2, 3]
    random, total = seeded(taps), sum(counts)
    fused = torch.randn(total + 3, 45, generator=random).to(dtype)
    x, weight = fused[:, :40], torch.randn(40, taps, generator=random).to(dtype)
    bias = torch.randn(40, generator=random).to(dtype) if taps == 2 else None
    state = torch.randn(8, taps - 1, 40, generator=random).to(dtype)
    fused[total:], state[[0, 2]] = NAN, NAN
    rows, attn = rows_of(counts, begins=[1], sources=[1, 2, 3, 7], padding=3, padding_rows=2)
    for activation in ("silu", ""):
        mine, theirs, ops = state.clone().to(device), state.clone(), CudaOps()
        wanted = ReferenceOps().causal_conv(x, weight, bias, theirs, rows, attn, activation)
        there, own = on_device(rows, attn, device, single)
        found = ops.causal_conv(
            x.to(device), weight.to(device), None if bias is None else bias.to(device), mine,
            ops.prepare_recurrent(there, own), own, activation,
        ).cpu()  # fmt: skip
        assert off(found, wanted) < BOUND[dtype] and not found[total:].any()
        assert torch.equal(mine.cpu()[1:], theirs[1:])


def test_chunks_of_a_launch(device: torch.device) -> None:
    """Chunks of a row follow each other; a last token alone has none, and neither has padding."""
    rows, attn = on_device(*rows_of([1, 129, 64, 2], padding=4, padding_rows=2), device)
    found = CudaOps().prepare_recurrent(rows, attn)
    assert isinstance(found, ItemRows)
    assert found.chunk_row.tolist() == [1, 1, 2, 3, *[-1] * (len(found.chunk_row) - 4)]
    assert found.row_chunk.tolist()[:4] == [0, 0, 2, 3] and found.token_row.tolist()[-4:] == [6] * 4
