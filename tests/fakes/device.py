"""A backend whose programs do nothing, at scripted costs and with scripted failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import ProgramState
from trencadis.core.device_shape_policy import Policy
from trencadis.core.graphs.graph_capture_within_memory_budget import CaptureJournal, GraphCaptures
from trencadis.core.graphs.graph_manager import GraphManager, GraphObserver
from trencadis.core.memory.graph_selection import GraphPrice
from trencadis.core.memory.memory_division import GraphSettings, MemoryInUse, divide_memory

GIB = 1 << 30
AXES: dict[Stage, tuple[str, ...]] = {
    Stage.FRESH: ("rows", "tokens"), Stage.DECODE: ("rows", "blocks"), Stage.VISION: ("slots",),
    Stage.SAMPLE: ("rows",),
}  # fmt: skip
POLICY = Policy(axes=AXES, alignment={s: (1,) * len(a) for s, a in AXES.items()}, mixed=False, captures=True)


class OutOfMemory(RuntimeError):
    """As a device says it."""

    def __init__(self) -> None:
        super().__init__("out of memory")


@dataclass
class FakeProgram:
    bucket: Bucket
    device: FakeDevice
    state: ProgramState = ProgramState.PLANNED
    bytes: int = 0

    def compile(self) -> None:
        self.device.count("compile", self.bucket)
        self.device.compiles += 1
        self.state = max(self.state, ProgramState.COMPILED)

    def rehearse(self) -> None:
        self.device.compiles += self.device.unstable.get(self.bucket, 0)
        self.device.calls.append(("rehearse", self.bucket))

    def run(self) -> Any:
        self.device.count("step", self.bucket)
        self.state = max(self.state, ProgramState.COMPILED)

    def replay(self) -> Any:
        assert self.state is ProgramState.CAPTURED
        self.device.count("step", self.bucket)

    def capture(self) -> None:
        self.device.count("capture", self.bucket)
        if not self.device.graphs:
            return
        self.bytes = self.device.cost(self.bucket)
        if self.bytes > self.device.free():
            raise OutOfMemory
        self.device.used += self.bytes
        self.state = ProgramState.CAPTURED

    def release(self) -> int:
        if self.state is not ProgramState.CAPTURED:
            return 0
        back = int(self.bytes * self.device.returned)
        self.device.used -= back
        self.state = ProgramState.COMPILED
        return back


@dataclass
class FakeDevice:
    """``core.device.backend.Backend`` as far as graphs need it; failures by (kind, number of the call from 1)."""

    policy: Policy = POLICY
    size: int = 16 * GIB
    used: int = 0
    returned: float = 0.0
    graphs: bool = True
    cost: Callable[[Bucket], int] = lambda bucket: 1 << 20
    fails: dict[tuple[str, int], Exception] = field(default_factory=dict)
    leaks: int = 0
    unstable: dict[Bucket, int] = field(default_factory=dict)
    compiles: int = 0
    calls: list[tuple[str, Bucket]] = field(default_factory=list)
    comm: Any = None

    def __post_init__(self) -> None:
        self.comm = self.comm or SimpleNamespace(rank=0, world=1)
        self.memory = SimpleNamespace(total=lambda: self.size, free=self.free)

    def free(self) -> int:
        return self.size - self.used

    def count(self, kind: str, bucket: Bucket) -> None:
        self.calls.append((kind, bucket))
        number = sum(k == kind for k, _ in self.calls)
        if (kind, number) in self.fails:
            self.used += self.leaks
            raise self.fails[kind, number]

    def program(self, bucket: Bucket, body: Any) -> FakeProgram:
        return FakeProgram(bucket, self)

    def fill(self, program: Any, inputs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def compilations(self) -> int:
        return self.compiles


def small_plan() -> Plan:
    """Ten buckets over all pools."""
    buckets = [
        *(Bucket(Stage.FRESH, (1, t)) for t in (64, 128, 256)),
        *(Bucket(Stage.DECODE, d) for d in ((1, 1), (1, 2), (2, 2))),
        *(Bucket(Stage.VISION, (s,)) for s in (64, 256)),
        *(Bucket(Stage.SAMPLE, (1,), v) for v in ("greedy", "full")),
    ]
    return Plan(POLICY, buckets=tuple(sorted(buckets)), block_size=16)


def make_harness(
    device: FakeDevice,
    price: Callable[[Bucket], int] = lambda bucket: 1 << 20,
    plan: Plan | None = None,
    skip: Iterable[str] = (),
    tell: Callable[[str, bool], None] = lambda bucket, begun: None,
    utilisation: float = 0.5,
    lazy: bool = False,
    **settings: Any,
) -> tuple[GraphManager, GraphCaptures]:
    """A manager and its captures after the KV cache was taken; ``lazy``: graphs are captured at first use."""
    plan = plan or small_plan()
    bodies: Any = dict.fromkeys(("text", "vision", "greedy", "full", "reset"))
    manager = GraphManager(device, bodies, plan, GraphObserver(lazy=lazy))  # type: ignore[arg-type]
    before = MemoryInUse(device.size, others=device.used)
    chosen = GraphSettings(**settings)
    division = divide_memory(before, utilisation, "free", chosen, 1 << 20, multimodal=True)
    device.used += division.kv
    prices = [GraphPrice(b, price(b)) for b in plan.buckets]
    return manager, GraphCaptures(manager, before, division, chosen, prices, True, journal=CaptureJournal(skip, tell))
