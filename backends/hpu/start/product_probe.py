"""Finds a product of bfloat16 matrices into float32 that the card has, by trying the known forms when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]

EXACT = 1e-5
"""Largest error as a share of the largest value: a product that was rounded to bfloat16 is off by about 2e-3."""


def multiply_by_dtype(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies bfloat16 [B, S, d] and [B, d, T] by ``bmm(out_dtype=)``, which newer releases of torch have."""
    found: Tensor = torch.bmm(a, b, out_dtype=torch.float32)
    return found


def multiply_into(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies bfloat16 [..., S, d] and [..., d, T] into a float32 tensor by ``matmul(out=)``."""
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32, device=a.device)
    return torch.matmul(a, b, out=out)


FORMS: tuple[Product, ...] = (multiply_by_dtype, multiply_into)


def find_product(device: torch.device, compile: Callable[[Product], Product] | None) -> Product | None:
    """Returns the first of ``FORMS`` that runs on the card and is exact, in three and four dimensions; None: none is.

    Args:
        compile: the compiler of compile mode; None in lazy mode.
    """
    g = torch.Generator().manual_seed(4)
    a, b = torch.randn(2, 4, 64, generator=g).bfloat16(), torch.randn(2, 64, 8, generator=g).bfloat16()
    want = a.float() @ b.float()
    for form in FORMS:
        product = _any_rank(form)
        try:
            call = product if compile is None else compile(product)
            with redirect_stderr(StringIO()):  # a graph that fails prints its code
                found = [
                    call(*(t.to(device).view(shape + t.shape[1:]) for t in (a, b))).cpu().view_as(want)
                    for shape in ((2,), (1, 2))
                ]
        except Exception:
            continue  # whatever a release raises for a form that it lacks
        if all(t.dtype == torch.float32 and float((t - want).abs().max() / want.abs().max()) < EXACT for t in found):
            return product
    return None


def _any_rank(form: Product) -> Product:
    """Returns ``form`` for matrices of any number of leading dimensions."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        if a.dim() == 3:
            return form(a, b)
        found = form(a.flatten(0, -3), b.expand(*a.shape[:-2], *b.shape[-2:]).flatten(0, -3))
        return found.view(*a.shape[:-1], b.shape[-1])

    return product
