"""With TRENCADIS_CPU_CHECKS, what kernels would read or write out of bounds is an error."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests import kernel_kinds
from trencadis.backends.cpu.native import attention_and_row_kernels, bounds_checks
from trencadis.backends.cpu.native.attention_and_row_kernels import StoredKeys, rotate
from trencadis.core.device.backend import LayerKV

pytestmark = pytest.mark.skipif(not kernel_kinds.OWN, reason="own kernels are not built here")


@pytest.fixture(autouse=True)
def checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(bounds_checks.VARIABLE, "1")
    bounds_checks.enabled.cache_clear()
    yield
    bounds_checks.enabled.cache_clear()


def cache() -> LayerKV:
    """Three blocks of 16 slots."""
    return LayerKV(torch.zeros(3, 16, 1, 32), torch.zeros(3, 16, 1, 32))


def test_slots_of_a_cache() -> None:
    table, kv, kept = kernel_kinds.table(kernel_kinds.OWN[-1]), cache(), cache()
    q, k = torch.ones(2, 2, 32), torch.ones(2, 1, 32)
    angles = torch.ones(2, 32)
    for slots in ([0, 48], [-2, 1]):
        with pytest.raises(IndexError, match="slots of keys"):
            rotate(q, k, angles, angles, table, StoredKeys(k, kv, torch.tensor(slots)))
    made = rotate(q, k, angles, angles, table, StoredKeys(k, kv, torch.tensor([-1, 47])))
    assert made is not None and torch.equal(kv.v.flatten(0, 1)[47], k[1]), "-1: nowhere"
    kv.k[2, 15] = kv.v[2, 15] = 0
    assert torch.equal(kv.k, kept.k) and torch.equal(kv.v, kept.v)


def test_block_tables_and_rows_without_keys() -> None:
    table, kv, q = kernel_kinds.table(kernel_kinds.OWN[-1]), cache(), torch.ones(2, 1, 32)
    both, first, length = (np.array(values, np.int32) for values in ([0, 1], [0, 5], [17, 5]))
    out = torch.full((2, 1, 32), float("nan"))
    with pytest.raises(IndexError, match="blocks of row 0: 2 to 3"):
        attention_and_row_kernels.attend_decode(
            q,
            kv,
            attention_and_row_kernels.SingleTokenRows(both, both, first, length, torch.tensor([[2, 3], [0, 9]]).int()),
            1.0,
            out,
            table,
        )
    attention_and_row_kernels.attend_decode(
        q,
        kv,
        attention_and_row_kernels.SingleTokenRows(both, both, first, length, torch.tensor([[2, 1], [9, 9]]).int()),
        1.0,
        out,
        table,
    )
    assert not out.any(), "a row that sees no key gives zeros"


@pytest.mark.parametrize("kind", kernel_kinds.OWN)
@pytest.mark.parametrize("sink", [-1e30, 0.0, 1e30], ids=["far below", "zero", "far above"])
def test_a_row_without_keys_gives_zeros_beside_a_sink(kind: str, sink: float) -> None:
    """The sink alone is in the sum of weights, and has no value; a row with keys is not disturbed."""
    kv, q, out = cache(), torch.ones(2, 1, 32), torch.full((2, 1, 32), float("nan"))
    kv.v.fill_(2.0)
    both, first, length = (np.array(values, np.int32) for values in ([0, 1], [0, 5], [17, 5]))
    rows = attention_and_row_kernels.SingleTokenRows(both, both, first, length, torch.tensor([[2, 1], [9, 9]]).int())
    attention_and_row_kernels.attend_decode(
        q, kv, rows, 1.0, out, kernel_kinds.table(kind), torch.tensor([sink], dtype=torch.float32)
    )
    assert not out[1].any()
    share = 17 / (17 + math.exp(min(sink, 0.0))) if sink <= 0 else 0.0
    torch.testing.assert_close(out[0], torch.full((1, 32), 2.0 * share))


def test_spans() -> None:
    table, q = kernel_kinds.table(kernel_kinds.OWN[-1]), torch.ones(4, 1, 32)
    out = torch.zeros_like(q)
    for queries, keys in ((slice(0, 5), slice(0, 4)), (slice(0, 4), slice(1, 5)), (slice(0, 4), torch.tensor([0, 4]))):
        with pytest.raises(IndexError, match="of a span"):
            attention_and_row_kernels.attend_spans(
                q, q, q, [attention_and_row_kernels.Span(queries, keys, whole=True)], 1.0, out, table
            )
