"""SAMPLE for rows whose masks depend on tokens of the previous step: waits for these tokens, then fills the masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trencadis.core.launches.host_inputs import SampleRow, head_inputs, join_head_inputs
from trencadis.core.masks.draft_masks import ChoiceRows
from trencadis.core.masks.manager import MatcherManager, PendingSample
from trencadis.core.step import HeadInputs, HeadOutput

if TYPE_CHECKING:
    from trencadis.core.backend import Pending


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
