"""SAMPLE with masks that depend on tokens of the step before: the desk takes those first, then fills the masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trencadis.core.launches.inputs import SampleRow, head_inputs, joined
from trencadis.core.masks.desk import Desk, FollowedDraws
from trencadis.core.step import HeadInputs, HeadOutput

if TYPE_CHECKING:
    from trencadis.core.backend import Pending


class LaunchedHead(NamedTuple):
    """A SAMPLE that is on its way; ``followed`` where the desk follows rows of it, which is ``head`` then."""

    head: Pending[HeadOutput]
    followed: FollowedDraws | None = None


def launch_followed(
    rows: Sequence[SampleRow],
    vocab: int,
    desk: Desk,
    launch: Callable[[HeadInputs], Pending[HeadOutput]],
    seated: HeadInputs | None = None,
) -> LaunchedHead:
    """Launches SAMPLE over the rows ``seated``, which have no handle, and then ``rows``, some of which have one.

    The host waits for the fetch of the step before: its caller has launched this step's text already, so that the
    device has work meanwhile. Steps without handles wait for nothing, and do not come here.
    """
    first = 0 if seated is None else len(seated.slot)
    handles = {row.sample.handle: i for i, row in enumerate(rows, first) if row.sample.handle}
    desk.catch_up()
    inputs = head_inputs(rows, vocab, desk.fill)
    draws = desk.follow(launch(inputs if seated is None else joined(seated, inputs)), handles)
    return LaunchedHead(draws, draws)
