"""Copies while the card runs ahead by chance: every launch reads what it was filled with, every result is its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from trencadis.backends.hpu.emulator.emulated_copies import DeviceQueue, QueueEvent
from trencadis.backends.hpu.emulator.emulated_errors import Refused
from trencadis.backends.hpu.launches.hpu_host_arrays import LaunchForm, arrays, leaves, rebuild
from trencadis.backends.hpu.launches.input_and_output_copies import cast_inputs, make_packing, types_of
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import HeadTensors, HeadTensorsOut
from trencadis.core.launch_inputs import HeadInputs
from trencadis.core.request import MAX_LOGPROBS
from trencadis.core.step_output import HeadOutput
from trencadis.core.vision_config import SlotForm

pytestmark = pytest.mark.part("gaudi")

VOCAB = 40
SIZES = (2, 3, 8)
"""Rows of the programs."""

MOST = 6
"""Launches at a time."""


def body(x: HeadTensors) -> HeadTensorsOut:
    """Outputs that name their inputs, of both pieces and of each type."""
    token = (3 * x.hidden_row + x.slot + x.masks.to(torch.int32).sum(1).index_select(0, x.mask_row)).to(torch.int32)
    pairs = torch.stack([x.temperature, x.uniform], 1).repeat(1, MAX_LOGPROBS // 2)
    many = (token + x.top_k)[:, None].repeat(1, MAX_LOGPROBS)
    return HeadTensorsOut(token, x.temperature + x.target, x.top_k + 0, many, pairs)


def inputs(rng: np.random.Generator, rows: int, first: int) -> HeadInputs:
    """``first``: the row of the log that the launch's first row writes."""

    def some(high: int) -> Any:
        return rng.integers(0, high, rows).astype(np.int32)

    real = [rng.random(rows, dtype=np.float32) for _ in range(7)]
    masks = rng.integers(0, 256, (rows + 1, VOCAB // 8)).astype(np.uint8)
    rows_of = np.arange(first, first + rows, dtype=np.int32)
    return HeadInputs(
        rows_of, some(256), real[0], some(50), real[1], real[2], real[3], real[4], real[5], real[6], some(150_000),
        some(rows), masks,
    )  # fmt: skip


def expected(x: HeadInputs) -> HeadOutput:
    token = 3 * x.hidden_row + x.slot + x.masks.sum(1, dtype=np.int64)[x.mask_row]
    pairs = np.tile(np.stack([x.temperature, x.uniform], 1), MAX_LOGPROBS // 2)
    many = np.tile((token + x.top_k)[:, None], MAX_LOGPROBS)
    return HeadOutput(token, x.temperature + x.target.astype(np.float32), x.top_k, many, pairs)


def vars_of(out: HeadOutput) -> list[Any]:
    return [out.token, out.logprob, out.rank, out.top_id, out.top_logprob]


class Loop:
    """Launches of three programs in turn, some captured, on a card with dice; ``play`` does and checks a few.

    A launch leaves its tokens in a log on the card, as text launches leave hidden states; some results are fetched too.

    Args:
        fill: how inputs are sent in place of the program's own way.
        fetch: how a result is read in place of the backend's own way.
        variant: of the programs; "": a replay overwrites the results of the one before.
    """

    def __init__(self, hpu: Callable[..., Any], fill: Any = None, fetch: Any = None, variant: str = "full") -> None:
        self.backend = hpu(vocab_size=VOCAB)
        self.card = self.backend.card
        self.fill, self.fetch = fill or self.backend.fill, fetch or self.backend.fetch
        self.log = self.backend.zeros((8 + 8 * MOST, 1), torch.float32)

        def logged(x: HeadTensors) -> HeadTensorsOut:
            out = body(x)
            self.log.index_copy_(0, x.hidden_row, (out.token + x.temperature)[:, None])
            return out

        self.programs = [self.backend.program(Bucket(Stage.SAMPLE, (n,), variant), logged) for n in SIZES]
        for program in self.programs[1:]:
            program.compile()
            program.capture()

    def play(self, seed: int) -> None:
        rng, count = np.random.default_rng(seed), self.card.transfers.counts
        self.card.queue.dice = random.Random(seed)
        done, waiting = [], []
        for number in range(int(rng.integers(2, MOST + 1))):
            program = self.programs[int(rng.integers(len(SIZES)))]
            x = inputs(rng, int(rng.integers(1, program.bucket.dims[0] + 1)), 8 + 8 * number)
            before, staged = count.up, count.staged
            self.fill(program, x)
            out = program.replay()
            done.append(x)
            if rng.random() < 0.4:
                waiting.append((x, self.fetch(out, len(x.slot))))
            assert count.up - before <= 2, f"{count.up - before} copies to the card in one launch"
            assert count.staged == staged, f"{count.staged - staged} copies through the driver's staging memory"
        log = self.log.cpu()[:, 0].numpy()
        for x in done:
            want = expected(x).token + x.temperature
            np.testing.assert_allclose(log[x.hidden_row], want, rtol=1e-6, err_msg=f"seed {seed}")
        for x, pending in waiting:
            got_all, want_all = vars_of(pending.result()), vars_of(expected(x))
            for got, want in zip(got_all, want_all, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=f"seed {seed}")


def test_random_delays(hpu: Callable[..., Any]) -> None:
    loop = Loop(hpu)
    for seed in range(150):
        loop.play(seed)
    counts = loop.card.transfers.counts
    assert counts.up > 600 and counts.down > 600


@pytest.mark.long
def test_ten_thousand_random_delays(hpu: Callable[..., Any]) -> None:
    loop = Loop(hpu)
    for seed in range(10_000):
        loop.play(seed)
    counts = loop.card.transfers.counts
    print(f"{counts.up} uploads, {counts.down} fetches, {counts.staged} staged, all by the reads of the test itself")


def test_without_dice_everything_is_as_late_as_it_may_be(hpu: Callable[..., Any]) -> None:
    loop = Loop(hpu)
    for seed in range(20):
        loop.play(seed)
        loop.card.queue.dice = None


# Ways that were tried before, or suggest themselves


class ArrayByArray:
    """Every array from ordinary memory, without waiting."""

    def __call__(self, program: Any, x: Any) -> None:
        static = program.static
        filled = leaves(arrays(program.bucket, x, static.form))
        for target, source in zip(leaves(static.tensors), filled, strict=True):
            target.copy_(torch.from_numpy(source).to(target.dtype), non_blocking=True)


class OneArea:
    """Pinned memory that is written again at once."""

    def __init__(self) -> None:
        self.areas: dict[int, Any] = {}

    def __call__(self, program: Any, x: Any) -> None:
        static = program.static
        filled = static.list_arrays(x)
        for piece, target in enumerate(static.pieces):
            area = self.areas.setdefault(id(target), program.bridge.pin(torch.empty(target.shape, dtype=target.dtype)))
            static.packing.write(piece, filled, area.numpy())
            target.copy_(area, non_blocking=True)


class Later:
    """Fetches that do not block, read after an event: into pinned memory or into ordinary."""

    def __init__(self, out: HeadTensorsOut, rows: int, card: Any, pinned: bool) -> None:
        self.rows, self.event = rows, QueueEvent(card.queue)
        made = [torch.empty(t.shape, dtype=t.dtype) for t in out if t is not None]
        self.held = [card.transfers.pin(t) for t in made] if pinned else made
        for target, source in zip(self.held, (t for t in out if t is not None), strict=True):
            target.copy_(source, non_blocking=True)
        self.event.record()

    def result(self) -> HeadOutput:
        self.event.synchronize()
        return HeadOutput(*(t[: self.rows].numpy().copy() for t in self.held))


class Blocking:
    """A blocking copy into ordinary memory for each output."""

    def __init__(self, out: HeadTensorsOut, rows: int) -> None:
        self.found = HeadOutput(*(t.cpu()[:rows].numpy() for t in out if t is not None))

    def result(self) -> HeadOutput:
        return self.found


MISTAKES: dict[str, tuple[Any, str, str]] = {
    "array by array": (ArrayByArray(), "", "copies to the card|another version of its tensor"),
    "one area": (OneArea(), "", "Not equal"),
    "an event and ordinary memory": (None, "ordinary", "staging memory"),
    "an event and pinned memory": (None, "pinned", "Not equal"),
    "blocking into ordinary memory": (None, "blocking", "staging memory"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_caught(name: str, hpu: Callable[..., Any]) -> None:
    fill, kind, says = MISTAKES[name]
    loop = Loop(hpu, fill, variant="" if kind == "pinned" else "full")
    if kind == "blocking":
        loop.fetch = Blocking
    elif kind:
        loop.fetch = lambda out, rows: Later(out, rows, loop.card, kind == "pinned")
    with pytest.raises((AssertionError, Refused), match=says):
        for seed in range(60):
            loop.play(seed)


def test_an_event_does_not_wait_for_the_hosts_own_part(hpu: Callable[..., Any]) -> None:
    """Of a fetch into ordinary memory; nor does the device's synchronisation."""
    card = hpu().card
    source = torch.arange(4, dtype=torch.float32).to("lazy")
    later = Later(HeadTensorsOut(source, None, None, None, None), 4, card, pinned=False)
    later.event.synchronize()
    card.queue.wait()
    assert np.isnan(later.held[0].numpy()).all()
    source.cpu()
    assert later.held[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_card_in_a_group_runs_no_later_work_than_a_result_needs(grouped: bool) -> None:
    """Rank 0 waits for a result after both ranks got a step that draws nothing, for which rank 1 waits for nothing.

    The later step's collective has no partner then.
    """
    queue, ran = DeviceQueue(), list[str]()
    queue.grouped = grouped
    queue.push(lambda: ran.append("step 1"))
    queue.push_down(lambda: ran.append("result 1"))
    event = QueueEvent(queue)
    event.record()
    queue.push(lambda: ran.append("step 2"))
    event.synchronize()
    assert ran == (["step 1", "result 1"] if grouped else ["step 1", "step 2", "result 1"])
    queue.wait()
    assert len(ran) == 3


# The pieces of a launch


STAGES: dict[Stage, tuple[tuple[int, ...], str, int]] = {
    Stage.FRESH: ((2, 64), "", 1), Stage.CONTEXT: ((64, 3), "", 1), Stage.DECODE: ((3, 4), "", 1),
    Stage.VISION: ((128,), "", 2), Stage.SAMPLE: ((4,), "full", 2), Stage.RESET: ((2,), "", 2),
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_fits_two_pieces_and_comes_out_as_it_was(stage: Stage) -> None:
    """Every array, of any type, in its place: through a piece and back, in the type that the body expects."""
    dims, variant, pieces = STAGES[stage]
    blank = arrays(Bucket(stage, dims, variant), None, LaunchForm(16, VOCAB, SlotForm(1176, 4)))
    rng = np.random.default_rng(1)
    filled = [rng.integers(0, 200, a.shape).astype(a.dtype) for a in leaves(blank)]
    made = make_packing(filled)
    assert len(made.types) == pieces <= 2
    memory = [np.full(n, 99, t) for n, t in zip(made.sizes, made.types, strict=True)]
    for piece, target in enumerate(memory):
        made.write(piece, filled, target)
    views = iter(made.views([torch.from_numpy(m) for m in memory]))
    got = cast_inputs(types_of(leaves(blank)), lambda x: x)(rebuild(blank, lambda a: next(views)))
    assert type(got) is type(blank)
    for tensor, array in zip(leaves(got), filled, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array, strict=True)


def test_tuples_keep_their_type_in_a_rebuilt_tree() -> None:
    """A merger's rows hold the masks of adapters in a plain tuple, of as many as there are widths."""
    tree = (np.arange(4), (np.arange(3), np.arange(2)), None, LaunchNumbers(np.arange(5)))
    cut = rebuild(tree, lambda a: a[:2])
    assert type(cut[1]) is tuple and type(cut[3]) is LaunchNumbers and cut[2] is None
    assert [len(one) for one in leaves((cut[0], cut[1], cut[3]))] == [2, 2, 2, 2]


class LaunchNumbers(NamedTuple):
    """A named tuple of one array."""

    rows: np.ndarray[Any, Any]


@pytest.mark.parametrize(("real", "value"), [(True, 2**24), (False, 2**31)])
def test_a_number_that_a_word_does_not_hold_is_refused(real: bool, value: int) -> None:
    other = np.zeros(2, np.float32 if real else np.int32)
    made = make_packing([np.zeros(1, np.int64), other])
    target = np.zeros(made.sizes[0], made.types[0])
    made.write(0, [np.array([value - 1]), other], target)
    assert int(target[0]) == value - 1
    with pytest.raises(OverflowError, match=str(value)):
        made.write(0, [np.array([value]), other], target)
