"""Symbols that only some releases or cards have, over a stub with the published schemas: right calls, wrong calls."""

from __future__ import annotations

import pytest
import torch

from tests.hpu.conftest import Run
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice

OPEN = """
import os
import sys
from importlib import import_module
import torch
from trencadis.backends.hpu.start import bridge_loader
from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection as gaudi_detection
gaudi_detection.find_stack = lambda: gaudi_detection.Stack("1.23.1.25", "2.9.0+git1234", "2.9.0", True)
gaudi_detection.plugin_version = lambda: "1.23.1.25"
gaudi_detection.find_machine = lambda environ: gaudi_detection.Machine(1, 1)
bridge_loader.DEVICE = "cpu"
if os.environ.get("PT_HPU_LAZY_MODE") == "0":  # its entry point is that of an installed plug-in
    torch._dynamo.register_backend(
        lambda graph, inputs: import_module("habana_frameworks.torch.compiling").hpu_backend(graph, inputs),
        name="hpu_backend")
bridge = bridge_loader.open_bridge(0)
assert bridge.is_lazy() == (os.environ.get("PT_HPU_LAZY_MODE") != "0")
from trencadis.backends.hpu.emulator import fused_kernels
g = torch.Generator().manual_seed(1)
x = torch.randn(6, 32, generator=g)
assert bridge.fp8_top == (448.0 if sys.argv[1] == "GAUDI3" else 240.0)
"""

COMPILED = """
import dataclasses
KERNELS = ("cast_to_fp8_v2", "cast_from_fp8", "fp8_gemm_v2", "convert_from_uint4", "sdpa_parts", "fused_sdpa",
           "block_adjustment", "product")
if not bridge.is_lazy():
    plain = {name: kernel for name in KERNELS if (kernel := getattr(bridge, name)) is not None}
    bridge = dataclasses.replace(bridge, **{name: bridge.compile(kernel) for name, kernel in plain.items()})
"""
"""In compile mode: each kernel as one graph, so that Dynamo must know the form of its results."""

CALLS = (
    OPEN
    + COMPILED
    + """
scale = torch.rand(6, 1, generator=g) + 1
for dtype in (torch.float32, torch.bfloat16):
    for one in (None, scale):
        codes = bridge.cast_to_fp8_v2(x.to(dtype), one)
        assert torch.equal(codes.float(), fused_kernels.cast_to_fp8_v2(x.to(dtype), one, 448.0).float())
        found = bridge.cast_from_fp8(codes, dtype, one)
        assert found.dtype == dtype and torch.equal(found, fused_kernels.cast_from_fp8(codes, dtype, one, 448.0))
a = bridge.cast_to_fp8_v2(x)
b = bridge.cast_to_fp8_v2(torch.randn(5, 32, generator=g))
for bias in (None, torch.randn(5, generator=g)):
    args = a, b, torch.bfloat16, scale, torch.rand(5, generator=g), bias
    torch.testing.assert_close(bridge.fp8_gemm_v2(*args), fused_kernels.fp8_gemm_v2(*args, 448.0))
words = torch.randint(-2**31, 2**31 - 1, (6, 4), generator=g, dtype=torch.int32)
zeros = torch.randint(-2**31, 2**31 - 1, (2, 4), generator=g, dtype=torch.int32)
args = words, torch.rand(2, 32, generator=g).bfloat16(), zeros, torch.bfloat16
assert torch.equal(bridge.convert_from_uint4(*args), fused_kernels.convert_from_uint4(*args))
q, k, v = (torch.randn(2, h, 8, 4, generator=g) for h in (4, 2, 2))
seen = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
for mask, causal in ((seen, False), (None, True)):
    for found, want in zip(bridge.sdpa_parts(q, k, v, mask, causal, 0.5, "None"),
                           fused_kernels.sdpa_recomp_parts(q, k, v, mask, causal, 0.5, "None"), strict=True):
        torch.testing.assert_close(found, want)
from trencadis.backends.hpu.habana_bridge import fused_attention
out = fused_attention(bridge.fused_sdpa, q, k, v, seen, False, 0.5, "None")
torch.testing.assert_close(out, fused_kernels.sdpa_recomp_fwd(q, k, v, seen, False, 0.5, "none"))
if sys.argv[1] == "GAUDI3":
    high, total = (torch.rand(4, 2, 3, 1, 1, generator=g) for _ in range(2))
    args = high, total, torch.tensor([0, 1, 0, -1], dtype=torch.int32), 2, [4, 2, 3, 1, 1]
    torch.testing.assert_close(bridge.block_adjustment(*args), fused_kernels.block_softmax_adjustment(*args))
else:
    assert bridge.block_adjustment is None
print("fine")
"""
)

PRODUCTS = (
    OPEN
    + """
from trencadis.backends.hpu.ops import HpuOps
from trencadis.backends.hpu.hpu_quantised_linear import PackedWeight4
from trencadis.backends.hpu.hpu_quantised_linear import Floats8Weight
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme
ops = HpuOps(bridge, HpuSettings(), 16)
weight = torch.randn(40, 96, generator=g)
rows = torch.randn(3, 96, generator=g).bfloat16()
for scheme, kind, most in ((Scheme(4, group=32), PackedWeight4, 2e-2), (Scheme(8, "float"), Floats8Weight, 6e-2)):
    q = quantise(weight, scheme, torch.bfloat16)
    packed = ops.pack_quantised(q)
    assert isinstance(packed, kind), packed
    multiply = ops.linear if bridge.is_lazy() else bridge.compile(lambda rows, packed: ops.linear(rows, packed))
    want = rows.float() @ q.values().float().t()
    off = float((multiply(rows, packed).float() - want).abs().max() / want.abs().max())
    assert off < most, (scheme, off)
print("fine")
"""
)


CASES = [("1", CALLS, "GAUDI2"), ("1", CALLS, "GAUDI3"), ("1", PRODUCTS, "GAUDI2"), ("1", PRODUCTS, "GAUDI3"),
         ("0", CALLS, "GAUDI3"), ("0", PRODUCTS, "GAUDI2")]  # fmt: skip
"""Lazy mode or not, what is called, and the card; a process that compiles takes seconds."""


@pytest.mark.parametrize(("lazy", "code", "card"), CASES, ids=range(len(CASES)))
def test_the_plug_ins_operations_are_called_as_published(lazy: str, code: str, card: str, over_stub: Run) -> None:
    """In compile mode inside of compiled functions."""
    done = over_stub(code, card, HABANA_STUB_CARD=card, PT_HPU_LAZY_MODE=lazy)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


CHECKED = OPEN + "print([n for n in sys.argv[2:] if getattr(bridge, n) is None])"
FIELDS = {"sdpa_recomp_fwd": "sdpa_parts", "fp8_gemm_v2": "fp8_gemm_v2", "convert_from_uint4": "convert_from_uint4",
          "block_softmax_adjustment": "block_adjustment"}  # fmt: skip
"""Operations that a start compares, and the fields of the bridge."""


@pytest.mark.parametrize(
    ("name", "fault", "lazy"),
    [("", "", "1"), *((name, "", "1") for name in FIELDS), ("sdpa_recomp_fwd", ":error", "1"),
     ("fp8_gemm_v2", "", "0"), ("sdpa_recomp_fwd", ":error", "0")],
)  # fmt: skip
def test_an_operation_that_differs_at_opening_is_not_used(name: str, fault: str, lazy: str, over_stub: Run) -> None:
    """One warning each; a right one has none."""
    env = {"HABANA_STUB_CARD": "GAUDI3", "HABANA_STUB_WRONG": name + fault, "PT_HPU_LAZY_MODE": lazy}
    done = over_stub(CHECKED, "GAUDI3", *FIELDS.values(), **env)
    assert done.returncode == 0 and done.stdout == f"{[FIELDS[name]] if name else []}\n", done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("hpu:")]
    assert len(said) == bool(name) and all(name in line for line in said), said
    assert not fault or "fails (RuntimeError: synStatus=26" in said[0]


WRONG = {
    "cast of float16": 'bridge.cast_to_fp8_v2(put(torch.ones(2, 2).half()))',
    "cast of integers": 'bridge.cast_to_fp8_v2(put(torch.ones(2, 2, dtype=torch.int8)))',
    "values of float16": 'bridge.cast_from_fp8(put(torch.ones(2, 2).to(torch.float8_e4m3fn)), torch.float16)',
    "values of 16 bits": 'bridge.cast_from_fp8(put(torch.ones(2, 2).bfloat16()), torch.float32)',
    "a product into float16": 'bridge.fp8_gemm_v2(*two, torch.float16, one, one[0], None)',
    "scales of another product": 'bridge.fp8_gemm_v2(*two, torch.float32, put(torch.ones(3, 1)), one[0], None)',
    "codes of 64 bits": 'bridge.convert_from_uint4(put(torch.zeros(2, 1, dtype=torch.int64)), put(torch.ones(1, 8)), '
    'put(torch.zeros(1, 1, dtype=torch.int32)), torch.bfloat16)',
    "a mask of three dimensions": 'bridge.fused_sdpa(q, q, q, put(torch.ones(1, 8, 8, dtype=torch.bool)), 0.0, False, '
    'None, "None")',
    "mode fp32 of float32": 'bridge.fused_sdpa(q, q, q, None, 0.0, True, None, "fp32")',
    "a norm of two dimensions": 'bridge.fused_rms_norm(put(torch.ones(2, 4)), put(torch.ones(4)), 1e-6)',
    "a metric of no such name": 'bridge.metric_localcontext("eager_fallback").__enter__()',
}  # fmt: skip

GIVEN = """
codes = put(torch.ones(2, 4).to(torch.float8_e4m3fn))
two, one = (codes, codes), put(torch.ones(2, 1))
q = put(torch.ones(1, 2, 8, 4))
"""


@pytest.fixture(scope="module")
def said_by_stub(over_stub: Run) -> str:
    """What each wrong call ends in."""
    loop = "for name, call in eval(sys.argv[2]).items():\n    try:\n        eval(call)\n        print('passed', name)\n"
    loop += "    except Exception as error:\n        print('refused', name)\n"
    return over_stub(OPEN + "put = lambda t: t\n" + GIVEN + loop, "GAUDI2", repr(WRONG)).stdout


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused_by_the_stub_and_by_the_emulator(name: str, said_by_stub: str) -> None:
    assert f"refused {name}\n" in said_by_stub
    bridge = make_bridge(EmulatedDevice(profile("")))
    names = {"torch": torch, "bridge": bridge, "put": lambda t: t.to(bridge.device)}
    exec(GIVEN, names)
    with pytest.raises(Exception):  # noqa: B017 -- the plug-in's own errors have several types
        eval(WRONG[name], names)


def test_sums_of_integers_are_refused() -> None:
    """HCCL adds float32 and bfloat16; of other types the plug-in would keep what float32 keeps, or end."""
    bridge = make_bridge(EmulatedDevice(profile("")))
    for dtype in (torch.int32, torch.int64, torch.float16):
        with pytest.raises(RuntimeError, match="only float or bfloat16 reduction"):
            bridge.all_reduce(torch.ones(2, dtype=dtype).to(bridge.device))
