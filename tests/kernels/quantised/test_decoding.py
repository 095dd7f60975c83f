"""Weights that are decoded once for many rows, and the card's instructions that decode four codes at a time."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton import knobs

from tests.kernels.quantised.test_quantised import normal, packed
from trencadis.backends.cuda.kernels import code_decoding, quantised_fused_moe, quantised_linear, tile_sizes
from trencadis.backends.cuda.kernels.layers import skinny_gemm, skinny_quantised_gemm
from trencadis.backends.cuda.weights import decoded_pieces
from trencadis.backends.cuda.weights.quantised_weight import E4M3, INT4, SHIFTED, dequantise
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import DECODED_ROWS, FP4_HALVES, Scheme

SCHEMES = {
    "int4": Scheme(4, group=128), "int4 by rows": Scheme(4), "int4, groups of 32": Scheme(4, group=32),
    "int8": Scheme(8), "int8, groups of 64": Scheme(8, group=64), "fp8": Scheme(8, "float"),
    "int4 with zeros": Scheme(4, group=64, symmetric=False),
}  # fmt: skip
QUICK = ("int4", "fp8")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in SCHEMES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str)
def test_many_rows_multiply_by_decoded_pieces(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value is rounded once, in pieces that the features do not fill; biases are added."""
    monkeypatch.setattr(quantised_linear, "DECODED_BYTES", 2 * 64 * 300)
    q, bias = quantise(normal(130, 256), SCHEMES[name], dtype), normal(130, seed=1).to(dtype)
    w, x = packed(q, bias, device), normal(DECODED_ROWS, 256, seed=2).to(dtype)
    assert not w.rounds
    held = torch.empty(130, w.columns, dtype=dtype, device=device)
    quantised_linear.decode_features(w, 0, 130, held)
    assert torch.equal(held.cpu(), dequantise(w).to(dtype).cpu())
    y = quantised_linear.linear(x.to(device), w).cpu()
    want = x.float() @ held.cpu().float().t() + bias.float()
    step = torch.finfo(dtype).eps * want.abs().clamp_min(want.abs().max() / 64)
    assert ((y.float() - want).abs() <= step).all()


@pytest.mark.parametrize(
    ("rows", "features", "columns", "most"),
    [(2048, 37_888, 3584, 4681), (2048, 4608, 3584, 4681), (8192, 3584, 18_944, 885), (2048, 2048, 11_008, 1524),
     (256, 18_944, 3584, 900), (300, 130, 64, 4000), (512, 5000, 2048, 100)],
)  # fmt: skip
def test_pieces_fill_waves_of_programs(rows: int, features: int, columns: int, most: int) -> None:
    """No other whole number of a library's tiles takes less time, launches included, of all that fit the scratch."""
    each = decoded_pieces.choose_piece(rows, features, columns, most, 132)
    assert 0 < each <= max(most, 64) and each % (128 if most >= 128 else 64) == 0

    def seconds(size: int) -> float:
        total = 0.0
        for start in range(0, features, size):
            piece = min(size, features - start)
            tiles = [(-(-rows // m) * -(-piece // n), m * n) for m, n in ((128, 256), (128, 128), (64, 128))]
            programs, values = next((t for t in tiles if t[0] >= 132), tiles[-1])
            total += -(-programs // 132) * 2 * values * columns / (0.75 * 989e12 / 132) + 3e-6
        return total

    if most >= 128:
        best = min(seconds(size) for size in range(128, min(most, features + 127) + 1, 128))
        assert seconds(each) <= 1.001 * best


def test_pieces_of_a_narrow_weight_take_the_librarys_smaller_tiles() -> None:
    """2,048 rows by 2,048 features: 1,280 at a time would be 160 programs of 128 x 128 in two waves, and a rest; 1,024
    at a time are twice 256 programs of 64 x 128 in two waves of half the size.
    """
    assert decoded_pieces.choose_piece(2048, 2048, 11_008, 1524, 132) == 1024


# The instructions, on the host


def run_ptx(text: str, *words: np.ndarray) -> list[np.ndarray]:
    """Runs the instructions that decode codes on uint32 ``words``, the last operands; returns ``$0``, ``$1`` ..., the
    outputs.
    """
    held: dict[str, np.ndarray] = {}
    last = max(int(n) for n in re.findall(r"\$(\d+)", text)) - len(words) + 1
    held |= {f"${last + i}": word.astype(np.uint64) for i, word in enumerate(words)}
    word = words[0]

    def value(name: str) -> np.ndarray:
        return held[name] if name in held else np.full(word.shape, int(name, 0), np.uint64)

    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *given = (part.strip() for part in rest.split(","))
        if rest.startswith("{"):  # a word taken apart
            lower, upper = rest[1 : rest.index("}")].split(",")
            whole = value(rest.rpartition(",")[2].strip())
            held[lower.strip()], held[upper.strip()] = whole & 0xFFFF, whole >> np.uint64(16)
            continue
        a = [value(g) for g in given]
        match name:
            case "mov.b32":
                held[to] = a[0]
            case "and.b32":
                held[to] = a[0] & a[1]
            case "cvt.rn.f16x2.e4m3x2" | "cvt.rn.bf16x2.e4m3x2":
                floats = torch.from_numpy(a[0].astype(np.uint16).view(np.uint8)).view(torch.float8_e4m3fn)
                kind = torch.bfloat16 if "bf16" in name else torch.float16
                held[to] = floats.to(kind).view(torch.int16).numpy().view(np.uint32).astype(np.uint64)
            case "cvt.f32.f16":
                wide = torch.from_numpy(a[0].astype(np.uint16).view(np.int16)).view(torch.float16).float()
                held[to] = wide.numpy().view(np.uint32).astype(np.uint64)
            case "cvt.rn.bf16x2.f32":
                pair = np.stack([a[1], a[0]], 1).astype(np.uint32).view(np.float32)
                held[to] = (
                    torch.from_numpy(pair).bfloat16().view(torch.int16).numpy().view(np.uint32)[:, 0].astype(np.uint64)
                )
            case "prmt.b32":
                both = a[0] | (a[1] << 32)
                places = [(int(a[2][0]) >> (4 * i)) & 15 for i in range(4)]
                taken = [(both >> np.uint64(8 * (p & 7))) & 255 for p in places]
                taken = [(t >> np.uint64(7)) * 255 if p & 8 else t for t, p in zip(taken, places, strict=True)]
                held[to] = sum(t << np.uint64(8 * i) for i, t in enumerate(taken))
            case "shr.u32" | "shr.s32" | "shl.b32":
                kept = a[0].astype(np.uint32).view(np.int32 if "s32" in name else np.uint32)
                shift = np.left_shift if "shl" in name else np.right_shift
                held[to] = shift(kept, a[1].astype(kept.dtype)).view(np.uint32).astype(np.uint64)
            case "lop3.b32":
                assert int(given[3], 0) == 0xEA, "(a and b) or c"
                held[to] = (a[0] & a[1]) | a[2]
            case "fma.rn.bf16x2" | "fma.rn.f16x2":
                kind = torch.bfloat16 if "bf16" in name else torch.float16
                held[to] = fused(kind, *a)
            case _:
                raise AssertionError(name)
    return [held[f"${i}"] for i in range(last)]


def fused(kind: torch.dtype, *words: np.ndarray) -> np.ndarray:
    """a * b + c of both halves of words, rounded once."""
    a, b, c = (torch.from_numpy(w.astype(np.uint32).view(np.uint16).view(np.int16)).view(kind).double() for w in words)
    exact = (a * b + c).to(kind)
    return exact.view(torch.int16).numpy().view(np.uint16).view(np.uint32).astype(np.uint64)


def values_of(words: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    """The values of pairs of 16 bits, in the order of the bytes that they were taken from."""
    return torch.from_numpy(np.stack(words, 1).astype(np.uint32).view(np.int16)).view(dtype).flatten()


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize(("dtype", "text"), [
    (torch.bfloat16, (code_decoding._LOW_BF16, code_decoding._HIGH_BF16)),
    (torch.float16, (code_decoding._LOW_F16, code_decoding._HIGH_F16)),
], ids=["bfloat16", "float16"])  # fmt: skip
def test_codes_less_their_zero_points(dtype: torch.dtype, text: tuple[Any, Any], high: bool) -> None:
    """All bytes with all zero points: the operation that takes a code out of its number subtracts both exactly."""
    least = -128 if dtype == torch.bfloat16 else -1024
    for zero in range(16):
        given = np.tile(np.arange(256, dtype=np.uint8), 4)
        np.random.default_rng(zero).shuffle(given)
        pair = torch.full((len(given) // 2,), least - zero, dtype=dtype).view(torch.int32).numpy().view(np.uint32)
        found = values_of(run_ptx(text[high].value, given.view(np.uint32), pair, pair), dtype)
        assert found.tolist() == [float((b >> 4 if high else b & 15) - zero) for b in given.tolist()]


FLOATS = {
    "float16 by bits": (code_decoding._BITS_F16, torch.float16, SHIFTED),
    "bfloat16 by bits": (code_decoding._BITS_BF16, torch.bfloat16, SHIFTED),
    "float16, converted": (code_decoding._CONVERTED_F16, torch.float16, 1.0),
    "bfloat16, bits alone": (code_decoding._PLACED_BF16, torch.bfloat16, code_decoding.PLACED),
    "bfloat16, converted": (code_decoding._CONVERTED_BF16, torch.bfloat16, 1.0),
    "bfloat16 by way of float32": (code_decoding._WIDENED_BF16, torch.bfloat16, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_eight_bits(name: str) -> None:
    """Every code at each place of a word, subnormals and both zeros included; one that is not finite, which no weight
    holds, becomes 480 by bits and stays what it is where a card converts it.
    """
    text, dtype, factor = FLOATS[name]
    given = np.tile(np.arange(256, dtype=np.uint8), 4 * 4)
    np.random.default_rng(0).shuffle(given)
    wanted = torch.from_numpy(given).view(torch.float8_e4m3fn).float()
    if factor != 1:
        wanted = torch.where(wanted.isnan(), torch.where(torch.from_numpy(given) > 127, -480.0, 480.0), wanted)
    found = values_of(run_ptx(text.value, given.view(np.uint32)), dtype).float() * factor
    assert torch.equal(found.isnan(), wanted.isnan())
    finite = ~wanted.isnan()
    assert torch.equal(found[finite], wanted[finite])
    assert torch.equal(torch.signbit(found[finite]), torch.signbit(wanted[finite])), "zeros have signs"


@pytest.mark.parametrize(("arch", "version", "way"), [
    (80, "13.4", code_decoding.NO_CONVERSION), (89, "13.4", code_decoding.TO_FLOAT16),
    (90, "13.4", code_decoding.TO_FLOAT16), (100, "13.1", code_decoding.TO_FLOAT16),
    (100, "12.9", code_decoding.TO_FLOAT16), (100, "13.2", code_decoding.TO_BFLOAT16),
    (121, "13.4", code_decoding.TO_BFLOAT16),
])  # fmt: skip
def test_a_card_converts_what_its_assembler_takes(
    arch: int, version: str, way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To bfloat16 from sm_100 and PTX 9.2 on, which is CUDA 13.2."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: SimpleNamespace(version=version))
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(tile_sizes, "arch_of", lambda device: arch)
    code_decoding._ptx_version.cache_clear()
    weight: Any = SimpleNamespace(kind=E4M3)
    assert code_decoding.find_conversion(weight, torch.device("cpu")) == way
    code_decoding._ptx_version.cache_clear()
    weight.kind = INT4
    assert code_decoding.find_conversion(weight, torch.device("cpu")) == code_decoding.NO_CONVERSION


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_float_in_a_kernel(dtype: torch.dtype, device: torch.device) -> None:
    """All finite codes of e4m3: what a launch decodes for many rows, and what products of few rows that pick single
    columns make of them.
    """
    given = torch.arange(256, dtype=torch.uint8)
    given[(given & 0x7F) == 0x7F] = 0
    codes = given.view(8, 32).t().repeat(2, 8)
    q = QTensor(Scheme(8, "float", activations="none"), codes.contiguous().view(torch.float8_e4m3fn),
                torch.ones(64, 1), None, 64, None, dtype)  # fmt: skip
    w, values = packed(q, None, device), codes.contiguous().view(torch.float8_e4m3fn).float()
    held = torch.empty(64, 64, dtype=dtype, device=device)
    quantised_linear.decode_features(w, 0, 64, held)
    assert torch.equal(held.cpu().float(), values)
    x = torch.eye(64, dtype=dtype, device=device)[:8].contiguous()
    assert torch.equal(quantised_linear.linear(x, w).cpu().float(), values.t()[:8])
    fused = skinny_quantised_gemm.product(x, w, skinny_gemm.counters(device))
    assert torch.equal(fused.cpu().float(), values.t()[:8])
    assert len(values.t()[:8].unique()) == 253, "both zeros are one value"


@pytest.mark.parametrize("power", [-60, -20, 0, 20, 58])
def test_small_and_large_rows_keep_their_bits(power: int, device: torch.device) -> None:
    """Rows that are multiplied by a power of two, as codes that are bits in their places need, and what a norm's weight
    does to them: sums of rows 2^power as large are 2^power as large.
    """
    q = quantise(normal(64, 256), Scheme(8, "float", activations="none"), torch.bfloat16)
    w, x = packed(q, None, device), normal(5, 256, seed=3).bfloat16().to(device)
    norm = skinny_gemm.NormOf(normal(256, seed=4).abs().bfloat16().to(device), 0.0)
    assert code_decoding.places_floats(w, x.dtype, device)
    for before in (None, norm):
        one, other = (
            skinny_quantised_gemm.product(rows, w, skinny_gemm.counters(device), before).cpu().float()
            for rows in (x, x * 2.0**power)
        )
        assert torch.equal(one * 2.0 ** (power if before is None else 0), other)
        assert one.abs().max() > 0.1 and not one.isnan().any()
    plain = skinny_quantised_gemm.product(x, w, skinny_gemm.counters(device)).cpu().float()
    want = x.cpu().float() @ dequantise(w).cpu().float().t()
    assert ((plain - want).abs() <= 2**-8 * want.abs().clamp_min(want.abs().max() / 64)).all()


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize(("dtype", "text"), [
    (torch.bfloat16, (quantised_fused_moe._FP4_BF16, quantised_fused_moe._FP4_BF16_HIGH)),
    (torch.float16, (quantised_fused_moe._FP4_F16, quantised_fused_moe._FP4_F16_HIGH)),
], ids=["bfloat16", "float16"])  # fmt: skip
def test_floats_of_4_bits(dtype: torch.dtype, text: tuple[Any, Any], high: bool) -> None:
    """All bytes: sign and magnitude in their places, times a power of two, are the value."""
    given = np.tile(np.arange(256, dtype=np.uint8), 4)
    np.random.default_rng(1).shuffle(given)
    found = values_of(run_ptx(text[high].value, given.view(np.uint32)), dtype)
    assert found.tolist() == [FP4_HALVES[b >> 4 if high else b & 15] / 2 for b in given.tolist()]
