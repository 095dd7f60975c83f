"""A card whose launches are not run: bytes of every bucket come from one start on an emulated card without values.

Weights, fixed tensors, inputs and the KV cache are made on the card as ever; a launch grows its workspace and a graph
takes its bytes as they were recorded. A bucket that was never recorded is run once beside it, in ample
memory, which records it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.fakes.meta_start import Started, config_of
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.allocator import Allocator
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_errors import EmulatedOutOfMemory
from trencadis.backends.hpu.habana_bridge import Bridge
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.launches.hpu_program import GraphProgram
from trencadis.backends.hpu.shape_policy import SERVING
from trencadis.core.buckets import Bucket
from trencadis.core.device.backend import BackendConfig, OutOfDeviceMemory, ProgramState
from trencadis.core.device_shape_policy import InputSizes
from trencadis.core.memory.graph_measurement_cache import bucket_of
from trencadis.core.vision_config import SlotForm

__all__ = ["Record", "RecordedBackend", "Records", "config_of"]


AMPLE = 1 << 46
"""Bytes of the memory on which a bucket is recorded."""


@dataclass(frozen=True)
class Record:
    """Bytes of one bucket: most that a launch holds at a time, and of its graph beside the inputs."""

    peak: int
    graph: int


@dataclass
class Records:
    """Those of one model on one rank of some."""

    of: dict[Bucket, Record] = field(default_factory=dict)

    def take(self, started: Started) -> None:
        """Everything that a start on a large card has measured."""
        for bucket in started.runner.plan.buckets:
            program = started.runner.graphs.program(bucket)
            assert isinstance(program, GraphProgram)
            self.of[bucket] = Record(peak_of(program), started.captures.measured[bucket])

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps({str(b): [r.peak, r.graph] for b, r in sorted(self.of.items())}))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Records:
        return cls({bucket_of(name): Record(*row) for name, row in json.loads(path.read_text()).items()})


def peak_of(program: GraphProgram) -> int:
    """What the emulator traced of a program that ran."""
    graphs = program._module.forward.__self__
    return next(iter(graphs.traced.values())).peak


class RecordedProgram:
    """``core.device.backend.Program``."""

    def __init__(self, bucket: Bucket, body: Any, backend: RecordedBackend) -> None:
        self.bucket, self.body, self.backend = bucket, body, backend
        self.state = ProgramState.PLANNED
        self.bytes = SERVING.inputs(bucket, backend.sizes) if SERVING.inputs else 0
        self.inputs = torch.empty(self.bytes, dtype=torch.uint8, device=backend.device)

    @property
    def record(self) -> Record:
        known = self.backend.records.of.get(self.bucket)
        if known is None:
            card, own = self.backend.card, self.backend.card.allocator
            card.allocator = Allocator(dataclasses.replace(card.profile, total=AMPLE))
            try:
                known = self._measure()
            finally:
                card.allocator = own
            self.backend.records.of[self.bucket] = known
            self.backend.live += 1
        return known

    def _measure(self) -> Record:
        """Runs the bucket and captures it, which a launch without a graph does not need to have room for."""
        program = HpuBackend.program(self.backend, self.bucket, self.body)
        assert isinstance(program, GraphProgram)
        program.compile()
        before = self.backend.memory.free()
        program.capture()
        return Record(peak_of(program), before - self.backend.memory.free())

    def _take(self, graph: bool) -> None:
        allocator = self.backend.card.allocator
        try:
            allocator.grow_workspace(self.record.peak)
            if graph:
                allocator.allocate("graphs", self.record.graph, "a graph")
        except EmulatedOutOfMemory as error:
            raise OutOfDeviceMemory(str(error)) from error

    def run(self) -> None:
        self._take(graph=False)
        self.state = max(self.state, ProgramState.COMPILED)

    compile = rehearse = replay = run

    def capture(self) -> None:
        self._take(graph=True)
        self.state = ProgramState.CAPTURED

    def release(self) -> int:
        if self.state is not ProgramState.CAPTURED:
            return 0
        back = int(self.record.graph * self.backend.returned)
        self.backend.card.allocator.release("graphs", back)
        self.state = ProgramState.COMPILED
        return back


class RecordedBackend(HpuBackend):
    """The backend on ``card``, with programs that only book bytes.

    ``returned``: what a release gives back; ``slot``: the form of a slot of VISION.
    """

    def __init__(
        self, cfg: BackendConfig, card: EmulatedDevice, bridge: Bridge, records: Records, returned: float,
        slot: SlotForm | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cfg, SERVING, bridge, HpuSettings())
        self.card, self.records, self.returned = card, records, returned
        self.sizes = InputSizes(cfg.vocab_size) if slot is None else InputSizes(cfg.vocab_size, slot=slot)
        self.live = 0

    def program(self, bucket: Bucket, body: Any) -> Any:
        return RecordedProgram(bucket, body, self)
