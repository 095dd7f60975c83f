"""Layer norms and activations: the CPU's, the same bits in any company, and the emulated card's, lazy and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trencadis.backends.conformance import op_checks_layers
from trencadis.backends.conformance.backend_under_test import make_target
from trencadis.backends.conformance.op_checks_layers import ACTIVATIONS
from trencadis.backends.cpu.batch_invariant import InvariantOps
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ops", [CpuOps(), InvariantOps()], ids=["fast", "invariant"])
def test_the_cpus_are_the_references(ops: CpuOps, dtype: torch.dtype) -> None:
    slow, tolerance = ReferenceOps(), 1e-5 if dtype == torch.float32 else 2e-2
    weight, bias = normal(40, seed=1, dtype=dtype), normal(40, seed=2, dtype=dtype)
    for n in (1, 3, 33):
        x, residual = normal(n, 40, seed=n, dtype=dtype) + 2, normal(n, 40, seed=n + 1, dtype=dtype)
        for other in (None, residual):
            want = slow.layer_norm(x, weight, bias, 1e-3, other)
            for a, b in zip(ops.layer_norm(x.clone(), weight, bias, 1e-3, other), want, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        for kind in ACTIVATIONS:
            torch.testing.assert_close(ops.act(x.clone(), kind), slow.act(x, kind), rtol=tolerance, atol=tolerance)
            got = ops.act_mul(x.clone(), kind)
            torch.testing.assert_close(got, slow.act_mul(x, kind), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_token_has_the_same_bits_in_any_company(kind: str) -> None:
    ops, x = InvariantOps(), normal(700, 200)
    weight, bias = normal(200, seed=1), normal(200, seed=2)
    for make in (lambda t: ops.act(t, kind), lambda t: ops.act_mul(t, kind)):
        whole = make(x.clone())
        for begin, end in ((0, 1), (5, 6), (3, 90), (300, 700)):
            assert torch.equal(make(x[begin:end].clone()), whole[begin:end])
    whole = ops.layer_norm(x.clone(), weight, bias, 1e-5)[0]
    assert torch.equal(ops.layer_norm(x[5:6].clone(), weight, bias, 1e-5)[0], whole[5:6])


@pytest.mark.parametrize("lazy", ["1", "0"])
def test_the_emulated_cards_pass_the_checks(monkeypatch: Any, vl_checkpoint: Any, lazy: str) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    of = make_target("hpu", vl_checkpoint, quick=True)
    for check in (op_checks_layers.layer_norm, op_checks_layers.act, op_checks_layers.act_mul):
        assert check(of).startswith("error at most")


def test_an_unknown_activation_is_a_mistake_of_the_family() -> None:
    with pytest.raises(ValueError, match="no activation is called geglu"):
        ReferenceOps().act(normal(2, 4), "geglu")
