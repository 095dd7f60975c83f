"""Which calls of a runtime are ordered, by vector clocks over its record; and schedules that a card would have to keep.

Two calls that touch the same memory, one of them writing, must be ordered by their lane, by an event, or by the host
having waited. The order in which a record lists them proves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trencadis.backends.cuda.backend import CudaPending, CudaProgram
from trencadis.backends.cuda.cpu_twin.twin_runtime import HOST, Region, TwinCall, TwinRuntime
from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes
from trencadis.backends.cuda.launches.input_buffers import StageBuffers
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import HeadTensorsOut, ProgramState
from trencadis.core.launch_inputs import HeadInputs, StepInputs

LANES = (HOST, "programs", "uploads", "downloads", "weights")
LAUNCHES = ("launch", "replay")
Clock = dict[str, int]


@dataclass(frozen=True, slots=True)
class Access:
    call: TwinCall
    lane: str
    tick: int
    region: Region
    writes: bool


def races(calls: Sequence[TwinCall]) -> list[str]:
    """Every unordered pair over the same memory; a launch that reads what no copy brought since the last one."""
    known = {lane: dict.fromkeys(LANES, 0) for lane in LANES}
    events: dict[int, Clock] = {}
    before: dict[int, list[Access]] = {}
    found: list[str] = []
    brought: set[int] = set()
    for call in calls:
        own = known[call.stream]
        _merge(own, known[HOST])  # the host submits it after all that it did and waited for
        if call.kind == "record":
            events[call.event] = dict(own)
        elif call.kind == "wait":
            _merge(own, events.get(call.event, {}))
        elif call.kind == "synchronize":
            for lane in LANES:
                _merge(own, known[lane])
        elif call.reads or call.writes:
            own[call.stream] += 1
            found += _conflicts(call, own, before)
            found += _stale(call, brought)
    return found


def _merge(clock: Clock, other: Clock) -> None:
    for lane, tick in other.items():
        clock[lane] = max(clock[lane], tick)


def _conflicts(call: TwinCall, clock: Clock, before: dict[int, list[Access]]) -> list[str]:
    found = []
    mine = [(r, False) for r in call.reads] + [(r, True) for r in call.writes]
    for region, writes in mine:
        page = before.setdefault(region[0], [])  # regions of one memory begin at the same address here
        for a in page:
            overlap = a.region[0] < region[1] and region[0] < a.region[1]
            if overlap and (writes or a.writes) and clock[a.lane] < a.tick:
                found.append(f"{a.call.kind} {a.call.name} and {call.kind} {call.name} are not ordered")
        if writes:  # what is ordered before this write is ordered before whatever is ordered after it
            page[:] = [a for a in page if clock[a.lane] < a.tick or a.region[1] > region[1]]
        page.append(Access(call, call.stream, clock[call.stream], region, writes))
    return found


def _stale(call: TwinCall, brought: set[int]) -> list[str]:
    if call.kind == "upload":
        brought.add(call.writes[0][0])
    elif call.kind in LAUNCHES:
        place = call.reads[0][0]
        if place not in brought:
            return [f"{call.kind} {call.name} reads what an earlier launch was given"]
        brought.discard(place)
    return []


VOCAB = 50
SIZES = Sizes(block_size=16, row_blocks=2, vocab=VOCAB)
TEXT = [Bucket(Stage.PREFILL, (t, 2)) for t in (32, 16)] + [Bucket(Stage.DECODE, (r,)) for r in (4, 2, 1)]
HEADS = [Bucket(Stage.SAMPLE, (r,), v) for r in (4, 2, 1) for v in ("full", "greedy")]


@dataclass
class Schedule:
    """Random turns of a runner over a few buckets: launches, fetches, captures and releases, ``depth`` in flight."""

    seed: int
    turns: int = 12
    depth: int = 1
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.calls: list[TwinCall] = []
        self.runtime = TwinRuntime(record=self.calls)
        self.rooms, self.fetched = StageBuffers(self.runtime), self.runtime.event()
        self.sink, self.table = torch.zeros(64, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        self.programs = {b: self._program(b) for b in (*TEXT, *HEADS)}
        self.waiting: list[tuple[CudaPending, list[int]]] = []

    def _program(self, bucket: Bucket) -> CudaProgram:
        body = self._head if bucket.stage is Stage.SAMPLE else self._text
        return CudaProgram(bucket, body, SIZES, self.runtime, self.rooms, self.fetched)

    def _text(self, t: Any) -> None:
        self.sink[: len(t.tokens)].copy_(t.tokens)
        count = min(len(t.attn.blocks), len(self.table))
        self.table[:count].copy_(t.attn.blocks[:count])

    def _head(self, t: Any) -> HeadTensorsOut:
        return HeadTensorsOut((t.hidden_row * 7 + t.slot).int(), None, None, None, None)

    def run(self) -> list[str]:
        """What was wrong with the order, or with a value."""
        for _ in range(self.turns):
            self._turn()
            if self.rng.random() < 0.4:
                self._tend()
        while self.waiting:
            self._take()
        return self.wrong + races(self.calls)

    def _turn(self) -> None:
        for _ in range(self.rng.choice([1, 1, 2])):
            self._launch_text()
        for _ in range(self.rng.choice([0, 1, 1, 2])):
            self._launch_head()
        while len(self.waiting) > self.rng.choice([self.depth, 2 * self.depth]):
            self._take()

    def _launch_text(self) -> None:
        bucket = self.rng.choice([*TEXT, Bucket(Stage.PREFILL, (48, 2))])
        program = self.programs.get(bucket) or self._program(bucket)
        ids = [self.rng.randrange(1, VOCAB) for _ in range(self.rng.randint(1, bucket.dims[0]))]
        inputs = text(ids, bucket.stage is Stage.PREFILL)
        program.fill(inputs)
        program.replay()
        held = -(-np.diff(inputs.row_start) // SIZES.block_size)
        blocks = [b for row, count in zip(inputs.blocks, held, strict=True) for b in row[:count].tolist()]
        if self.sink[: len(ids)].tolist() != ids or self.table[: len(blocks)].tolist() != blocks:
            self.wrong.append(f"{bucket} computed other tokens")

    def _launch_head(self) -> None:
        bucket = self.rng.choice(HEADS)
        program = self.programs[bucket]
        rows = [self.rng.randrange(1, VOCAB) for _ in range(self.rng.randint(1, bucket.dims[0]))]
        program.fill(head(rows))
        out = program.replay()
        self.waiting.append((CudaPending(out, len(rows), self.runtime, self.fetched), [8 * r for r in rows]))

    def _take(self) -> None:
        pending, want = self.waiting.pop(0)
        if pending.result().token.tolist() != want:
            self.wrong.append("a fetch brought other values")

    def _tend(self) -> None:
        """Warm-up between steps."""
        program = self.programs[self.rng.choice([*TEXT, *HEADS])]
        if program.state is ProgramState.CAPTURED and self.rng.random() < 0.3:
            program.release()
        else:
            self.rng.choice([program.compile, program.capture, program.capture, program.rehearse])()


def text(ids: list[int], one_row: bool) -> StepInputs:
    """One row of all tokens, or one row a token."""
    n = len(ids)
    rows = 1 if one_row else n
    blank = np.zeros(n, np.int32)
    start = np.array([0, n], np.int32) if one_row else np.arange(n + 1, dtype=np.int32)
    blocks = 2 + (np.arange(3 * rows, dtype=np.int32).reshape(rows, 3) + ids[0]) % 90
    per_row = np.zeros(rows, np.int32)
    return StepInputs(
        np.array(ids, np.int32), blank, np.zeros((3, n), np.int32), blank, blank, start, per_row, blocks, per_row,
        per_row,
    )  # fmt: skip


def head(rows: list[int]) -> HeadInputs:
    """Greedy rows; slot and hidden row are the same number."""
    ids = np.array(rows, np.int32)
    real = np.zeros(len(rows), np.float32)
    masks = np.full((1, -(-VOCAB // 8)), 255, np.uint8)
    return HeadInputs(ids, ids, real, ids, real, real, real, real, real, real, ids, ids * 0, masks)
