"""fp8 in blocks of 128 by activations in fp8: the layout that the library wants, its proof at the start, and values
that do not depend on how many rows a launch has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from benchmarks.packing import qwen_7b
from tests.kernels.quantised.block_product_library import PLANTED, BlockProducts
from tests.kernels.quantised.test_quantised import away, normal, packed
from trencadis.backends.cuda.kernels import block_scaled_linear, quantised_linear, tile_sizes
from trencadis.backends.cuda.time_estimates.meta_launch_recorder import DecodeRecorder
from trencadis.backends.cuda.weights.quantised_weight import QuantisedWeight, dequantise, product
from trencadis.core.checkpoint.quant_config import Quantisation, QuantRule
from trencadis.core.memory.weight_bytes import quantisation_excess
from trencadis.core.quant.quantised_tensor import QTensor, join_weights
from trencadis.core.quant.quantised_weight_layout_and_bytes import (
    CODES,
    Scheme,
    block_scale_bytes,
    has_block_scales,
    held_bytes,
)

SCHEME = block_scaled_linear.SCHEME
DTYPE = torch.bfloat16


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> Iterator[BlockProducts]:
    made = BlockProducts()
    monkeypatch.setattr(functional, "scaled_mm", made)
    block_scaled_linear.try_product.cache_clear()
    yield made
    block_scaled_linear.try_product.cache_clear()
    block_scaled_linear.prove(torch.device("cpu"), torch.float32)  # none for float32: it is off again


def blocks(rows: int, columns: int, seed: int = 0, scheme: Scheme = SCHEME, dtype: torch.dtype = DTYPE) -> QTensor:
    """A weight whose blocks have scales of their own, far apart."""
    codes = normal(rows, columns, seed=seed).to(torch.float8_e4m3fn)
    sizes = torch.rand(-(-rows // 128), columns // 128, generator=torch.Generator().manual_seed(seed)) * 4 + 0.25
    return QTensor(scheme, codes, sizes.repeat_interleave(128, 0)[:rows], None, 128, None, dtype)


def test_a_library_that_keeps_the_rules_is_used(library: BlockProducts, device: torch.device) -> None:
    """Rows that are no multiple of four, three blocks and a part of one, five columns of blocks; a bias."""
    w = packed(blocks(400, 640), normal(400, seed=3).to(DTYPE), device)
    assert w.blocks is not None and w.blocks.shape == (4, 8) and library.calls == len(block_scaled_linear.PROOF_ROWS)
    x = normal(70, 640, seed=1).to(DTYPE)
    y = quantised_linear.linear(x.to(device), w)
    assert y.shape == (70, 400) and y.dtype == DTYPE and library.calls == len(block_scaled_linear.PROOF_ROWS) + 1
    exact = x.float() @ dequantise(w).t() + normal(400, seed=3).to(DTYPE).float()
    assert away(y, product(x, w).float()) < 0.006, "the same codes, by plain torch"
    assert 0.02 < away(y, exact) < 0.05, "what rounding activations costs"


@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_library_is_found_at_the_start(
    planted: str, monkeypatch: pytest.MonkeyPatch, device: torch.device, interpreted: None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One line says so, and weights are multiplied as before: activations in 16 bits."""
    monkeypatch.setattr(functional, "scaled_mm", BlockProducts(planted))
    block_scaled_linear.try_product.cache_clear()
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        w = packed(blocks(128, 256), None, device)
        packed(blocks(128, 256), None, device)
    assert w.blocks is None and len(caplog.records) == 1
    said = caplog.records[0].getMessage()
    assert said.startswith("no products of fp8 in blocks here (") and "\n" not in said
    assert ("CUBLAS_STATUS_NOT_SUPPORTED" if planted == "raises" else "% from a plain product") in said
    x = normal(3, 256, seed=1).to(DTYPE)
    assert away(quantised_linear.linear(x, w), x.float() @ dequantise(w).t()) < 0.006
    block_scaled_linear.try_product.cache_clear()


@pytest.mark.parametrize("how", ["torch", "card", "switch", "float32"])
def test_without_the_product_activations_stay(
    how: str, library: BlockProducts, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A torch without it, another card, the switch, and 32 bits, for which there is none."""
    said = {"torch": "has none", "card": "sm_100; cuBLAS has them for sm_90", "switch": "", "float32": ""}
    if how == "torch":
        monkeypatch.delattr(functional, "scaled_mm")
    if how == "card":
        monkeypatch.setattr(tile_sizes, "arch_of", lambda device: 100)
    if how == "switch":
        monkeypatch.setattr(block_scaled_linear, "is_wanted", lambda: False)
    dtype = torch.float32 if how == "float32" else DTYPE
    note = block_scaled_linear.prove(device, dtype)
    assert (said[how] in note) if said[how] else not note
    assert not block_scaled_linear.possible(device) and not library.calls


def test_few_rows_round_as_many_do(
    library: BlockProducts, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's product is the same, but for roundings to 16 bits, whether 1, 17 or 70 rows are beside it."""
    monkeypatch.setitem(tile_sizes.FORCED, "quantised", tile_sizes.Tile(16, 32, 4, 1))
    w = packed(blocks(160, 256), None, device)
    x = normal(70, 256, seed=1).to(DTYPE)
    many = quantised_linear.linear(x, w)
    for rows in (1, 17):
        few = quantised_linear.linear(x[:rows].contiguous(), w)
        assert away(few, many[:rows].float()) < 0.008
        assert away(few, x[:rows].float() @ dequantise(w).t()) > 0.015


def test_weights_of_other_schemes_keep_their_activations(library: BlockProducts, device: torch.device) -> None:
    """Weights alone, static scales, other blocks, and joined matrices that a block would cross."""
    for scheme in (replace(SCHEME, activations="none"), replace(SCHEME, activations="static")):
        assert packed(blocks(128, 256, scheme=scheme), None, device).blocks is None
    assert not has_block_scales(replace(SCHEME, group=64), 128, 256)
    assert not has_block_scales(SCHEME, 128, 192) and not has_block_scales(SCHEME, 120, 256)
    first, second = blocks(192, 256), blocks(128, 256, seed=1)
    assert packed(join_weights([first, second]), None, device).blocks is None
    assert packed(join_weights([second, first]), None, device).blocks is not None


def test_the_scales_of_blocks_are_in_the_ledger(library: BlockProducts, device: torch.device) -> None:
    w = packed(blocks(400, 640), None, device)
    planned = held_bytes(SCHEME, 400, 640, 2, CODES) + block_scale_bytes(SCHEME, 400, 640, 2, CODES)
    assert isinstance(w, QuantisedWeight) and w.nbytes == planned


def test_the_plan_knows_the_scales_of_all_blocks() -> None:
    """Those of a model's matrices, as they are joined and loaded; of experts none are kept."""
    text = replace(qwen_7b().text, layers=2)
    sizes = []
    for activations in ("token", "none"):
        rules = (QuantRule(("Linear",), replace(SCHEME, activations=activations)),)
        model = replace(qwen_7b(), text=text, quant=Quantisation("fp8", "fp8", rules, ignore=("lm_head",)))
        sizes.append((DecodeRecorder(model).model.nbytes(), quantisation_excess(model, 2, 1, CODES)))
    (held, planned), (less, planned_less) = sizes
    assert held - less == planned - planned_less > 2 * 4 * (36 * 28 + 28 * 28 + 296 * 28 + 28 * 148), "and the tower's"
