"""What the emulated card refuses names the line of code that did it, also where a replay comes upon it later."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_errors import Refused
from trencadis.backends.hpu.emulator.emulated_hpu_graphs import wrap

pytestmark = pytest.mark.part("gaudi")

CACHE = torch.zeros(4, 2)


def wide_index(x: Tensor, kv: Tensor) -> Tensor:
    """Fits 32 bits until it is multiplied."""
    place = x.long() * 2**30  # here
    return kv.index_select(0, place // 2**30)


def host_read(x: Tensor, kv: Tensor) -> Tensor:
    return x * int(x.sum())  # here


def fetch(x: Tensor, kv: Tensor) -> Tensor:
    return x + len(x.cpu())  # here


def view_of_the_cache(x: Tensor, kv: Tensor) -> Tensor:
    kv.view(-1).index_copy_(0, x.long(), x.float())  # here
    return x


def outside_index(x: Tensor, kv: Tensor) -> Tensor:
    return kv.index_select(0, x)  # here


def line(body: Callable[..., Any]) -> str:
    """The line marked ``here``."""
    rows, first = inspect.getsourcelines(body)
    return f"emulator/test_error_lines.py:{first + next(i for i, row in enumerate(rows) if '# here' in row)}"


CASES: dict[str, tuple[Callable[..., Any], str, bool]] = {
    "an index above 2^31": (wide_index, "the whole number 3221225472, of which the card keeps 32 bits", True),
    "a host read": (host_read, "reads a device value on the host", False),
    "a fetch": (fetch, "copies to the host inside a launch", False),
    "a view of the cache that is written": (view_of_the_cache, "updates a view inside a capture", False),
    "an index outside its tensor": (outside_index, "outside its tensor", True),
}
"""A body, what is said, and whether a replay finds it rather than the capture."""


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_names_the_line(name: str, card: EmulatedDevice) -> None:
    body, says, late = CASES[name]
    kv = CACHE.to(DEVICE)
    x = torch.tensor([0, 1], dtype=torch.int32).to(DEVICE)

    class Body(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = body(x, kv)
            return out

    graph: Any = wrap(card, Body())
    if late:
        graph.forward(x)
        card.queue.wait()
        x.copy_(torch.tensor([0, 3] if body is wide_index else [0, 4], dtype=torch.int32))
    with pytest.raises(Refused) as raised:
        graph.forward(x)
        card.queue.wait()
    assert says in str(raised.value) and f"({line(body)})" in str(raised.value), str(raised.value)
    assert raised.value.line == line(body)


def test_a_host_value_that_needs_more_than_32_bits(card: EmulatedDevice) -> None:
    """On its way to the card, blocking or not; the largest that fits goes through."""
    assert torch.tensor([2**31 - 1, -(2**31)]).to(DEVICE).cpu().tolist() == [2**31 - 1, -(2**31)]
    target = torch.zeros(1, dtype=torch.int64).to(DEVICE)
    for send in (lambda t: t.to(DEVICE), lambda t: target.copy_(t, non_blocking=True)):
        with pytest.raises(Refused, match=r"whole number 2147483648.*\(emulator/test_error_lines.py:\d+\)"):
            send(torch.tensor([2**31]))
