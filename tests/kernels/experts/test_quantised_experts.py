"""Kernels of experts over codes equal the reference over their values, for every kind of codes that is kept."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.experts.test_experts_kernels import PROMPT, STEP, TOLERANCE, normal, scores_of
from tests.oracles import interpreter
from trencadis.backends.cpu.expert_mlp import SeparateExperts, run_chosen_experts
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.kernels import fused_moe, quantised_fused_moe, tile_sizes
from trencadis.backends.cuda.ops import CudaOps, InvariantCudaOps
from trencadis.backends.cuda.weights import quantised_weight
from trencadis.backends.cuda.weights.stacked_experts import StackedCodes, StackedExperts, stack_matrices
from trencadis.core.device.backend import ExpertBiases
from trencadis.core.errors import StartupError
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import CODES, FP4_HALVES, Scheme, held_bytes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = tile_sizes.Tile(16, 32, 4, 1)
COUNT, INNER, HIDDEN = 5, 40, 176
"""Sizes that no tile divides; the last group of the down matrix is shorter."""

SCHEMES = {
    "mxfp4": Scheme(8, group=32, fp4=True),
    "int4 in groups": Scheme(4, group=32),
    "int4 with zero points": Scheme(4, group=64, symmetric=False),
    "int4 by row": Scheme(4),
    "int4 in small groups": Scheme(4, group=24),
    "int4 by activation order": Scheme(4, group=32, symmetric=False, ordered=True),
    "int8 by row": Scheme(8),
    "int8 in groups with zero points": Scheme(8, group=64, symmetric=False),
    "fp8 by row": Scheme(8, "float"),
    "fp8 in blocks": Scheme(8, "float", group=16, block=16),
}


def quantised(rows: int, columns: int, scheme: Scheme, dtype: torch.dtype, seed: int) -> QTensor:
    """A random weight as loading makes it."""
    made = torch.Generator().manual_seed(seed)
    if scheme.fp4:
        codes = torch.tensor(FP4_HALVES, dtype=torch.int8)[torch.randint(0, 16, (rows, columns), generator=made)]
        scale = torch.exp2(torch.randint(-7, -3, (rows, -(-columns // 32)), generator=made).float())
        return QTensor(scheme, codes, scale, None, 32, None, dtype)
    q = quantise(normal(rows, columns, seed=seed) / columns**0.5, scheme, dtype)
    if not scheme.symmetric:
        q = replace(q, zero=torch.randint(-3, 4, q.scale.shape, generator=made).to(torch.int8))
    if scheme.ordered:
        q = replace(q, order=torch.arange(columns)[torch.randperm(columns, generator=made)].int() // scheme.group)
    return q


def experts(scheme: Scheme, dtype: torch.dtype, inner: int = INNER) -> tuple[list[QTensor], list[QTensor]]:
    """(gate_up, down) of each expert; gates and ups share an order of their columns."""
    up = [quantised(2 * inner, HIDDEN, scheme, dtype, i) for i in range(COUNT)]
    return up, [quantised(HIDDEN, inner, scheme, dtype, 50 + i) for i in range(COUNT)]


def pack(
    ops: Any, some: tuple[list[QTensor], list[QTensor]], device: torch.device, biases: ExpertBiases | None = None
) -> StackedExperts:
    made = ops.pack_quantised_experts(*([q.moved(device) for q in each] for each in some), biases)
    assert isinstance(made, StackedExperts)
    return made


def reference(
    x: Tensor, scores: Tensor, some: tuple[list[QTensor], list[QTensor]], top: int, kind: str,
    biases: ExpertBiases | None = None,
) -> Tensor:  # fmt: skip
    """Float32 over the values of the codes."""
    slow = ReferenceOps()
    up, down = ([q.dequantised() for q in each] for each in some)
    joined = slow.pack_experts(up, down, biases)
    return slow.experts(x.float(), scores, joined, top, True, kind)


CASES = [(name, n, dtype) for n in (7, 40) for name in SCHEMES for dtype in TOLERANCE]


@pytest.mark.parametrize(
    ("name", "n", "dtype"),
    [pytest.param(*case, marks=() if i % 7 == 3 or i % 30 == 0 else pytest.mark.long) for i, case in enumerate(CASES)],
)
def test_codes_equal_the_reference(
    name: str, n: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases and the clamped activation for MXFP4, as gpt-oss has them; each takes as many bytes as planned."""
    monkeypatch.setitem(tile_sizes.FORCED, "coded_experts", SMALL)
    scheme, kind = SCHEMES[name], "clamped_swiglu" if name == "mxfp4" else "silu"
    some, x, scores = experts(scheme, dtype), normal(n, HIDDEN, seed=n).to(dtype), scores_of(n, COUNT)
    own = wide = None
    if scheme.fp4:
        held = [
            [normal(width, seed=s + i).to(dtype) for i in range(COUNT)] for s, width in ((0, 2 * INNER), (50, HIDDEN))
        ]
        own = ExpertBiases(*([b.to(device) for b in each] for each in held))
        wide = ExpertBiases(*([b.float() for b in each] for each in held))
    w = pack(CudaOps(), some, device, own)
    got = CudaOps().experts(x.to(device), scores.to(dtype).to(device), w, 2, True, kind).cpu()
    want = reference(x, scores, some, 2, kind, wide)
    error = float((got.float() - want).abs().max() / want.abs().max())
    assert error <= TOLERANCE[dtype], error
    sizes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    planned = [held_bytes(scheme, rows, columns, dtype.itemsize, CODES) for rows, columns in sizes]
    assert w.nbytes == COUNT * sum(planned)


@pytest.mark.parametrize("name", SCHEMES)
def test_an_expert_alone_has_the_values_of_its_codes(name: str, device: torch.device) -> None:
    up, _ = experts(SCHEMES[name], torch.float32)
    stacked = stack_matrices([q.moved(device) for q in up], 90)
    assert isinstance(stacked, StackedCodes)
    for i, q in enumerate(up):
        w = stacked.matrix(i)
        values = quantised_weight.dequantise(w).cpu()
        if w.gather is not None:
            values = torch.zeros(q.shape).index_add_(1, w.gather.cpu().long(), values)
        torch.testing.assert_close(values, q.dequantised(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("bits", "kind"), [(8, "int"), pytest.param(8, "float", marks=pytest.mark.long)])
@pytest.mark.parametrize("n", [3, 20])
def test_activations_of_8_bits(
    bits: int, kind: str, n: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product rounds its rows as a linear layer does; a row that is not finite spoils itself alone."""
    monkeypatch.setitem(tile_sizes.FORCED, "coded_experts", SMALL)
    scheme = Scheme(bits, kind, activations="token")
    some, scores = experts(scheme, torch.bfloat16, 48), scores_of(n, COUNT)
    w, x = pack(CudaOps(), some, device), normal(n, HIDDEN, seed=n).bfloat16()
    assert isinstance(w.gate_up, StackedCodes) and isinstance(w.down, StackedCodes)
    if INTERPRETED:
        assert w.gate_up.rounds and w.down.rounds
    got = CudaOps().experts(x.to(device), scores.to(device), w, 2, True, "silu").cpu().float()
    lists: Any = [[one.matrix(i) for i in range(COUNT)] for one in (w.gate_up, w.down)]
    slow: Any = ReferenceOps()
    monkeypatch.setattr(slow, "linear", quantised_weight.product, raising=False)
    each: Any = SeparateExperts(lists[0], lists[1], COUNT, w.inner)
    want = run_chosen_experts(slow, x.to(device), scores.to(device), each, 2, True, "silu").cpu().float()
    assert (got - want).abs().max() <= 3e-2 * want.abs().max()
    x[2, 5] = float("nan")
    got = CudaOps().experts(x.to(device), scores.to(device), w, 2, True, "silu").cpu()
    assert got[2].isnan().all() and got[:2].isfinite().all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(name, dtype, marks=() if i % 4 == 0 else pytest.mark.long)
     for i, (name, dtype) in enumerate((name, dtype) for name in SCHEMES for dtype in TOLERANCE)],
)  # fmt: skip
def test_tiles_of_prompts_equal_the_reference(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of groups multiply codes there, so that weights are rounded, too: within two steps of the type. Pairs fill
    one tile and a part of another.
    """
    monkeypatch.setitem(tile_sizes.FORCED, "coded_experts", PROMPT)
    some, x, scores = experts(SCHEMES[name], dtype), normal(150, HIDDEN, seed=4).to(dtype), scores_of(150, COUNT)
    scores[:, 2] += 20.0
    got = CudaOps().experts(x.to(device), scores.to(device), pack(CudaOps(), some, device), 1, True, "silu").cpu()
    want = reference(x, scores, some, 1, "silu")
    assert (got.float() - want).abs().max() <= 2 * STEP[dtype] * want.abs().max()


def test_every_value_of_a_4_bit_float_is_exact(device: torch.device) -> None:
    """Decodes all sixteen codes, in the low and the high half of a byte; each token reads one column."""
    codes = torch.tensor(FP4_HALVES, dtype=torch.int8).repeat(4)[None].repeat(32, 1)
    q = QTensor(SCHEMES["mxfp4"], codes, torch.full((32, 2), 0.5), None, 32, None, torch.bfloat16)
    w = pack(CudaOps(), ([q], [quantise(torch.eye(64, 32), Scheme(8), torch.bfloat16)]), device)
    x, scores = torch.eye(64).bfloat16().to(device), torch.zeros(64, 1, device=device)
    got = CudaOps().experts(x, scores, w, 1, True, "relu").cpu().float()
    assert w.inner == 32 and not w.gated
    assert torch.equal(got[:, :32], q.dequantised().t().clamp_min(0)) and not got[:, 32:].any()


@pytest.mark.parametrize("side", ["gate_up", "down"])
def test_a_side_in_16_bits_stays_so(side: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that a file does not hold quantised, as of one expert or all: then that matrix of all is dequantised."""
    monkeypatch.setitem(tile_sizes.FORCED, "experts", SMALL)
    monkeypatch.setitem(tile_sizes.FORCED, "coded_experts", SMALL)
    up, down = experts(SCHEMES["int4 in groups"], torch.float32)
    given: Any = [list(up), list(down)]
    place = ("gate_up", "down").index(side)
    given[place][1] = given[place][1].values()
    moved = [[q.moved(device) if isinstance(q, QTensor) else q.to(device) for q in each] for each in given]
    w: Any = CudaOps().pack_quantised_experts(moved[0], moved[1])
    assert isinstance(getattr(w, side), Tensor) and w.nbytes == w.gate_up.nbytes + w.down.nbytes
    x, scores = normal(7, HIDDEN), scores_of(7, COUNT)
    got = CudaOps().experts(x.to(device), scores.to(device), w, 2, True, "silu").cpu()
    want = reference(x, scores, (up, down), 2, "silu")
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.parametrize("name", ["mxfp4", pytest.param("int8 by row", marks=pytest.mark.long)])
def test_a_token_has_the_same_bits_in_any_company(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ``--batch-invariant`` in launches of any size, which all take one class of tiles."""
    lengths: list[str] = []
    monkeypatch.setattr(tile_sizes, "find", lambda kernel, *rest: lengths.append(rest[-1]) or SMALL)
    w = pack(InvariantCudaOps(), experts(SCHEMES[name], torch.bfloat16), device)
    x, scores = normal(30, HIDDEN).bfloat16().to(device), scores_of(30, COUNT).to(device)
    whole = InvariantCudaOps().experts(x, scores, w, 2, True, "silu")
    for begin, end in ((0, 1), (7, 8), (20, 30)):
        got = InvariantCudaOps().experts(x[begin:end], scores[begin:end], w, 2, True, "silu")
        assert torch.equal(got, whole[begin:end])
    assert set(lengths) == {"many"}


def test_no_order_of_programs_changes_a_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not INTERPRETED:
        pytest.skip("the interpreter chooses the order")
    monkeypatch.setitem(tile_sizes.FORCED, "coded_experts", SMALL)
    monkeypatch.setattr(fused_moe, "CHUNK", 16)
    w, x = (
        pack(CudaOps(), experts(SCHEMES["int4 by activation order"], torch.bfloat16), device),
        normal(4, HIDDEN).bfloat16(),
    )
    interpreter.in_all_orders(lambda: CudaOps().experts(x, scores_of(4, COUNT), w, 2, True, "silu"))


def test_mistakes_are_refused(device: torch.device) -> None:
    up, down = experts(SCHEMES["fp8 by row"], torch.bfloat16)
    down[2].data.view(torch.uint8)[1, 3] = 0x7F
    with pytest.raises(StartupError, match="not finite"):
        pack(CudaOps(), (up, down), device)
    w = pack(CudaOps(), (up, experts(SCHEMES["int8 by row"], torch.bfloat16)[1]), device)
    assert isinstance(w.gate_up, StackedCodes)
    with pytest.raises(AssertionError):
        quantised_fused_moe.check(w.gate_up, (COUNT, 2 * INNER, HIDDEN + 1))
