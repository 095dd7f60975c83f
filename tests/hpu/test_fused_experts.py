"""Experts by the plug-in's operation: the dense form's values, checked before use; reads of chosen experts alone."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hpu.conftest import Run
from tests.hpu.start.test_symbols import OPEN
from trencadis.backends.cpu.expert_mlp import JoinedExperts
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.fused_experts import ListedExperts, ListedFp8Experts
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.shape_policy import policy
from trencadis.core.device.backend import BackendConfig
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme

pytestmark = pytest.mark.part("gaudi")

COUNT, HIDDEN, INNER, TOP = 6, 32, 16, 2


def weights() -> tuple[list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(3)
    gate_up = [torch.randn(2 * INNER, HIDDEN, generator=g) / 4 for _ in range(COUNT)]
    return gate_up, [torch.randn(HIDDEN, INNER, generator=g) / 4 for _ in range(COUNT)]


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_the_operation_gives_the_dense_forms_values(hpu: Any, lazy: bool, kind: str) -> None:
    backend = hpu(lazy=lazy)
    gate_up, down = weights()
    packed = backend.ops.pack_experts(*([t.to(DEVICE) for t in some] for some in (gate_up, down)))
    assert isinstance(packed, ListedExperts)
    reference = ReferenceOps()
    joined = reference.pack_experts(gate_up, down)
    g = torch.Generator().manual_seed(4)
    for n in (1, 7):
        x, scores = torch.randn(n, HIDDEN, generator=g), torch.randn(n, COUNT, generator=g)
        want = reference.experts(x, scores, joined, TOP, True, kind)

        def apply(x: Tensor, scores: Tensor) -> Tensor:
            return backend.ops.experts(x, scores, packed, TOP, True, kind)  # type: ignore[no-any-return]

        args = x.to(DEVICE), scores.to(DEVICE)
        with backend._contexts.launch():
            found = backend.ops.region(apply, *args)
        torch.testing.assert_close(found.cpu(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_experts_without_gates_take_plain_products(hpu: Any, kind: str) -> None:
    """The plug-in's operation has gates in any case."""
    backend, reference = hpu(lazy=True), ReferenceOps()
    gate_up, down = weights()
    ups = [one[INNER:].contiguous() for one in gate_up]
    packed = backend.ops.pack_experts(*([t.to(DEVICE) for t in some] for some in (ups, down)))
    x, scores = torch.randn(7, HIDDEN), torch.randn(7, COUNT)
    want = reference.experts(x, scores, reference.pack_experts(ups, down), TOP, True, kind)
    with backend._contexts.launch():
        found = backend.ops.experts(x.to(DEVICE), scores.to(DEVICE), packed, TOP, True, kind)
    torch.testing.assert_close(found.cpu(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", ["values", "error", "missing"])
def test_an_operation_that_differs_is_not_used(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    bridge = make_bridge(EmulatedDevice(profile("")))
    kernel: Any = bridge.experts

    def spoiled(*args: Any) -> Tensor:
        if wrong == "error":
            raise RuntimeError("mixture_of_experts: Unsupported")
        found: Tensor = kernel(*args) * 2
        return found

    bridge = dataclasses.replace(bridge, experts=None if wrong == "missing" else spoiled)
    backend = HpuBackend(BackendConfig(), policy(""), bridge, HpuSettings())
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        for _ in range(2):
            gate_up, down = ([t.to(DEVICE) for t in some] for some in weights())
            packed = backend.ops.pack_experts(gate_up, down)
            assert isinstance(packed, JoinedExperts)
    assert len(caplog.records) == (0 if wrong == "missing" else 1)


def fp8_experts() -> tuple[list[QTensor], list[QTensor]]:
    """The weights as a checkpoint of 8-bit floats has them, with a scale a row, whose codes reach 448."""
    scheme = Scheme(8, "float")
    gate_up, down = ([quantise(w, scheme, torch.bfloat16) for w in some] for some in weights())
    return gate_up, down


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_experts_of_8_bit_floats_give_the_dense_forms_values(hpu: Any, lazy: bool, kind: str) -> None:
    """Codes are kept; the dense form has the codes' exact values, so that the rounding of tokens is what differs."""
    backend = hpu(lazy=lazy)
    gate_up, down = fp8_experts()
    packed = backend.ops.pack_quantised_experts(gate_up, down)
    assert isinstance(packed, ListedFp8Experts)
    assert packed.nbytes == COUNT * (3 * HIDDEN * INNER + 4 * (2 * INNER + HIDDEN)), "a byte a weight, a scale a row"
    assert all(float(c.cpu().float().abs().max()) <= 240 for c in (*packed.gate_up, *packed.down)), "of a Gaudi 2"
    reference = ReferenceOps()
    joined = reference.pack_experts([q.dequantised() for q in gate_up], [q.dequantised() for q in down])
    g = torch.Generator().manual_seed(4)
    x, scores = torch.randn(7, HIDDEN, generator=g).bfloat16(), torch.randn(7, COUNT, generator=g)
    want = reference.experts(x.float(), scores, joined, TOP, True, kind)

    def apply(x: Tensor, scores: Tensor) -> Tensor:
        return backend.ops.experts(x, scores, packed, TOP, True, kind)  # type: ignore[no-any-return]

    args = x.to(DEVICE), scores.to(DEVICE)
    with backend._contexts.launch():
        found = backend.ops.region(apply, *args)
    assert found.dtype == torch.bfloat16
    assert float((found.cpu().float() - want).abs().max() / want.abs().max()) < 0.08


@pytest.mark.parametrize("wrong", ["values", "error", "missing", "int8"])
def test_experts_that_cannot_stay_8_bit_floats_are_dequantised(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    """One warning where the operation differs or fails; the layer then takes 16 bits, as it does for other codes."""
    bridge = make_bridge(EmulatedDevice(profile("")))
    kernel: Any = bridge.fp8_experts

    def spoiled(*args: Any) -> Tensor:
        if wrong == "error":
            raise RuntimeError("mixture_of_experts: Unsupported")
        found: Tensor = kernel(*args) * (2 if wrong == "values" else 1)
        return found

    bridge = dataclasses.replace(bridge, fp8_experts=None if wrong == "missing" else spoiled)
    ops: Any = HpuBackend(BackendConfig(), policy(""), bridge, HpuSettings()).ops
    gate_up, down = fp8_experts()
    if wrong == "int8":
        down = [quantise(q.dequantised(), Scheme(8), torch.bfloat16) for q in down]
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        for _ in range(2):
            assert ops.pack_quantised_experts(gate_up, down) is None
    assert len(caplog.records) == (1 if wrong in ("values", "error") else 0)


CHECK = (
    OPEN
    + """
import dataclasses
from trencadis.backends.hpu.ops import HpuOps
from trencadis.backends.hpu.hpu_settings import HpuSettings
ops = HpuOps(bridge, HpuSettings(), 16)
packed = ops.pack_experts([torch.randn(8, 16) for _ in range(3)], [torch.randn(16, 4) for _ in range(3)])
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme
up, down = ([quantise(torch.randn(n, m), Scheme(8, "float"), torch.bfloat16) for _ in range(3)]
            for n, m in ((8, 16), (16, 4)))
print(type(packed).__name__, type(ops.pack_quantised_experts(up, down)).__name__)
"""
)


@pytest.mark.parametrize(
    ("stub", "form"), [("", "ListedExperts ListedFp8Experts"), ("wrong", "JoinedExperts NoneType")]
)
@pytest.mark.parametrize("lazy", ["1", "0"])
def test_the_real_branch_checks_the_stubs_operation(stub: str, form: str, lazy: str, over_stub: Run) -> None:
    done = over_stub(CHECK, "GAUDI2", HABANA_STUB_EXPERTS=stub, PT_HPU_LAZY_MODE=lazy)
    assert done.returncode == 0 and done.stdout.strip() == form, done.stderr
