"""Transfers rows between pipeline stages, and selects the launches of a Step that a stage runs.

Before a text launch a stage receives the rows of the previous stage, after it it sends its own to the next. One tensor
is transferred, [padded tokens of the launch's bucket, hidden], from one static buffer to another and outside of
programs, so that its shapes are planned and no graph waits for another stage.

Joins results of Steps that run on several pipeline stages.

The last stage provides the sampled tokens, both provide the statistics of their launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage, padded_tokens
from trencadis.core.checkpoint.model_config import StageShare
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.step_output import StepOutput

if TYPE_CHECKING:
    from trencadis.core.device.backend import Pipe
    from trencadis.core.models.model_and_ops_api import Persistent


LAST = (Stage.SAMPLE, Stage.RESET, Stage.POOL)
"""Stages of launches that read the last hidden states or the sampler state, which only the last pipeline stage has."""


def runs_on_stage(share: StageShare, stage: Stage) -> bool:
    """Returns True if launches of ``stage`` run on the pipeline stage with this ``share``."""
    if stage is Stage.VISION:
        return share.starts
    return share.ends if stage in LAST else True


def own_plan(plan: Plan, share: StageShare) -> Plan:
    """Returns the plan of one pipeline stage: the text buckets, which all stages share, and those that only it runs."""
    if share.stages == 1:
        return plan
    kept = tuple(b for b in plan.buckets if runs_on_stage(share, b.stage))
    return Plan(plan.policy, plan.version, kept, plan.block_size, plan.notes, plan.whole, drafts=plan.drafts)


def transferred_rows(bucket: Bucket, most: int) -> int:
    """Returns the number of rows transferred for a launch of ``bucket``; ``most``: rows that a buffer holds."""
    return min(padded_tokens(bucket), most)


class PipelineTransfer:
    """Sends and receives the hidden rows of text launches between neighbouring pipeline stages."""

    def __init__(self, share: StageShare, pipe: Pipe, held: Persistent) -> None:
        self.share, self._pipe, self._held = share, pipe, held
        pipe.bind(held.stream, None if share.ends else held.hidden)

    def inputs(self, x: StepInputs) -> StepInputs:
        """Adapts the host arrays of a launch to this stage.

        Rows received and sent are numbered from 1, in the launch's order.
        """
        count = len(x.tokens)
        number = np.arange(1, count + 1, dtype=np.int32)
        if not self.share.starts:
            nothing = np.zeros(count, np.int32)
            x.tokens, x.from_slot, x.image_row = number, nothing, nothing
        if not self.share.ends:
            x.out_row = number
        return x

    def receive(self, bucket: Bucket) -> None:
        """Receives the rows of the previous stage; called before a launch."""
        stream = self._held.stream
        if stream is not None:
            self._pipe.receive(stream, transferred_rows(bucket, len(stream) - 1))

    def send(self, bucket: Bucket) -> None:
        """Sends the rows of a launch to the next stage; called after it."""
        if not self.share.ends:
            hidden = self._held.hidden
            self._pipe.send(hidden, transferred_rows(bucket, len(hidden) - 1))


class StageOutputs:
    """Joins the results of rank 0 with those of the last stage; a Step is complete when both have arrived.

    Args:
        settle: called with a Step's future and its result.
    """

    def __init__(self, settle: Callable[[Future[StepOutput], StepOutput], None]) -> None:
        self._settle = settle
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[StepOutput]] = {}
        self._first: dict[int, StepOutput] = {}
        self._last: dict[int, StepOutput] = {}

    def expect(self, number: int, future: Future[StepOutput]) -> None:
        """Registers the future of a Step's result; called before the Step is sent."""
        with self._lock:
            self._waiting[number] = future

    def from_first(self, output: StepOutput) -> None:
        """Takes the output of rank 0."""
        with self._lock:
            self._first[output.number] = output
        self._join(output.number)

    def from_last(self, output: StepOutput) -> None:
        """Takes the output of the last stage."""
        with self._lock:
            self._last[output.number] = output
        self._join(output.number)

    def _join(self, number: int) -> None:
        with self._lock:
            if number not in self._first or number not in self._last:
                return
            first, last = self._first.pop(number), self._last.pop(number)
            future = self._waiting.pop(number)
        self._settle(future, join_outputs(first, last))


def join_outputs(first: StepOutput, last: StepOutput) -> StepOutput:
    """Returns the last stage's output with the statistics of both; each kind of launch is listed once."""
    seen = {s.bucket.stage for s in first.stats}
    last.stats = [*first.stats, *(s for s in last.stats if s.bucket.stage not in seen)]
    return last
