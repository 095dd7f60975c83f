"""Rows between pipeline stages on an emulated Gaudi: whole tensors alone cross, and nothing is compiled for them."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.hccl_comm import HpuPipe
from trencadis.backends.hpu.launches.input_and_output_copies import Staging
from trencadis.core.device.backend import BackendConfig

pytestmark = pytest.mark.part("gaudi")

ROWS, WIDTH = 300, 3


class Reader(nn.Module):
    """A stage's launch: reads rows of a tensor that is no input of it."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        return self.stream * x


class Link:
    """Two stages of one process: what one sends, the other receives."""

    def __init__(self, card: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, lazy: bool = True) -> None:
        self.sent: deque[Tensor] = deque()
        monkeypatch.setattr(torch.distributed, "new_group", lambda **kwargs: None)
        monkeypatch.setattr("trencadis.backends.hpu.emulator.emulated_bridge.send", self.send)
        monkeypatch.setattr("trencadis.backends.hpu.emulator.emulated_bridge.receive", self.receive)
        self.bridge = make_bridge(card, lazy)
        cfg = BackendConfig(stages=2)
        self.before, self.after = (
            HpuPipe(self.bridge, dataclasses.replace(cfg, stage=n), Staging(self.bridge)) for n in range(2)
        )
        self.hidden = torch.zeros(1 + ROWS, WIDTH).to(DEVICE)
        self.stream = torch.zeros(1 + ROWS, WIDTH).to(DEVICE)

    def send(self, x: Tensor, to: int) -> Tensor:
        self.sent.append(x.clone())
        return x

    def receive(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self.sent.popleft())


@pytest.mark.parametrize("lazy", [True, False])
def test_rows_arrive_where_a_graph_reads_them(
    lazy: bool, card: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(card, monkeypatch, lazy)
    link.before.bind(None, link.hidden)
    link.after.bind(link.stream, None)
    one = torch.ones(1).to(DEVICE)
    graph: Any = link.bridge.wrap_in_hpu_graph(Reader(link.stream))
    graph.forward(one)
    want = torch.zeros(1 + ROWS, WIDTH)
    with link.bridge.metric_localcontext("graph_compilation") as metric:
        for count in (1, 5, 64, 100, 300, 2):
            rows = torch.randn(1 + ROWS, WIDTH)
            link.hidden.copy_(rows)
            link.before.send(link.hidden, count)
            link.after.receive(link.stream, count)
            want[1 : 1 + count] = rows[1 : 1 + count]
            assert not link.sent
            assert torch.equal(graph.forward(one).cpu(), want), count
        assert link.bridge.compilations(metric) == 0, "every size is compiled when the tensors are bound"


def test_views_that_cross_compile(card: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why rows go through buffers in lazy mode: each number of rows would be a recipe on either side."""
    link = Link(card, monkeypatch)
    with link.bridge.metric_localcontext("graph_compilation") as metric:
        for count in (1, 5, 5):
            link.before.send(link.hidden, count)
            link.after.receive(link.stream, count)
        assert link.bridge.compilations(metric) == 4
