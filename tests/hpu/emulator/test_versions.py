"""A write to a view between launches, in lazy mode: the card makes another version of the whole tensor of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_errors import Refused

pytestmark = pytest.mark.part("gaudi")

ROW = torch.ones(1, 2)

WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "upload": lambda bridge, kv: kv[1:2].copy_(ROW),
    "copy on the card": lambda bridge, kv: kv[1:2].copy_(kv[2:3]),
    "addition": lambda bridge, kv: kv[1:2].add_(1),
    "assignment": lambda bridge, kv: kv.__setitem__(1, kv[2]),
    "another shape": lambda bridge, kv: kv.view(-1).zero_(),
    "receive": lambda bridge, kv: bridge.receive(kv[1:2], 0),
    "all_reduce": lambda bridge, kv: bridge.all_reduce(kv[1:2]),
}


class Reader(nn.Module):
    """A launch that reads ``kv``, which is no input of it."""

    def __init__(self, kv: Tensor) -> None:
        super().__init__()
        self.kv = kv

    def forward(self, x: Tensor) -> Tensor:
        return self.kv + x


@pytest.mark.parametrize("name", WRITES)
def test_a_graph_would_go_on_reading_the_old_version(name: str, card: EmulatedDevice) -> None:
    """new-version: refused where a graph has captured the tensor, whatever writes."""
    bridge = make_bridge(card)
    kv, x = torch.zeros(4, 2).to(DEVICE), torch.zeros(4, 2).to(DEVICE)
    graph: Any = bridge.wrap_in_hpu_graph(Reader(kv))
    graph.forward(x)
    with pytest.raises(Refused, match="another version of its tensor"):
        WRITES[name](bridge, kv)
    kv.index_copy_(0, torch.tensor([1]).to(DEVICE), ROW.to(DEVICE))
    kv.copy_(kv + 1)
    assert graph.forward(x).cpu()[:, 0].tolist() == [1, 2, 1, 1], "whole tensors stay where they are"


@pytest.mark.parametrize("name", ["upload", "copy on the card", "addition", "assignment", "another shape"])
def test_before_a_capture_and_in_compile_mode_it_is_no_mistake(name: str, card: EmulatedDevice) -> None:
    bridge = make_bridge(card)
    kv, x = torch.zeros(4, 2).to(DEVICE), torch.zeros(4, 2).to(DEVICE)
    WRITES[name](bridge, kv)
    graph: Any = bridge.wrap_in_hpu_graph(Reader(kv))
    graph.forward(x, bypass_hpu_graphs=True)
    WRITES[name](bridge, kv)
    eager = make_bridge(card, lazy=False)
    with eager.metric_localcontext("graph_compilation") as metric:
        WRITES[name](eager, kv)
        assert eager.compilations(metric) == 0, "a view is the same memory there"


def test_it_is_a_recipe_that_writes_the_whole_tensor(card: EmulatedDevice) -> None:
    """In lazy mode; one for each place in the tensor, and the bytes of all of it."""
    bridge = make_bridge(card)
    kv = torch.zeros(4, 2).to(DEVICE)
    with bridge.metric_localcontext("graph_compilation") as metric:
        for start in (0, 1, 1, 2):
            kv[start : start + 1].copy_(ROW)
        assert bridge.compilations(metric) == 3
    assert card.clock.written_anew == 4 * kv.nbytes
