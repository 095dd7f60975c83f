"""Runs SAMPLE as two launches, if rows that take the argmax cost a fraction of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trencadis.core.step import HeadInputs, HeadOutput

if TYPE_CHECKING:
    from trencadis.core.backend import Pending

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
        for name in (field.name for field in dataclasses.fields(HeadOutput)):
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
    return HeadInputs(**held, masks=inputs.masks if masks else inputs.masks[:1])
