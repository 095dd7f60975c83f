"""Converts traffic to the needs of scheduler steps, which are the same for all compared plans. Pure Python.

The clock does not depend on the plan: a step takes a fixed time plus a time per real token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from trencadis.core.shapes.rectangular_launches import RowNeed
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.multimodal.processor import ImageGeometry

Sizes = Callable[[int, int], ImageGeometry]
"""Returns the geometry of an image of a height and a width."""

STEP_SECONDS = 0.02
TOKEN_SECONDS = 5e-5


@dataclass(frozen=True)
class Traffic:
    """One request: arrival in seconds, tokens of prompt and answer, cached prompt tokens, slots of its images."""

    arrival: float
    prompt: int
    output: int
    cached: int = 0
    images: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepNeeds:
    """Rows and images of one step."""

    rows: tuple[RowNeed, ...]
    images: tuple[int, ...] = ()


@dataclass
class _Running:
    due: int
    context: int
    left: int
    images: deque[int] = field(default_factory=deque)


def replay_steps(traffic: Iterable[Traffic], limits: ShapeLimits) -> Iterator[StepNeeds]:
    """Simulates continuous batching: decoding rows first, then prompts in order of arrival, cut to the token budget."""
    coming = deque(sorted(traffic, key=lambda t: t.arrival))
    running: list[_Running] = []
    now = 0.0
    while coming or running:
        if not running and coming[0].arrival > now:
            now = coming[0].arrival
        while coming and coming[0].arrival <= now and len(running) < limits.max_rows:
            running.append(_enter(coming.popleft(), limits))
        rows, images = _run_step(running, limits)
        yield StepNeeds(tuple(rows), tuple(images))
        now += STEP_SECONDS + TOKEN_SECONDS * sum(n.tokens for n in rows)
        running = [r for r in running if r.left > 0]


def _enter(t: Traffic, limits: ShapeLimits) -> _Running:
    prompt = min(t.prompt, limits.max_model_len - 1)
    cached = min(t.cached, prompt - 1) // limits.block_size * limits.block_size
    output = max(min(t.output, limits.max_model_len - prompt), 1)
    return _Running(prompt - cached, cached, output, deque(t.images))


def _run_step(running: list[_Running], limits: ShapeLimits) -> tuple[list[RowNeed], list[int]]:
    """Returns one step's rows and images; advances the requests."""
    rows: list[RowNeed] = []
    images: list[int] = []
    budget, slots = limits.max_tokens, limits.encoder_slots
    order = sorted(range(len(running)), key=lambda i: (running[i].due > 1, i))
    for i in order:
        r = running[i]
        while r.images and (not images or r.images[0] <= slots):
            slots -= r.images[0]
            images.append(r.images.popleft())
        count = min(r.due, budget)
        if r.images or count < 1:
            continue
        rows.append(RowNeed(len(rows), r.context, count))
        budget -= count
        r.context += count
        r.due -= count
        if not r.due:
            r.left -= 1
            r.due = 1
    return rows, images
