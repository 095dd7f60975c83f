"""Runs SAMPLE as two launches, if rows that take the argmax cost a fraction of the others.

SAMPLE for rows whose masks depend on tokens of the previous step: waits for these tokens, then fills the masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trencadis.core.launch_inputs import HeadInputs
from trencadis.core.launches.host_inputs import SampleRow, head_inputs, join_head_inputs
from trencadis.core.step_output import HeadOutput, TargetScores
from trencadis.core.token_masks.draft_masks import ChoiceRows
from trencadis.core.token_masks.matcher_manager import MatcherManager, PendingSample

if TYPE_CHECKING:
    from trencadis.core.device.backend import Pending


class LaunchedHead(NamedTuple):
    """A SAMPLE in flight. If the matcher manager tracks rows of it, ``pending_sample`` is set and equals ``head``."""

    head: Pending[HeadOutput]
    pending_sample: PendingSample | None = None


def launch_masked(
    rows: Sequence[SampleRow],
    vocab: int,
    manager: MatcherManager,
    launch: Callable[[HeadInputs], Pending[HeadOutput]],
    persistent: HeadInputs | None = None,
) -> LaunchedHead:
    """Launches SAMPLE over ``persistent``, whose rows have no grammar handle, followed by ``rows``, some of which have
    one.

    The host waits for the results of the previous step. The caller has launched this step's text before, so that the
    device has work meanwhile. Steps without handles do not wait and do not call this function.
    """
    first = 0 if persistent is None else len(persistent.slot)
    handles: dict[int, ChoiceRows] = {}
    for i, row in enumerate(rows, first):
        if row.sample.handle:
            begun = handles.get(row.sample.handle, ChoiceRows(i))
            handles[row.sample.handle] = begun._replace(drafts=row.ahead)
    manager.catch_up()
    inputs = head_inputs(rows, vocab, manager.fill)
    draws = manager.track_sample(
        launch(inputs if persistent is None else join_head_inputs(persistent, inputs)), handles
    )
    return LaunchedHead(draws, draws)


RowIndices = NDArray[np.intp]
Launching = Callable[[HeadInputs, bool], "Pending[HeadOutput]"]
"""Launches SAMPLE over rows; the flag selects the full or the greedy variant."""


@dataclass
class JoinedHead:
    """A pending result of both launches, with rows in the Step's order."""

    count: int
    parts: Sequence[tuple[RowIndices, Pending[HeadOutput]]]
    made: HeadOutput | None = None

    def done(self) -> bool:
        """Returns True if ``result`` would not block."""
        return all(head.done() for _, head in self.parts)

    def result(self) -> HeadOutput:
        """Waits for both launches. Log-probabilities of greedy rows are zeros, which are never read."""
        if self.made is None:
            made = HeadOutput(np.zeros(self.count, np.int32))
            for indices, head in self.parts:
                self._put(made, indices, head.result())
            self.made = made
        return self.made

    def _put(self, made: HeadOutput, indices: RowIndices, part: HeadOutput) -> None:
        for name in (each.name for each in dataclasses.fields(HeadOutput)):
            values = getattr(part, name)
            if values is None:
                continue
            if getattr(made, name) is None:
                setattr(made, name, np.zeros((self.count, *values.shape[1:]), values.dtype))
            getattr(made, name)[indices] = values


def launch_split(inputs: HeadInputs, full: NDArray[np.bool_], launch: Launching) -> JoinedHead:
    """Launches the rows of ``inputs`` that are not ``full``, then those that are; returns the joined result."""
    parts = []
    for some, which in ((~full, False), (full, True)):
        indices = np.flatnonzero(some)
        parts.append((indices, launch(select_rows(inputs, indices, which), which)))
    return JoinedHead(len(full), parts)


def select_rows(inputs: HeadInputs, indices: RowIndices, masks: bool) -> HeadInputs:
    """Returns the rows at ``indices``, with all masks or only the first one, which allows everything.

    Rows whose ``ahead`` matters need more than the argmax, so that all rows of their sequence are selected together.
    """
    named = (field.name for field in dataclasses.fields(HeadInputs) if field.name != "masks")
    held = {name: values[indices] for name in named if (values := getattr(inputs, name)) is not None}
    if not masks:
        held = {name: values for name, values in held.items() if name not in ("place", "ahead")}
    return HeadInputs(**held, masks=inputs.masks if masks else inputs.masks[:1])


def join_scores(a: TargetScores, b: TargetScores) -> TargetScores:
    """Joins the scores of two slices of one chunk."""

    def cat(x: Any, y: Any) -> Any:
        return None if x is None or y is None else np.concatenate([x, y])

    head = HeadOutput(
        cat(a.head.token, b.head.token),
        cat(a.head.logprob, b.head.logprob),
        cat(a.head.rank, b.head.rank),
        cat(a.head.top_id, b.head.top_id),
        cat(a.head.top_logprob, b.head.top_logprob),
    )
    return TargetScores(a.positions + b.positions, head)
