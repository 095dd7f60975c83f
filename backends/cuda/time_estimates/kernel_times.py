"""Times of cards and libraries: each figure with the measurement that it is from (constants.json); none is fitted.

The seconds of one launch: reads and writes, computation, and the gap before it starts. The timeline of host and device:
steps that follow each other at a given depth, and the idle time of the device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject

FILE = Path(__file__).with_name("constants.json")

DEFAULT = "H100"


@dataclass(frozen=True)
class CardTimes:
    """Performance figures of one card.

    Args:
        bandwidth, flops: peaks of the card per second; bfloat16, dense.
        l2_bandwidth: bytes per second of its L2 cache.
        weights_share, keys_share, rows_share: share of the bandwidth that reading weights, keys and anything else
        reaches.
        flops_share, attention_flops_share: share of the peak that products and attention reach.
        gap: seconds from the end of a kernel to the start of the next one within a graph.
        least: seconds that a kernel takes at the least, beside the gap.
        clock: cycles of a processor a second, in each of which it issues an instruction to ``LANES`` lanes.
        graph: seconds from the launch of a graph to its first kernel.
        all_reduce, all_reduce_byte: seconds of a sum over ranks, and of each of its bytes.
        host: seconds of a decode step's host work by rows.
        flash_attention_3_share: share of the peak that attention by FlashAttention 3 reaches; 0: not for this card.
    """

    name: str
    bandwidth: float
    l2_bandwidth: float
    flops: float
    processors: float
    weights_share: float
    keys_share: float
    rows_share: float
    flops_share: float
    attention_flops_share: float
    gap: float
    least: float
    clock: float
    graph: float
    all_reduce: float
    all_reduce_byte: float
    host: tuple[tuple[int, float], ...]
    flash_attention_3_share: float = 0.0

    def with_flash_attention_3(self) -> CardTimes:
        """Returns the figures of launches in which FlashAttention 3 attends, where there is one for the card."""
        return replace(self, attention_flops_share=self.flash_attention_3_share or self.attention_flops_share)

    def host_step(self, rows: int) -> float:
        """Returns the host's seconds for a step of ``rows`` rows, interpolated linearly between measurements."""
        points = sorted(self.host)
        before = max((p for p in points if p[0] <= rows), default=points[0])
        after = min((p for p in points if p[0] >= rows), default=points[-1])
        if before[0] == after[0]:
            return before[1] * max(rows / before[0], 1.0) if rows > before[0] else before[1]
        return before[1] + (after[1] - before[1]) * (rows - before[0]) / (after[0] - before[0])


SCALED = (
    "bandwidth", "l2_bandwidth", "flops", "weights_share", "keys_share", "rows_share", "flops_share",
    "attention_flops_share", "gap", "least", "clock", "graph", "all_reduce", "all_reduce_byte",
)  # fmt: skip
"""Constants whose influence is reported, one at a time; that of the host's time is reported too."""


@cache
def load_constants() -> JsonObject:
    """Reads constants.json: name -> [value, source, where the figure was confirmed, or "not found"]."""
    found: JsonObject = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def cards() -> list[str]:
    """Returns the names of the cards that have figures."""
    return list(load_constants()["cards"])


def card(name: str) -> CardTimes:
    """Returns the figures of a card.

    Raises:
        StartupError: there are no figures of that name.
    """
    if name not in load_constants()["cards"]:
        raise StartupError(f"--card {name[:40]}: there are figures of {', '.join(cards())}")
    values = {key: float(value) for key, (value, *_) in _of(name).items()}
    host = tuple((int(rows), float(value)) for rows, (value, _) in load_constants()["host"].items())
    return CardTimes(name=name, host=host, **values)


def sources(name: str) -> dict[str, str]:
    """Returns the source of each constant of a card; figures that could not be confirmed elsewhere are marked."""
    marks = {"not found": " (not found again)"}
    return {key: source + marks.get(confirmation, "") for key, (_, source, confirmation) in _of(name).items()}


def list_confirmations(name: str) -> dict[str, str]:
    """Returns, per constant of a card, where its value was confirmed besides its source; ``not found``: nowhere."""
    return {key: confirmation for key, (_, _, confirmation) in _of(name).items()}


def _of(name: str) -> JsonObject:
    found: JsonObject = load_constants()["cards"][name] | load_constants()["shared"]
    return found


PRODUCT, ATTENTION, ROWS, HEAD, COLLECTIVE = "products", "attention", "small kernels", "head", "collectives"
KINDS = (PRODUCT, ATTENTION, ROWS, HEAD, COLLECTIVE)


class TileLoads(NamedTuple):
    """Bytes that a product of experts loads, and the padding of its tiles: fields of ``RecordedKernel``."""

    loads: int = 0
    weight_loads: int = 0
    padding: float = 1.0


@dataclass(frozen=True)
class RecordedKernel:
    """One kernel of a recorded launch; for a collective, ``bytes`` are those of its message.

    Args:
        codes: quantised values that it decodes, each as often as a tile of rows does.
        instructions: of a lane for each of them.
        programs: of its grid; 0: unknown.
        rate: of its operations, over those of 16 bits.
        loads: bytes that all its programs load, each as often as it is loaded; 0: unknown.
        weight_loads: those of them that are of weights.
        padding: operations of whole tiles over ``flops``.
    """

    name: str
    kind: str
    bytes: int
    flops: int = 0
    codes: int = 0
    instructions: float = 0.0
    programs: int = 0
    rate: float = 1.0
    loads: int = 0
    weight_loads: int = 0
    padding: float = 1.0


LANES = 128
"""Lanes of a processor that issue an instruction in a cycle."""


def compute_kernel_seconds(kernel: RecordedKernel, card: CardTimes) -> float:
    """Returns the seconds that the kernel runs: the longest of memory traffic, loads from the L2 cache, computation,
    decoding of codes, and what any kernel takes.

    Loads reach the share of the cache's bandwidth that coalesced reads reach of the memory's.
    """
    if kernel.kind == COLLECTIVE:
        return card.all_reduce + card.all_reduce_byte * kernel.bytes
    share = {PRODUCT: card.weights_share, ATTENTION: card.keys_share}.get(kernel.kind, card.rows_share)
    computing = card.attention_flops_share if kernel.kind == ATTENTION else card.flops_share
    operations = kernel.flops * kernel.padding
    return max(
        kernel.bytes / (card.bandwidth * share),
        kernel.loads / (card.l2_bandwidth * card.rows_share),
        operations / (card.flops * computing * kernel.rate) * wave_factor(kernel.programs, card.processors),
        kernel.codes * kernel.instructions / (card.processors * LANES * card.clock),
        card.least,
    )


def wave_factor(programs: int, processors: float) -> float:
    """Returns by how much the last wave of ``programs`` equal programs lengthens a kernel; 1 if they are unknown."""
    return -(-programs // processors) * processors / programs if programs else 1.0


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of the kernels of a recorded step by kind, and of the gaps between them."""

    kinds: dict[str, float]
    gaps: float

    @property
    def total(self) -> float:
        """Total seconds of the device."""
        return sum(self.kinds.values()) + self.gaps


def time_of(kernels: list[RecordedKernel], card: CardTimes) -> KernelTimes:
    """Returns the seconds of recorded kernels that are replayed as one graph per launch."""
    kinds = dict.fromkeys(KINDS, 0.0)
    for kernel in kernels:
        kinds[kernel.kind] += compute_kernel_seconds(kernel, card)
    return KernelTimes(kinds, len(kernels) * card.gap)


STEPS = 200
"""Number of steps that ``step_time`` simulates."""

AFTER = 0.25
"""Share of the host's work that waits for the result of a step: update, and the work after it."""


class HostStep(NamedTuple):
    """Seconds of the host for one step: before its launch, and after its result has arrived."""

    before: float
    after: float


class Timeline(NamedTuple):
    """Result of simulating some steps; seconds."""

    steps: int
    total: float
    busy: float
    longest: float  # longest idle time of the device

    @property
    def idle(self) -> float:
        """Share of the time in which the device waits for the host."""
        return 1 - self.busy / self.total if self.total else 0.0

    @property
    def step(self) -> float:
        """Mean seconds from the end of one step to the end of the next."""
        return self.total / max(self.steps, 1)


def simulate_timeline(steps: Iterable[tuple[HostStep, float]], depth: int = 1) -> Timeline:
    """Simulates steps that follow each other, given as (host, device seconds).

    The host launches a step, and takes the result of the one ``depth`` steps before it as soon as that is done; the
    device begins a step once it is launched and the one before has ended. The time counts from the start of the first
    step on the device.
    """
    host = free = begun = busy = longest = 0.0
    ended: list[float] = []
    taken: list[HostStep] = []
    for index, (work, device) in enumerate(steps):
        host += work.before
        start = max(host, free)
        if index:
            longest = max(longest, start - free)
        else:
            begun = start
        free, busy = start + device, busy + device
        ended.append(free)
        taken.append(work)
        if index >= depth:
            host = max(host, ended[index - depth]) + taken[index - depth].after
    return Timeline(len(ended), free - begun, busy, longest)


def step_time(
    kernels: Sequence[RecordedKernel], rows: int, on: CardTimes, depth: int = 1
) -> tuple[KernelTimes, Timeline]:
    """Returns (the device's seconds, the timeline of host and device over several steps)."""
    device = time_of(list(kernels), on)
    host = on.host_step(rows)
    work = HostStep(host * (1 - AFTER), host * AFTER)
    return device, simulate_timeline(((work, device.total + on.graph) for _ in range(STEPS)), depth)
