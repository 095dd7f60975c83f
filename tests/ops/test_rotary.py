"""The library's rotary is held to float64, and reads queries and keys wherever they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests import kernel_kinds
from trencadis.backends.cpu.native.attention_and_row_kernels import StoredKeys, can_store, rotate, torch_rotate
from trencadis.backends.cpu.native.kernel_choice_by_cpu import TORCH
from trencadis.backends.cpu.ops import CpuOps
from trencadis.core.device.backend import Attn, LayerKV, Rotary

QueryKeyValue = tuple[Tensor, Tensor, Tensor, Tensor]


def make_parts(n: int, heads: int, groups: int, size: int, dtype: torch.dtype) -> QueryKeyValue:
    """(q, k, cos, sin): views of a fused projection, and factors whose halves are alike."""
    generator = torch.Generator().manual_seed(n + size)
    fused = torch.randn(n, heads + 2 * groups, size, generator=generator).to(dtype)
    angle = torch.rand(n, size // 2, generator=generator) * 100
    q, k, _ = fused.split([heads, groups, groups], dim=1)
    cos, sin = (torch.cat([t, t], -1) for t in (angle.cos(), angle.sin()))
    return q, k, cos, sin


def exact(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = torch.cat([q, k], dim=1).double()
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None].double() + torch.cat([-second, first], -1) * sin[:, None].double()


@pytest.mark.parametrize("kind", kernel_kinds.OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_turn_as_in_float64_and_rows_alone_as_in_company(kind: str, dtype: torch.dtype) -> None:
    table = kernel_kinds.table(kind)
    for n, heads, groups, size in ((1, 14, 2, 64), (63, 3, 1, 80), (1000, 4, 4, 72), (5, 2, 2, 128), (3, 1, 1, 32)):
        made = make_parts(n, heads, groups, size, dtype)
        wanted = exact(*made)
        with kernel_kinds.served("rotary", table):
            found = rotate(*made, table)
        assert found is not None
        bound = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        assert bool(((found.double() - wanted).abs() <= bound * wanted.abs() + 1e-6).all()), (n, heads, size)
        apart = rotate(made[0], made[1].contiguous(), *made[2:], table)
        assert apart is not None and torch.equal(apart, found)
        q, k, cos, sin = (t[n // 2 : n // 2 + 1].contiguous() for t in made)
        some = rotate(q, k, cos, sin, table)
        assert some is not None and torch.equal(some[0], found[n // 2])


def test_what_the_library_does_not_turn_torch_does() -> None:
    cases = ((16, torch.float32, "avx2"), (64, torch.float64, "avx2"), (64, torch.float32, TORCH))
    for size, dtype, kind in cases:
        made = make_parts(9, 4, 2, size, dtype)
        assert rotate(*made, kernel_kinds.table(kind)) is None
        torch.testing.assert_close(torch_rotate(*made).double(), exact(*made), rtol=1e-5, atol=1e-5)


def empty(groups: int, size: int, dtype: torch.dtype) -> LayerKV:
    return LayerKV(*(torch.full((20, 16, groups, size), float("nan")).to(dtype) for _ in "kv"))


@pytest.mark.parametrize("size", [16, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_and_values_are_stored_and_no_other_slot_is_touched(dtype: torch.dtype, size: int) -> None:
    n, groups = 37, 2
    q, k, cos, sin = make_parts(n, 6, groups, size, dtype)
    v = torch.randn(n, 3 * groups, size)[:, groups : 2 * groups].to(dtype)
    slots = torch.randperm(20 * 16, generator=torch.Generator().manual_seed(1))[:n]
    kv = empty(groups, size, dtype)
    unused = torch.zeros(1, dtype=torch.int32)
    attn = Attn(unused, unused, unused, slots)
    _, turned, same = CpuOps().rope_store(q, k, v, Rotary(cos, sin), kv, attn)
    assert same is v and torch.equal(kv.v.flatten(0, 1)[slots], v) and torch.equal(kv.k.flatten(0, 1)[slots], turned)
    torch.testing.assert_close(turned.double(), exact(q, k, cos, sin)[:, 6:], rtol=2e-2, atol=2e-2)
    left = torch.ones(20 * 16, dtype=torch.bool)
    left[slots] = False
    assert all(bool(t.flatten(0, 1)[left].isnan().all()) for t in (kv.k, kv.v))


@pytest.mark.parametrize("kind", kernel_kinds.OWN)
def test_storing_changes_no_bit_of_what_is_turned(kind: str) -> None:
    q, k, cos, sin = make_parts(50, 4, 2, 64, torch.bfloat16)
    v, kv, slots = torch.randn(50, 2, 64).bfloat16(), empty(2, 64, torch.bfloat16), torch.arange(100, 150)
    found = rotate(q, k, cos, sin, kernel_kinds.table(kind), StoredKeys(v, kv, slots))
    alone = rotate(q, k, cos, sin, kernel_kinds.table(kind))
    assert found is not None and alone is not None and torch.equal(found, alone)
    assert torch.equal(kv.k.flatten(0, 1)[slots], found[:, 4:]) and torch.equal(kv.v.flatten(0, 1)[slots], v)


def test_only_caches_of_the_same_type_are_stored_to() -> None:
    v, kv = torch.randn(4, 2, 64), empty(2, 64, torch.float32)
    assert can_store(v, kv) and not can_store(v.bfloat16(), kv)
    assert not can_store(torch.randn(2, 4, 64).transpose(0, 1), kv)
    codes = torch.zeros(20, 16, 2, 64, dtype=torch.int8)
    assert not can_store(v, LayerKV(codes, codes, torch.ones(20, 16, 2), torch.ones(20, 16, 2)))
    assert not can_store(v, kv._replace(k=kv.k.transpose(1, 2).contiguous().transpose(1, 2)))
