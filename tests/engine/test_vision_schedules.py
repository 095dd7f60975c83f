"""Schedules with images: one VISION launch a step, shared with the text of other rows, and nobody waits for two."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from benchmarks.packing import Idle, default_plan, engine_of
from trencadis.core.buckets import Stage
from trencadis.core.engine.engine import Engine
from trencadis.core.launches.launch_splitter import split_step
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Request, SamplingParams
from trencadis.core.step import Step
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

PLAN = cache(default_plan)
PIXELS = np.zeros((0, PATCH_VALUES), np.uint8)


def text(name: str, prompt: int = 300, output: int = 200) -> Request:
    return Request(name, [5] * prompt, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))


def shown(name: str, sides: list[int], question: int = 40, output: int = 3) -> Request:
    """Images of ``sides`` x ``sides`` patches and a question."""
    tokens, spans = [5] * 16, []
    for i, side in enumerate(sides):
        slots = 64 * (-(-side // 8)) ** 2
        digest = f"{abs(hash((name, i))):x}"
        spans.append(MediaSpan(len(tokens), side * side // 4, digest, (1, side, side), slots))
        tokens += [2] * (side * side // 4)
    tokens += [5] * question
    return Request(name, tokens, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), spans)


class Run:
    """An engine that notes its steps; pixels come as soon as they are asked for."""

    def __init__(self, depth: int, tokens: int = 2048, rows: int = 32) -> None:
        self.steps: list[Step] = []
        self.engine: Engine = engine_of(PLAN(), Idle(PLAN(), self.steps.append), depth, tokens, rows)
        self.asked: list[tuple[str, int]] = []

    def run_step(self, feed: bool = True) -> None:
        self.engine.step()
        self.asked += self.engine.needs()
        if feed:
            for item in self.asked:
                self.engine.add_media(*item, PIXELS)
            self.asked = []

    def key(self, name: str) -> int:
        return self.engine.life.requests[name][0].key

    def finish(self) -> None:
        while not self.engine.idle():
            self.run_step()
        self.engine.scheduler.check()


def visions(step: Step) -> int:
    return sum(launch.bucket.stage is Stage.VISION for launch in split_step(step, PLAN()))


def sides() -> Iterator[list[int]]:
    """Requests of an image flood, from one thumbnail to four large images."""
    rng = np.random.default_rng(4)
    while True:
        yield [2 * int(n) for n in rng.integers(4, 50, int(rng.integers(1, 5)))]


@pytest.mark.parametrize("tokens", [1024, 8192])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_flood_of_images_costs_others_one_launch(depth: int, tokens: int) -> None:
    """Decodes run in every step. A text that arrives waits for at most one VISION launch in all, be it in the step that
    runs when it comes or in its own."""
    run, flood = Run(depth, tokens), sides()
    decoding = [f"d{i}" for i in range(4)]
    for name in decoding:
        run.engine.add(text(name, 100, 10_000))
    run.run_step()
    run.run_step()
    keys = {run.key(name) for name in decoding}
    number, worst, launches = 0, 0, 0
    for late in range(25):
        for _ in range(12 - len(run.engine.life.requests) + len(decoding)):
            run.engine.add(shown(f"i{number}", next(flood)))
            number += 1
        for _ in range(late % 5):
            run.run_step()
        begun = run.engine.scheduler.steps
        run.engine.add(text(f"t{late}", 500, 2))
        key = run.key(f"t{late}")
        while not (own := [s.number for s in run.steps if any(row.key == key for row in s.rows)]):
            run.run_step()
        worst = max(worst, sum(visions(s) for s in run.steps if begun <= s.number <= own[0]))
    for step in run.steps[2:]:
        launches += visions(step)
        assert visions(step) <= 1 and keys <= {row.key for row in step.rows}, "a decode was left out"
    print(f"depth {depth}: {number} image requests, {launches} launches, a text waited for {worst} at most")
    assert worst <= 1 and launches > 20
    for name in decoding:
        run.engine.abort(name)
    run.finish()


@pytest.mark.parametrize("depth", [0, 1])
def test_images_and_the_text_of_other_rows_share_a_step(depth: int) -> None:
    run = Run(depth)
    run.engine.add(text("d", 50, 40))
    run.run_step()
    run.engine.add(shown("i", [32, 16]))
    run.finish()
    (step,) = [s for s in run.steps if s.images]
    stages = [launch.bucket.stage for launch in split_step(step, PLAN())]
    assert stages[0] is Stage.VISION and Stage.DECODE in stages and stages.count(Stage.VISION) == 1
    assert len(step.images) == 2 and any(row.images for row in step.rows), "the prompt runs behind its own images"


@pytest.mark.parametrize("depth", [0, 1])
def test_images_of_several_requests_share_a_launch_before_they_have_rows(depth: int) -> None:
    """One row is free; images of four requests are encoded together, and nobody encodes them again."""
    run = Run(depth, rows=4)
    for i in range(3):
        run.engine.add(text(f"d{i}", 20, 100))
    run.run_step()
    for i in range(4):
        run.engine.add(shown(f"i{i}", [32]))
    run.finish()
    assert [len(s.images) for s in run.steps if s.images] == [4]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_text_passes_images_whose_pixels_are_on_their_way(depth: int) -> None:
    run = Run(depth)
    run.engine.add(shown("i", [32]))
    run.run_step(feed=False)
    run.engine.add(text("t"))
    run.run_step(feed=False)
    key = run.key("t")
    run.finish()  # a step is noted by the thread that runs it
    assert [row.key for row in run.steps[0].rows] == [key] and not run.steps[0].images


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("turns", range(5))
def test_a_disconnect_stops_encoding_within_a_step(turns: int, depth: int) -> None:
    """Whatever it waits for, no step after an abort encodes an image of it alone, and no pixels are asked for."""
    run = Run(depth)
    run.engine.add(shown("gone", [90, 90, 90, 90, 90, 90]))
    run.engine.add(shown("stays", [32]))
    for _ in range(turns):
        run.run_step()
    before = run.engine.scheduler.steps
    run.engine.abort("gone")
    run.finish()
    encoded = {i.digest for s in run.steps if s.number <= before for i in s.images}
    stays = {s.digest for s in shown("stays", [32]).spans}
    after = [i.digest for s in run.steps if s.number > before for i in s.images]
    assert set(after) <= stays and not any(id == "gone" for id, _ in run.engine.needs())
    assert stays <= encoded | set(after)
    assert not run.engine.scheduler.pixel_queue.pixels
    assert not any(1 in entry.pins for entry in run.engine.scheduler.encoder.arena._entries.values())
