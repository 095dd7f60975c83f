"""What a card refuses or charges and the emulator once allowed: types, duplicates, offsets, views, failed compilers."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from trencadis.backends.hpu import pick_dtype
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_errors import Refused
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.launches.region_compiler import part
from trencadis.backends.hpu.shape_policy import policy
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import BackendConfig, HeadTensorsOut, TextTensors
from trencadis.core.errors import StartupError

pytestmark = pytest.mark.part("gaudi")


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint16, torch.complex64])
def test_a_type_that_the_card_has_not_is_refused(card: EmulatedDevice, dtype: torch.dtype) -> None:
    with pytest.raises(Refused, match="which the card has not"):
        torch.zeros(3, dtype=dtype).to(DEVICE)
    with pytest.raises(Refused, match="which the card has not"), card.launch():
        torch.ones(3, device=DEVICE).to(dtype)


def test_float16_is_a_type_of_the_card(card: EmulatedDevice) -> None:
    """The release's list names it for operations of both cards; one whose types leave it out goes to the host."""
    x = torch.ones(3, 4).half().to(DEVICE)
    with card.launch():
        total = x.sum(-1)
    assert total.dtype is torch.float16 and total.cpu().tolist() == [4, 4, 4] and not card.clock.lines
    with card.launch():
        x.roll(1, 0)
    assert any("cpu_fallback" in line and "float16" in line for line in card.clock.lines)


def test_float16_is_served_as_bfloat16_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    for asked in ("float16", "half"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "trencadis.engine"):
            assert pick_dtype(asked, "float16") is torch.bfloat16
        (record,) = caplog.records
        assert f"--dtype {asked}: bfloat16 is used instead" in record.getMessage()
    assert pick_dtype("auto", "float16") is torch.bfloat16 and len(caplog.records) == 1
    with pytest.raises(StartupError, match="--dtype float8 is not supported on hpu"):
        pick_dtype("float8", "float16")


def test_of_duplicates_no_row_wins(card: EmulatedDevice) -> None:
    """A card may store any of them, or parts of several."""
    rows, source = torch.tensor([1, 2, 1]), torch.arange(6.0).reshape(3, 2)
    codes = torch.zeros(4, 2).to(torch.float8_e4m3fn).to(DEVICE)
    codes.index_copy_(0, rows.to(DEVICE), source.to(torch.float8_e4m3fn).to(DEVICE))
    kept = codes.cpu().float()
    assert kept[1].isnan().all() and kept[2].tolist() == [2, 3]
    target = torch.zeros(4, 2).to(DEVICE)
    target.index_copy_(0, rows.to(DEVICE), source.to(DEVICE))
    found = target.cpu()
    assert found[1].isnan().all() and found[2].tolist() == [2, 3] and not found[3].any()
    counts = torch.zeros(4, dtype=torch.int32).to(DEVICE)
    counts.index_copy_(0, rows.to(DEVICE), torch.tensor([7, 8, 9], dtype=torch.int32).to(DEVICE))
    assert counts.cpu().tolist()[1] not in (7, 9) and counts.cpu().tolist()[2] == 8


def test_there_is_no_product_into_float32_in_any_mode() -> None:
    """Lazy mode ends with a release that lacks it, and Dynamo refuses a tensor of another type as an output."""
    for lazy in (True, False):
        assert make_bridge(EmulatedDevice(profile("gaudi3")), lazy).product is None


def add(x: Tensor) -> Tensor:
    return x + 1


def cut_first(x: Tensor) -> Tensor:
    return (x * 2)[1:]


def test_each_combination_of_offsets_is_an_executable_of_its_own() -> None:
    card = EmulatedDevice(profile(""))
    compiled = make_bridge(card, lazy=False).compile(add)
    base = torch.arange(12.0).to(DEVICE)
    for offset, flavours in ((0, 1), (4, 2), (8, 3), (4, 3)):
        out = compiled(base[offset : offset + 4])
        assert out.cpu().tolist() == [offset + i + 1.0 for i in range(4)]
        assert card.clock.flavours == flavours


@pytest.mark.parametrize("lazy", [True, False])
def test_what_runs_between_launches_is_counted_and_takes_a_launch(lazy: bool) -> None:
    """A copy on the card, new memory that is filled, a fetch of a view: each is launched by itself."""
    card = EmulatedDevice(profile(""))
    make_bridge(card, lazy)
    source = torch.arange(8.0).to(DEVICE)
    for run, count, recipes in (
        (lambda: torch.zeros(8, device=DEVICE), 1, 0), (lambda: torch.zeros(8, device=DEVICE).copy_(source), 2, lazy),
        (lambda: source + 1, 1, lazy), (lambda: source.cpu(), 0, 0), (lambda: source[2:].cpu(), int(lazy), lazy),
    ):  # fmt: skip
        before, compiles, launched = card.clock.between, card.clock.compiles, card.clock.launched
        run()
        assert (card.clock.between - before, card.clock.compiles - compiles) == (count, int(recipes))
        assert card.clock.launched - launched == pytest.approx(count * card.clock.rates.launch)


@pytest.mark.parametrize("values", [True, False])
def test_a_strided_input_costs_its_whole_storage(values: bool) -> None:
    card = EmulatedDevice(profile(""), values)
    compiled = make_bridge(card, lazy=False).compile(part)
    base = torch.arange(1 << 20, dtype=torch.float32).view(1 << 10, 1 << 10).to(DEVICE)
    before = card.clock.seconds
    compiled(add, base[:, :2])
    assert card.clock.seconds - before >= 2 * (4 << 20) / card.profile.bandwidth
    assert any("strided_input" in line for line in card.clock.lines)


@pytest.mark.parametrize("values", [True, False])
def test_a_view_that_leaves_a_region_is_counted(values: bool) -> None:
    card = EmulatedDevice(profile(""), values)
    compiled = make_bridge(card, lazy=False).compile(part)
    for _ in range(2):  # without values the second one is not run again
        out = compiled(cut_first, torch.ones(3, 2).to(DEVICE))
        assert out.shape == (2, 2) and (not values or out.cpu().tolist() == [[2, 2], [2, 2]])
    assert any("eager_view" in line for line in card.clock.lines)
    assert sum(card.clock.lines.values()) == 2


def test_executables_are_counted_without_values_as_with_them() -> None:
    counts = []
    for computes in (True, False):
        card = EmulatedDevice(profile(""), computes)
        backend = HpuBackend(BackendConfig(), policy("", lazy=False), make_bridge(card, lazy=False), HpuSettings())
        for rows in (1, 3, 5, 6):
            x = torch.ones(rows, 8).to(DEVICE)
            backend.ops.by_rows(Kept().keep, (x, torch.arange(rows).to(DEVICE)), torch.zeros(9, 8).to(DEVICE))
        counts.append((card.clock.flavours, card.clock.compiles))
    assert counts[0] == counts[1] and counts[0][0] > counts[0][1] == 2, "two sizes of pieces, at many places"


class Widened:
    """Returns a wider tensor, its argument, and (``views``) a view."""

    def __init__(self, views: bool) -> None:
        self.views, self.runs = views, [0]

    def forward(self, x: Tensor, factor: float) -> tuple[Tensor, ...]:
        self.runs[0] += 1
        wide = torch.cat([x * factor, (x + 1) * 2]).float()
        return (wide, x, wide[1:]) if self.views else (wide, x)


@pytest.mark.parametrize("views", [False, True])
def test_a_region_without_values_runs_once_and_counts_each_time(views: bool) -> None:
    """On a card without values; with another number or shape it is another one."""
    card = EmulatedDevice(profile(""), computes=False)
    backend = HpuBackend(BackendConfig(), policy("", lazy=False), make_bridge(card, lazy=False), HpuSettings())
    part, found = Widened(views), []
    for rows, factor in ((6, 2.0), (6, 2.0), (6, 3.0), (4, 2.0), (6, 2.0)):
        x = torch.ones(rows, 8, dtype=torch.bfloat16).to(DEVICE)
        with card.launch() as scope:
            out = backend.ops.region(part.forward, x, factor)
            held = scope.live.now
        assert out[0].shape == (2 * rows, 8) and out[0].dtype == torch.float32 and out[1] is x
        found.append((scope.ops, scope.live.peak, scope.live.held, scope.live.kept, held))
        del out
        assert scope.live.now == 0
    assert found[0] == found[1] == found[2] == found[4] != found[3] and found[0][1] > found[0][4]
    assert part.runs[0] == (5 if views else 3) and card.clock.compiles == 3


def test_a_product_that_is_added_to_a_tensor_multiplies_as_one_that_is_not(card: EmulatedDevice) -> None:
    x, w, y, bias = (torch.ones(size).to(DEVICE) for size in ((5, 3), (3, 7), (5, 7), (7,)))
    for run in (lambda: x @ w, lambda: torch.addmm(y, x, w), lambda: torch.addmm(bias, x, w)):
        with card.launch() as scope:
            run()
        assert scope.products == 5 * 3 * 7


class Kept:
    """Stores rows in a tensor."""

    def keep(self, x: Tensor, rows: Tensor, held: Tensor) -> None:
        held.index_copy_(0, rows, x * 2)


def test_results_stay_until_the_card_has_run_the_launch() -> None:
    """The host runs ahead of the card, and waits for it where memory is short: nothing fails."""
    for free, waits in ((1 << 20, False), (40_000, True)):
        card = EmulatedDevice(dataclasses.replace(profile(""), total=1 << 20), computes=False)
        backend = HpuBackend(BackendConfig(), policy("", lazy=False), make_bridge(card, lazy=False), HpuSettings())
        x = torch.ones(1000).to(DEVICE)
        taken = torch.zeros((1 << 20) - free, dtype=torch.uint8, device=DEVICE) if waits else None
        with card.launch() as scope:
            for _ in range(12):
                x = backend.ops.region(add, x)
        assert scope.live.held == 12 * 4000 and scope.live.peak < 3 * 4000
        assert any("memory_wait" in line for line in card.clock.lines) is waits
        del taken


def test_collectives_split_a_layers_graph_with_and_without_values() -> None:
    class Summed:
        def __init__(self, bridge: Any) -> None:
            self.bridge = bridge

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.bridge.all_reduce(x * 2) + 1
            return out

    card = EmulatedDevice(profile(""), computes=False)
    bridge = make_bridge(card, lazy=False)
    backend = HpuBackend(BackendConfig(), policy("", lazy=False), bridge, HpuSettings())
    backend.ops.region(Summed(bridge).forward, torch.ones(2, 4).to(DEVICE))
    assert card.clock.compiles == 2, "what is before the sum with it, and what is behind it"
    assert "not on the list" in card.table.eager(torch.ops.trencadis_emulator.all_reduce.default, [], ())


def double(x: TextTensors) -> HeadTensorsOut:
    return HeadTensorsOut(x.tokens * 2, None, None, None, None)


@pytest.mark.parametrize("lazy", [True, False])
def test_a_compiler_that_fails_in_compile_only_mode_is_asked_again(
    hpu: Any, lazy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend = hpu(lazy=lazy, block_size=4, faults="fail@compile:1")
    program = backend.program(Bucket(Stage.DECODE, (2, 2)), double)
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        program.compile()
    assert "Graph compile failed" in caplog.records[0].getMessage() and program.state.name == "COMPILED"
    assert backend.fetch(program.run(), 2).result().token.tolist() == [0, 0]


def test_blocks_are_not_joined_inside_of_a_compiled_graph(hpu: Any) -> None:
    """No public list of compiled graphs has the operation: it would split each layer's graph."""
    card = EmulatedDevice(profile("gaudi3"))
    bridge = make_bridge(card, lazy=False)
    assert bridge.block_adjustment is not None
    high, total = torch.rand(2, 1, 2, 1, 1), torch.rand(2, 1, 2, 1, 1)
    rows = torch.zeros(2, dtype=torch.int32)
    compiled = bridge.compile(lambda h, t, r: bridge.block_adjustment(h * 1, t, r, 1, [2, 1, 2, 1, 1]) + 1)
    compiled(high.to(DEVICE), total.to(DEVICE), rows.to(DEVICE))
    assert any("block_softmax_adjustment" in line for line in card.clock.lines)
