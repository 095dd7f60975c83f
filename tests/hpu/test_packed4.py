"""Weights of 4 bits on an emulated Gaudi: the published operation, products, what is not packed, bytes, recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quant import checkpoints as made
from tests.quant.test_devices import SMALL, away, gaudi, no_compilations, normal, small
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.hpu_quantised_linear import PackedWeight4
from trencadis.backends.hpu.launches.region_compiler import part
from trencadis.backends.hpu.shape_policy import policy
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.memory.weight_bytes import largest_dequantised_bytes
from trencadis.core.models.model_loader import load_model
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import FLOATS8, Scheme, notes_of

__all__ = ["small"]

pytestmark = pytest.mark.part("quantised")


def test_the_emulated_operation_is_the_published_one() -> None:
    """Eight codes a word along the last dimension, lowest bits first; (code - zero) x scale of the group of rows."""
    backend = gaudi()
    word = torch.tensor([[0x12345678], [0x0F0F0F0F]], dtype=torch.int32).to(backend.device)
    scale = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2], [3] * 8], dtype=torch.bfloat16).to(backend.device)
    zero = torch.tensor([[0x00000001], [0x11111111]], dtype=torch.int32).to(backend.device)
    found = backend.bridge.convert_from_uint4(word, scale, zero, torch.bfloat16).cpu().tolist()
    assert found == [[7, 7, 6, 5, 8, 6, 4, 2], [42, -3] * 4]
    for wrong, said in (
        ((word.long(), scale, zero), "Only int input"), ((word, scale[:, :4], zero), "do not divide"),
        ((word[:1], scale, zero), "do not divide"), ((word, scale, zero[:1]), "do not divide"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=said):
            backend.bridge.convert_from_uint4(*wrong, torch.bfloat16)
    with pytest.raises(RuntimeError, match="gives bfloat16"):
        backend.bridge.convert_from_uint4(word, scale, zero, torch.float16)


def weight(group: int, symmetric: bool, ordered: bool, rows: int = 40, columns: int = 96) -> QTensor:
    q = quantise(normal(rows, columns), Scheme(4, group=group, ordered=ordered), torch.bfloat16)
    q = dataclasses.replace(q, scale=q.scale.bfloat16().float())
    if not symmetric:
        zero = torch.arange(q.scale.numel()).view(q.scale.shape) % 16 - 8
        q = dataclasses.replace(q, zero=zero.to(torch.int8), scheme=dataclasses.replace(q.scheme, symmetric=False))
    if ordered:
        order = (torch.arange(columns) // group)[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
        q = dataclasses.replace(q, order=order.int())
    return q


class Held:
    """A weight and its product, as a layer has them."""

    def __init__(self, ops: Any, weight: Any) -> None:
        self.ops, self.weight = ops, weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.ops.linear(x, self.weight)
        return found


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(("group", "symmetric", "ordered"), [(32, True, False), (0, False, False), (32, False, True)])
def test_products_are_those_of_the_reference(group: int, symmetric: bool, ordered: bool, lazy: bool) -> None:
    """Scales are bfloat16 on the card, as here; a weight is opened anew for each product, also compiled."""
    backend, q = gaudi(lazy=lazy), weight(group, symmetric, ordered)
    bias, x = normal(40, seed=1).bfloat16(), normal(7, 96, seed=2).bfloat16()
    w = backend.ops.pack_quantised(q, bias.to(backend.device))
    assert isinstance(w, PackedWeight4) and (w.gather is not None) is ordered
    groups = q.scale.shape[1]
    assert w.nbytes == 40 * 96 // 2 + groups * (2 * 40 + 40 // 2) + 4 * 96 * ordered
    held = Held(backend.ops, w)
    run: Any = held if lazy else partial(backend.bridge.compile(part), held)
    y = run(x.to(backend.device)).cpu()
    assert away(y, x.float() @ q.dequantised().t() + bias.float()) <= 1e-2
    assert not backend.fallbacks()


def test_what_the_operation_does_not_take_becomes_16_bits() -> None:
    """Rows that fill no word, groups of unequal columns, a zero point of 16, another type, a plug-in without it."""
    backend, q = gaudi(), weight(32, False, False)
    odd = weight(32, True, False, rows=36)
    apart = dataclasses.replace(weight(32, True, True), order=(torch.arange(96) // 33).int())
    high = dataclasses.replace(q, zero=torch.full_like(q.zero, 8))  # type: ignore[arg-type]
    float32 = gaudi(dtype=torch.float32)
    without = dataclasses.replace(make_bridge(EmulatedDevice(profile(""))), convert_from_uint4=None)
    bare = HpuBackend(BackendConfig(dtype=torch.bfloat16), policy(""), without)
    x = normal(3, 96, seed=2)
    for where, one in (
        (backend, odd), (backend, apart), (backend, high), (bare, q),
        (float32, dataclasses.replace(q, dtype=torch.float32)),
    ):  # fmt: skip
        w = where.ops.pack_quantised(one)
        assert not isinstance(w, PackedWeight4)
        y = where.ops.linear(x.to(one.dtype).to(where.device), w).cpu()
        assert away(y, x.to(one.dtype).float() @ one.dequantised().t()) <= 1e-2


@pytest.mark.parametrize(
    ("kind", "group", "symmetric", "ordered"),
    [("awq", 32, False, False), ("gptq", 32, True, False), ("pack-quantized", 32, True, False)],
)
def test_the_ledger_prices_checkpoints_to_the_byte(
    kind: str, group: int, symmetric: bool, ordered: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint("qwen2", tie_word_embeddings=False)
    path, _ = made.checkpoint(source, tmp_path, kind, 4, group, symmetric, ordered)
    backend = gaudi()
    configs = load_config(source), load_config(path)
    held = [load_model(one, backend) for one in configs]
    paper = [MemoryEstimator(one, 2, quantised=backend.policy.quantised).weights() for one in configs]
    assert held[1].nbytes() - held[0].nbytes() == paper[1] - paper[0] < 0
    decoder: Any = held[1]
    assert isinstance(decoder.layers[0].mlp.down.weights[0], PackedWeight4)
    largest = 2 * configs[1].text.intermediate * configs[1].text.hidden * 2
    assert (
        largest_dequantised_bytes(configs[1], 2, 1, FLOATS8, 1, False) == largest
        and largest_dequantised_bytes(configs[1], 4, 1, FLOATS8, 1, False) == 0
    )


def test_a_line_says_what_becomes_of_4_bits() -> None:
    line = "weights: int4 in groups of 32, kept packed and opened to bfloat16 in every product"
    assert notes_of([Scheme(4, group=32)], FLOATS8, 2) == [line]
    assert "become 32-bit values" in notes_of([Scheme(4, group=32)], FLOATS8, 4)[0]
    assert (
        "become 16-bit values as they load, which saves no memory here; fp8 and int4"
        in notes_of([Scheme(8)], FLOATS8, 2)[0]
    )


@pytest.mark.long
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("lazy", ["1", "0"])
def test_an_engine_compiles_nothing_after_warm_up(
    lazy: str, vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    no_compilations("hpu", "int4", 200, vl_checkpoint, **SMALL)
