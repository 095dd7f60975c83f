"""Weights that are decoded once for many rows, and the card's instructions that decode four codes at a time."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.quantised.test_quantised import normal, packed
from trencadis.backends.cuda.kernels import quantised_fused_moe, quantised_linear, weight_operands
from trencadis.backends.cuda.weights.quantised_weight import dequantise
from trencadis.core.quant.online_quant import quantise
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
    ("rows", "features", "most"),
    [(2048, 37_888, 4681), (2048, 4608, 4681), (8192, 3584, 4681), (256, 18_944, 900), (300, 130, 4000),
     (512, 5000, 100)],
)  # fmt: skip
def test_pieces_fill_waves_of_programs(rows: int, features: int, most: int) -> None:
    """In whole tiles, as large as the scratch allows, and never in more waves than the largest piece takes."""
    each = quantised_linear.choose_piece(rows, features, most, 132)
    assert 0 < each <= max(most, 64) and each % (256 if most >= 256 else 64) == 0

    def waves(size: int) -> int:
        tiles = [-(-rows // 128) * -(-min(size, features - start) // 256) for start in range(0, features, size)]
        return sum(-(-n // 132) for n in tiles)

    if most >= 256:
        assert waves(each) == min(waves(size) for size in range(256, min(most, features + 255) + 1, 256))


# The instructions, on the host

SHIFTS: dict[str, Any] = {"shr.u32": np.right_shift, "shl.b32": np.left_shift}


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
            case "cvt.rn.f16x2.e4m3x2":
                floats = torch.from_numpy(a[0].astype(np.uint16).view(np.uint8)).view(torch.float8_e4m3fn)
                held[to] = floats.half().view(torch.int16).numpy().view(np.uint32).astype(np.uint64)
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
                places = [(int(a[2][0]) >> (4 * i)) & 7 for i in range(4)]
                held[to] = sum(((both >> np.uint64(8 * p)) & 255) << np.uint64(8 * i) for i, p in enumerate(places))
            case "shr.u32" | "shl.b32":
                held[to] = SHIFTS[name](a[0], a[1]) & np.uint64(0xFFFFFFFF)
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


def assembly(kind: str) -> str:
    """The instructions of ``split_codes`` for a type."""
    source = inspect.getsource(quantised_linear.split_codes.fn)
    return next(t for t in re.findall(r'"""\{(.*?)\}"""', source, re.S) if ("bf16x2" in t) == (kind == "bfloat16"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_four_bytes_at_a_time(dtype: torch.dtype) -> None:
    """All bytes, at each of the four places of a word, give their two codes minus eight."""
    rng = np.random.default_rng(0)
    given = np.concatenate([np.tile(np.arange(256, dtype=np.uint8), 4), rng.integers(0, 256, 4096, dtype=np.uint8)])
    rng.shuffle(given)
    outs: Any = run_ptx(assembly(str(dtype).removeprefix("torch.")), given.view(np.uint32))
    low, high = (
        torch.from_numpy(np.stack(pair, 1).astype(np.uint32).view(np.int16)).view(dtype).flatten()
        for pair in (outs[:2], outs[2:])
    )
    assert low.tolist() == [int(b & 15) - 8 for b in given] and high.tolist() == [int(b >> 4) - 8 for b in given]


def values_of(words: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    """The values of pairs of 16 bits, in the order of the bytes that they were taken from."""
    return torch.from_numpy(np.stack(words, 1).astype(np.uint32).view(np.int16)).view(dtype).flatten()


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize(("dtype", "text"), [
    (torch.bfloat16, (weight_operands._LOW_BF16, weight_operands._HIGH_BF16)),
    (torch.float16, (weight_operands._LOW_F16, weight_operands._HIGH_F16)),
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


def test_floats_become_bfloat16() -> None:
    given = np.arange(256, dtype=np.uint8)
    given = given[(given & 0x7F) != 0x7F]
    given = np.append(given, given[:2]).astype(np.uint8)
    text = re.findall(r'"""\{(.*?)\}"""', inspect.getsource(weight_operands.convert_to_bfloat16.fn), re.S)[0]
    found = values_of(run_ptx(text, given.view(np.uint32)), torch.bfloat16)
    assert torch.equal(found.float(), torch.from_numpy(given).view(torch.float8_e4m3fn).float())
