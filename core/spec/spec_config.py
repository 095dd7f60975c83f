"""The settings of speculation, as the engine uses them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST, LONGEST = 2, 4
"""Default lengths in ids of the suffixes that are looked up."""

TEXTS = ("ngram", "suffix")
"""Sources of drafts that need no model."""

DRAFT_MODEL = "draft_model"
"""Drafts come from a smaller model of the same tokenizer."""

EAGLE3 = "eagle3"
"""Drafts come from a head over hidden states of the target model."""

METHODS = (*TEXTS, DRAFT_MODEL, EAGLE3)

MOST_DRAFTS = 16
"""Largest number of drafts of a sequence in one step."""

DEFAULT_DRAFTS = 4
DEFAULT_ROWS = 4
"""Largest number of running sequences that are drafted where nothing is asked for."""

FORCED_IDS = 32
"""Most ids that a step takes from masks that hold one id alone."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How sequences are drafted.

    Args:
        method: source of drafts, one of ``METHODS``; empty: only predictions of requests are drafted.
        drafts: most drafts of a sequence in one step.
        shortest, longest: lengths in ids of the suffixes that are looked up.
        rows: with more running sequences nothing is drafted; 0: no bound.
        always: draft whatever it costs, for tests.
        skipped: ids that are never drafted (placeholders of images).
        model: folder of the model or head that drafts; empty: none does.
        forced: most ids that a step takes from masks that hold one id alone; 0: none.
    """

    method: str = "ngram"
    drafts: int = DEFAULT_DRAFTS
    shortest: int = SHORTEST
    longest: int = LONGEST
    rows: int = 0
    always: bool = False
    skipped: frozenset[int] = frozenset()
    forced: int = FORCED_IDS
    model: str = ""
