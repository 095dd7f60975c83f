"""The library's rotary is held to float64, and reads queries and keys wherever they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trencadis.backends.cpu.native import library
from trencadis.backends.cpu.native.turn import torch_turn, turn

Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def parts(n: int, heads: int, groups: int, size: int, dtype: torch.dtype) -> Parts:
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


@pytest.mark.parametrize("kind", library.found().kinds)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_turn_as_in_float64_and_rows_alone_as_in_company(kind: str, dtype: torch.dtype) -> None:
    number = library.KINDS[kind]
    for n, heads, groups, size in ((1, 14, 2, 64), (63, 3, 1, 80), (1000, 4, 4, 72), (5, 2, 2, 128), (3, 1, 1, 32)):
        made = parts(n, heads, groups, size, dtype)
        wanted = exact(*made)
        found = turn(*made, number)
        assert found is not None
        bound = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        assert bool(((found.double() - wanted).abs() <= bound * wanted.abs() + 1e-6).all()), (n, heads, size)
        apart = turn(made[0], made[1].contiguous(), *made[2:], number)
        assert apart is not None and torch.equal(apart, found)
        q, k, cos, sin = (t[n // 2 : n // 2 + 1].contiguous() for t in made)
        some = turn(q, k, cos, sin, number)
        assert some is not None and torch.equal(some[0], found[n // 2])


def test_what_the_library_does_not_turn_torch_does() -> None:
    kind = max(library.KINDS.values())
    for size, dtype, number in ((16, torch.float32, kind), (64, torch.float64, kind), (64, torch.float32, 0)):
        made = parts(9, 4, 2, size, dtype)
        assert turn(*made, number) is None
        torch.testing.assert_close(torch_turn(*made).double(), exact(*made), rtol=1e-5, atol=1e-5)
