"""Typical mistakes: each is refused by name, or shows as wrong values. All stand in docs/hpu-internals.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_copies import QueueEvent
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_errors import Refused
from trencadis.backends.hpu.emulator.emulated_hpu_graphs import wrap
from trencadis.backends.hpu.emulator.fused_kernels import Kernels

ROOT = Path(__file__).resolve().parents[3]


def put(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def wrapped(card: EmulatedDevice, body: Callable[..., Any]) -> Any:
    """``body`` as a module in ``wrap_in_hpu_graph``."""

    class Body(nn.Module):
        def forward(self, *inputs: Any) -> Any:
            return body(*inputs)

    return wrap(card, Body())


def host(t: Tensor) -> list[float]:
    return t.cpu().tolist()


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "item": (lambda x, i: x[0].item(), "reads a device value"),
    "tolist": (lambda x, i: x.tolist(), "reads a device value"),
    "numpy": (lambda x, i: x.numpy(), "reads a device value"),
    "asarray": (lambda x, i: np.asarray(x), "reads a device value"),
    "data_ptr": (lambda x, i: x.data_ptr(), "reads a device value"),
    "if": (lambda x, i: 1 if x.sum() > 0 else 0, "reads a device value"),
    "equal": (lambda x, i: torch.equal(x, x), "reads a device value"),
    "range-of-tensor": (lambda x, i: list(range(i.sum())), "reads a device value"),
    "boolean-mask": (lambda x, i: x[x > 0], "boolean mask"),
    "boolean-assignment": (lambda x, i: x.clone().index_put_((x > 0,), x[0]), "boolean mask"),
    "nonzero": (lambda x, i: x.nonzero(), "depends on values"),
    "masked-select": (lambda x, i: x.masked_select(x > 0), "depends on values"),
    "unique": (lambda x, i: torch.unique(x), "depends on values"),
    "repeat-by-tensor": (lambda x, i: torch.repeat_interleave(x, i), "depends on values"),
    "host-tensor": (lambda x, i: x + torch.ones(4), "mixes a host tensor"),
    "host-index": (lambda x, i: x[torch.tensor([0, 1])], "mixes a host tensor"),
    "arange-on-the-host": (lambda x, i: x * torch.arange(4), "mixes a host tensor"),
    "copy-in-a-body": (lambda x, i: x + torch.ones(4).to(x.device), "host values inside a body"),
    "fetch-in-a-body": (lambda x, i: x.cpu(), "to the host inside a launch"),
    "minus-one-gather": (lambda x, i: x.index_select(0, i - 1), "-1 included"),
    "minus-one-store": (lambda x, i: x.clone().index_put_((i - 1,), x), "-1 included"),
    "minus-one-index": (lambda x, i: x[i - 1], "-1 included"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, card: EmulatedDevice) -> None:
    body, why = REFUSED[name]
    x, index = put(1, 2, 3, 4), put(0, 1, 2, 3, dtype=torch.int64)
    with pytest.raises(Refused, match=why) as raised, card.launch():
        body(x, index)
    assert ";" in str(raised.value), "a refusal names the remedy"


def test_list_built_in_a_body(card: EmulatedDevice) -> None:
    """list-in-a-body: torch itself cannot make a tensor of another device there."""
    x = put(1, 2)
    with pytest.raises(RuntimeError), card.launch():
        torch.tensor([1.0, 2.0], device=x.device)


@pytest.mark.parametrize("name", ["view-update", "slice-assignment"])
def test_views_updated_in_a_capture(name: str, card: EmulatedDevice) -> None:
    kv = torch.zeros(4, 2).to(DEVICE)

    def body(x: Tensor) -> Tensor:
        if name == "view-update":
            kv.view(-1).index_copy_(0, x.long(), x)
        else:
            kv[:, 0] = x
        return x

    with pytest.raises(Refused, match="updates a view"):
        wrapped(card, body).forward(put(0, 1, 2, 3))


def test_too_many_ops_between_cuts(card: EmulatedDevice) -> None:
    """no-cut"""

    def body(x: Tensor) -> Tensor:
        for _ in range(card.profile.max_ops + 1):
            x = x + 1
        return x

    with pytest.raises(Refused, match="without a graph cut"):
        wrapped(card, body).forward(put(1))


def test_value_of_a_compile_only_launch(card: EmulatedDevice) -> None:
    """compile-only-value"""
    graph = wrapped(card, lambda x: x + 1)
    with card.compiling():
        out = graph.forward(put(1), bypass_hpu_graphs=True)
    with pytest.raises(Refused, match="no values"):
        host(out)


def test_intermediate_of_another_capture(card: EmulatedDevice) -> None:
    """leaked-intermediate: what a capture made inside has no place outside it."""
    kept: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        kept.append(x + 1)
        return kept[0] * 2

    wrapped(card, body).forward(put(1))
    with pytest.raises(Refused, match="no values"):
        wrapped(card, lambda x: x + kept[0]).forward(put(1))


def test_zeroing_in_a_capture(card: EmulatedDevice) -> None:
    """A buffer that was never written is still cleared at every replay."""
    buffer = torch.zeros(2, device=DEVICE)
    graph = wrapped(card, lambda x: buffer.zero_().index_copy_(0, x, torch.ones(1, device=DEVICE)) + 0)
    graph.forward(put(0, dtype=torch.int64))
    assert host(graph.forward(put(1, dtype=torch.int64))) == [0, 1]


@pytest.mark.parametrize("name", ["valid-length-with-mask", "causal-with-mask", "flat-rms-norm"])
def test_kernel_contracts(name: str, card: EmulatedDevice) -> None:
    kernels = Kernels(card)
    q = torch.ones(1, 1, 2, 4).to(DEVICE)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool).to(DEVICE)
    with pytest.raises((AssertionError, RuntimeError)), card.launch():
        if name == "valid-length-with-mask":
            kernels.sdpa(q, q, q, mask, 0.0, False, None, "fast", True, put(2), "right")
        elif name == "causal-with-mask":
            kernels.sdpa(q, q, q, mask, 0.0, True)
        else:
            kernels.rms(q[0, 0], put(1, 1, 1, 1), 1e-6)


def test_python_number_in_a_capture(card: EmulatedDevice) -> None:
    """stale-length: a Python number is today's at every replay."""
    length = [2]
    graph = wrapped(card, lambda x: x * length[0])
    assert host(graph.forward(put(1, 2))) == [2, 4]
    length[0] = 3
    assert host(graph.forward(put(1, 2))) == [2, 4], "the graph still multiplies by 2"


def test_python_branch_in_a_capture(card: EmulatedDevice) -> None:
    """stale-branch"""
    prompt = [True]
    graph = wrapped(card, lambda x: x + 1 if prompt[0] else x - 1)
    assert host(graph.forward(put(5))) == [6]
    prompt[0] = False
    assert host(graph.forward(put(5))) == [6]


def test_python_counter_in_a_capture(card: EmulatedDevice) -> None:
    """python-state: the body runs once, its side effects happen once."""
    calls: list[int] = []

    def body(x: Tensor) -> Tensor:
        calls.append(1)
        return x

    graph = wrapped(card, body)
    for _ in range(4):
        graph.forward(put(1))
    assert len(calls) == 1


def test_weight_replaced_after_a_capture(card: EmulatedDevice) -> None:
    """replaced-weight: a graph holds the tensor, not the attribute."""
    weights = [put(2, 2)]
    graph = wrapped(card, lambda x: x * weights[0])
    graph.forward(put(1, 1))
    weights[0] = put(9, 9)
    assert host(graph.forward(put(1, 1))) == [2, 2]


def test_input_that_is_not_an_argument(card: EmulatedDevice) -> None:
    """forgotten-input: a tensor that changes by being replaced must be an argument."""
    hidden = {"x": put(1)}
    graph = wrapped(card, lambda x: x + hidden["x"])
    assert host(graph.forward(put(1))) == [2]
    hidden["x"] = put(100)
    assert host(graph.forward(put(1))) == [2]


def test_input_inside_an_object(card: EmulatedDevice) -> None:
    """opaque-input: objects other than dict, list, tuple and tensor are hashed, their tensors never copied."""

    class Meta:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __hash__(self) -> int:
            return 1

    graph = wrapped(card, lambda meta, y: meta.x + y)
    assert host(graph.forward(Meta(put(1)), put(1))) == [2]
    assert host(graph.forward(Meta(put(50)), put(1))) == [2]


def test_host_buffer_refilled_too_early(card: EmulatedDevice) -> None:
    """early-refill: a copy that does not block reads its source later."""
    graph, x, buffer = wrapped(card, lambda x: x + 0), put(0), torch.tensor([1.0])
    graph.forward(x)
    x.copy_(buffer, non_blocking=True)
    out = graph.forward(x)
    buffer.fill_(7)
    assert host(out) == [7]


def test_output_read_after_the_next_replay(card: EmulatedDevice) -> None:
    """late-read: every replay writes the same output tensors."""
    graph, x = wrapped(card, lambda x: x * 2), put(0)
    graph.forward(x)
    x.copy_(torch.tensor([1.0]))
    first = graph.forward(x)
    x.copy_(torch.tensor([5.0]))
    second = graph.forward(x)
    assert first is second and host(first) == [10]


@pytest.mark.parametrize("how", ["copy_", "to"])
def test_result_read_before_it_landed(how: str, card: EmulatedDevice) -> None:
    """no-wait, event-alone: a thread of the host finishes a copy into ordinary memory, of which no event tells."""
    graph, event = wrapped(card, lambda x: x * 2), QueueEvent(card.queue)
    graph.forward(put(0))
    out = graph.forward(put(4))
    target = torch.zeros(1).copy_(out, non_blocking=True) if how == "copy_" else out.to("cpu", non_blocking=True)
    event.record()
    assert np.isnan(target.tolist()[0]) and not event.query()
    event.synchronize()
    assert np.isnan(target.tolist()[0]) and event.query()
    card.queue.wait()
    assert np.isnan(target.tolist()[0]), "nor does waiting for the device help"
    assert host(out) == [8] and target.tolist() == [8], "a copy that blocks comes after it"


def test_host_buffer_of_a_new_tensor_refilled_too_early(card: EmulatedDevice) -> None:
    """early-refill, by ``to``"""
    buffer = torch.tensor([1.0])
    made = buffer.to(DEVICE, non_blocking=True)
    buffer.fill_(7)
    assert host(made) == [7]


def test_all_masked_softmax_row(card: EmulatedDevice) -> None:
    """all-masked-row: -inf everywhere is NaN, a finite minimum is not."""
    scores = torch.zeros(1, 3).to(DEVICE)
    with card.launch():
        hidden = torch.ones(1, 3, dtype=torch.bool, device=DEVICE)
        bad = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        good = scores.masked_fill(hidden, torch.finfo(torch.float32).min).softmax(-1)
    assert np.isnan(host(bad)[0]).all() and np.isfinite(host(good)[0]).all()


def test_masked_value_that_is_not_finite(card: EmulatedDevice) -> None:
    """poisoned-padding: a weight of zero does not hide a NaN."""
    weights, values = put(1, 0), put(3, float("nan"))
    with card.launch():
        out = (weights * values).sum()
    assert np.isnan(host(out))


def test_shape_of_the_request(card: EmulatedDevice) -> None:
    """request-shape: every new shape is compiled, and the metric says so."""
    graph = wrapped(card, lambda x: x + 1)
    with card.clock.metric("graph_compilation") as metric:
        for size in (3, 3, 4, 5, 4):
            graph.forward(torch.zeros(size).to(DEVICE), bypass_hpu_graphs=True)
    assert metric.stats()[0][1] == 3


def test_constant_of_the_request(card: EmulatedDevice) -> None:
    """request-constant: a Python number is part of the recipe, so each value is compiled."""
    with card.clock.metric("graph_compilation") as metric:
        for length in (1, 2, 2, 3):
            wrapped(card, lambda x, n=length: x + n).forward(put(1), bypass_hpu_graphs=True)
    assert metric.stats()[0][1] == 3


def test_every_mistake_is_documented() -> None:
    text = (ROOT / "docs/hpu-internals.md").read_text(encoding="utf-8")
    kernels = "float32-in-mode-fp32 causal-statistics huge-mask blind-query"
    others = f"""
        {kernels}
        list-in-a-body leaked-intermediate view-update slice-assignment no-cut compile-only-value
        valid-length-with-mask causal-with-mask flat-rms-norm stale-length stale-branch python-state
        replaced-weight forgotten-input opaque-input early-refill late-read no-wait event-alone all-masked-row
        poisoned-padding request-shape request-constant wide-number overtaken-fetch array-by-array staged
        new-version narrow-cast flat-mask unknown-metric whole-number-sum
    """
    names = [*REFUSED, *others.split()]
    assert len(names) >= 30
    assert not [n for n in names if f"`{n}`" not in text]
