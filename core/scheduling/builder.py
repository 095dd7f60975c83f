"""The step that the scheduler is putting together, and one in flight. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from trencadis.core.scheduling.encoder import VisionBuilder
from trencadis.core.scheduling.sequence import Sequence
from trencadis.core.step import Opening, Reset, Row


@dataclass(slots=True)
class StepBuilder:
    """The step that ``schedule`` is putting together."""

    tokens: int  # budget that is left
    vision: VisionBuilder
    decoding: int = 0  # running sequences, not yet reached, that want one token
    image_prompts: bool = False  # a prompt with images took tokens
    reserved: int = 0  # blocks reserved for sequences that wait for pending frees
    preempted: bool = False
    rows: list[Row] = field(default_factory=list)
    scheduled: list[Sequence] = field(default_factory=list)
    resets: list[Reset] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A submitted Step: the sequences that it computes or draws for, and those that it encodes images for."""

    number: int
    scheduled: list[Sequence]
    encoded: list[Sequence]
