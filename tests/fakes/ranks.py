"""Ranks without a device: what they sample is a digest of the whole Step, and they fail as the configuration says."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import rank_messages
from trencadis.core.executor.rank_info_and_fingerprint import RankInfo
from trencadis.core.request import AdapterRef
from trencadis.core.startup_progress_and_warmup_pacing import Progress, Warming
from trencadis.core.step import AdapterUpload, Bias, Draw, Encode, ImageRows, Reset, Row, Sample, Step
from trencadis.core.step_output import HeadOutput, StepOutput


class Said:
    """A result that is there, or one that fails when it is asked for."""

    def __init__(self, output: StepOutput, wrong: str = "") -> None:
        self.output, self.wrong = output, wrong

    def done(self) -> bool:
        return True

    def result(self) -> StepOutput:
        if self.wrong:
            raise ValueError(self.wrong)
        return self.output


class FakeRank:
    """``mode`` is ``what@rank``: raise, differ, kill, sleep or use another plan in step 3 of that rank, or raise late,
    in its result.
    """

    def __init__(self, mode: str, place: RankInfo) -> None:
        what, _, rank = mode.partition("@")
        self.what = what if rank == str(place.rank) else ""
        self.warmed = 0
        self.depth, self.overlaps = 1, False

    @property
    def rank(self) -> FakeRank:
        return self

    def execute(self, step: Step) -> Any:
        token = (
            np.frombuffer(rank_messages.encode(rank_messages.RunStep(step)), np.uint8).astype(np.int64).sum()
            + self.warmed
        )
        if step.number == 3:
            match self.what:
                case "raise":
                    raise ValueError("out of luck")
                case "differ":
                    token += 1
                case "kill":
                    os.kill(os.getpid(), 9)
                case "sleep":
                    time.sleep(3600)
        wrong = "too late" if step.number == 3 and self.what == "late" else ""
        output = StepOutput(step.number, {}, HeadOutput(np.array([token], np.int64).astype(np.int32)))
        output.plan += step.number == 3 and self.what == "plan"
        return Said(output, wrong)

    def propose(self, rows: Any) -> list[tuple[int, ...]]:
        raise AssertionError("nothing is drafted here")

    def set_vocabulary(self, data: bytes | bytearray) -> None:
        raise AssertionError("no vocabulary is sent here")

    def prepare(self, grammar: str) -> Any:
        raise AssertionError("no grammar is used here")

    def load_adapter(self, ref: AdapterRef, drop: tuple[str, ...]) -> Any:
        raise AssertionError("no adapter is used here")

    def change_plan(self, version: int, buckets: Any) -> None:
        raise AssertionError("no plan is changed here")

    def warm(self) -> Warming | None:
        self.warmed += 1
        return Warming(done=self.warmed)


def make(config: EngineConfig, place: RankInfo, progress: Progress | None = None) -> FakeRank:
    """``EngineConfig.policy`` says what goes wrong."""
    if progress is not None:
        progress.capture("prefill[8x1]", True)
        progress.capture("prefill[8x1]", False)
        if config.policy == f"capture@{place.rank}":
            progress.capture(f"decode[{place.rank}]", True)
            os.kill(os.getpid(), 9)
    if config.policy == f"refuse@{place.rank}":
        raise StartupError("there is no room for me")
    if config.policy == f"die@{place.rank}":
        os._exit(7)
    made = FakeRank(config.policy, place)
    made.overlaps = config.async_depth == 1
    return made


def full_step(number: int) -> Step:
    """A step with every field in use."""
    rng = np.random.default_rng(number)

    def ids(*shape: int) -> Any:
        return rng.integers(0, 1000, shape).astype(np.int32)

    row = Row(
        7, 1, 3, (5, -1), (2, 9), ids(3, 2), (ImageRows(0, ids(2)),),
        (Draw(7, 1, Sample(0.7, 5, 0.9, 0.1, 0.1, 0.2, 1.1, 0.3, (4,), 2, True)),), ids(2),
    )  # fmt: skip
    pixels = rng.integers(0, 256, (16, 1176)).astype(np.uint8)
    image = Encode("digest", (1, 4, 4), 64, pixels, ids(4))
    resets, uploads = (Reset(1, (5,), (6, 7), (Bias(3, 0.5),)),), (AdapterUpload(2, "ab"),)
    return Step(number, (row,), (image,), resets, uploads=uploads)
