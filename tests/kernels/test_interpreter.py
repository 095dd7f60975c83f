"""The interpreter needs its corrections, and the corrections find what they are for."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.oracles import interpreter

pytestmark = pytest.mark.usefixtures("interpreted")


@triton.jit
def _cast(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at).to(tl.bfloat16))


@triton.jit
def _add(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at) + tl.load(x + at))


@triton.jit
def _dot(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tile = tl.load(x + at[:, None] * SIZE + at)
    tl.store(y + at[:, None] * SIZE + at, tl.dot(tile, tile, input_precision="ieee"))


@triton.jit
def _total(x, y, SIZE: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, SIZE)), 0))


@triton.jit
def _beyond(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at + 1))


@triton.jit
def _race(y):
    tl.store(y, tl.program_id(0))


def cast(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(len(x), dtype=torch.bfloat16)
    _cast[(1,)](x, y, len(x))
    return y


def add(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _add[(1,)](x, y, len(x))
    return y


def dot(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=torch.float32)
    _dot[(1,)](x, y, len(x))
    return y


def test_bfloat16() -> None:
    """Wrong as shipped (else the correction may go), right with it."""
    torch.manual_seed(0)
    x = torch.randn(1024)
    tile = torch.randn(16, 16).bfloat16()
    want = [x.bfloat16(), x.bfloat16() + x.bfloat16(), tile.float() @ tile.float()]
    with interpreter.uncorrected():
        shipped = [cast(x), add(x.bfloat16()), dot(tile)]
    for name, ours, reference, wanted in zip(
        ("cast", "sum", "dot"), [cast(x), add(x.bfloat16()), dot(tile)], shipped, want, strict=True
    ):
        assert not torch.allclose(reference, wanted, rtol=1e-6), f"{name}: Triton's interpreter does it right by now"
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.00390625, 1.01171875, -0.0, 3.4e38, 1e-40])
    assert torch.equal(cast(special).view(torch.int16)[1:], special.bfloat16().view(torch.int16)[1:])
    assert cast(special)[0].isnan()


def test_reductions_of_bfloat16_are_refused() -> None:
    with pytest.raises(InterpreterError, match="float32"):
        _total[(1,)](torch.ones(16, dtype=torch.bfloat16), torch.empty(1, dtype=torch.bfloat16), 16)


def test_reads_and_writes_stay_in_bounds() -> None:
    whole, out = torch.zeros(33), torch.zeros(32)
    _beyond[(1,)](whole, out, 32)
    with pytest.raises(InterpreterError, match="load at 1 of 32"):
        _beyond[(1,)](whole[:32], out, 32)
    with pytest.raises(InterpreterError, match="store at 1 of 32"):
        _beyond[(1,)](whole, out[:31], 32)


def test_a_race_shows_in_another_order() -> None:
    def run() -> torch.Tensor:
        y = torch.zeros(1, dtype=torch.int32)
        _race[(5,)](y)
        return y

    assert run().item() == 4
    with interpreter.order("backwards"):
        assert run().item() == 0
    with pytest.raises(AssertionError, match="other bits"):
        interpreter.in_all_orders(run)
