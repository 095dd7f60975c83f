"""Operations that a card does not run: counted and slow, refused in a capture, each with the line of code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trencadis.backends.hpu.emulator.card_profiles_and_op_support import RELEASE, OpTable, profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_errors import Refused
from trencadis.backends.hpu.emulator.emulated_hpu_graphs import wrap

aten = torch.ops.aten
HERE = Path(__file__).name

pytestmark = pytest.mark.part("gaudi")


class Unlisted(torch.nn.Module):
    """Uses an operation that no list has."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x) * 2


class WrongType(torch.nn.Module):
    """An operation on a type that the list does not have for it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0.5).sum(-1, dtype=torch.float32)[:, None] + x


@pytest.mark.parametrize(("kind", "name"), [(Unlisted, "bessel_j0"), (WrongType, "sum")])
def test_an_operation_on_the_host_is_counted_and_slow(kind: Any, name: str, card: EmulatedDevice) -> None:
    x = torch.rand(50, 4).to(DEVICE)
    bridge = make_bridge(card)
    with bridge.metric_localcontext("cpu_fallback") as metric:
        out = wrap(card, kind()).forward(x, bypass_hpu_graphs=True)
    assert bridge.compilations(metric) == 1
    (said,) = card.clock.lines
    assert name in said and RELEASE in said and HERE in said
    assert card.clock.seconds > 50 * 16 / card.profile.host_copy
    torch.testing.assert_close(out.cpu(), kind()(x.cpu()))


@pytest.mark.parametrize("kind", [Unlisted, WrongType])
def test_in_a_capture_it_is_refused_with_the_line_of_code(kind: Any, card: EmulatedDevice) -> None:
    x = torch.rand(50, 4).to(DEVICE)
    with pytest.raises(Refused, match=rf"host's CPU .* inside a capture, at .*{HERE}:\d+"):
        wrap(card, kind()).forward(x)
    assert card.scope is None


def eager_index(x: Tensor, rows: Tensor) -> Tensor:
    return (x * 2)[rows] + 1


def eager_unlisted(x: Tensor, rows: Tensor) -> Tensor:
    return torch.special.bessel_j0(x * 2) + rows


@pytest.mark.parametrize(("run", "op"), [(eager_index, "aten.index.Tensor"), (eager_unlisted, "bessel_j0")])
def test_compiled_it_splits_the_graph_and_is_counted_at_each_launch(run: Any, op: str) -> None:
    device = EmulatedDevice(profile(""))
    bridge = make_bridge(device, lazy=False)
    x, rows = torch.rand(3, 4), torch.tensor([2, 0, 1])
    args = (x, rows) if run is eager_index else (x, torch.ones(3, 4))
    compiled = bridge.compile(run)
    for launches in (1, 2):
        got = compiled(*(t.to(DEVICE) for t in args))
        assert sum(device.clock.lines[s] for s in device.clock.lines if s.startswith("eager_fallback")) == launches
    said = next(iter(device.clock.lines))
    assert op in said and HERE in said and run.__name__ in said
    assert len(device.graphs[0].recipes) == 2, "what comes before and after"
    assert device.clock.compiles == 3, "and the operation by itself"
    assert any(s.startswith("cpu_fallback") for s in device.clock.lines) == (run is eager_unlisted)
    torch.testing.assert_close(got.cpu(), run(*args))


def test_addcmul_is_split_before_the_list_is_asked() -> None:
    device = EmulatedDevice(profile(""))
    bridge = make_bridge(device, lazy=False)
    args = [torch.rand(4).to(DEVICE) for _ in range(3)]
    bridge.compile(torch.addcmul)(*args)
    assert not device.clock.lines and len(device.graphs[0].recipes) == 1


def test_what_the_table_says() -> None:
    table = OpTable("gaudi2")
    assert not table.fallback(aten.index.Tensor, [torch.float32, torch.int64]), "an eager operation has a kernel"
    assert "fall-back list" in table.eager(aten.index.Tensor, [torch.float32], [None])
    assert "fall-back list" in table.eager(aten.addcmul.default, [torch.float32], [])
    assert "int64" in table.eager(aten.permute.default, [torch.int64], [None, [1, 0]])
    assert "None" in table.eager(aten.index_put.default, [torch.float32], [None, [None, 1], None])
    assert not table.eager(aten.index_put.default, [torch.float32], [None, [1, 1], None])
    assert "float16" in table.eager(aten.mm.default, [torch.float64, torch.float16], [None, None]) or table.eager(
        aten.mm.default, [torch.float64], [None, None]
    )
    assert table.eager(aten.embedding.default, [torch.bool], [None, None])
    assert not OpTable("gaudi3").fallback(aten.constant_pad_nd.default, [torch.int64]), "int64 is int32 in lazy mode"
    assert "int64" in OpTable("gaudi3").fallback(aten.constant_pad_nd.default, [torch.int64], int64=True)
    with pytest.raises(FileNotFoundError):
        OpTable("gaudi2", "9.9")
