"""A turn of a trace as a request: its block keys, and what the router sees of it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.traces.sessions import Session, Turn
from trencadis.server.processes.replica_wait_prediction import (
    Assignment,
    RequestCost,
    RoutedImage,
    RoutedPrefix,
    is_indexed_prefix,
)

MASK = (1 << 62) - 1


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through a replica.

    Args:
        keys: of its prompt's full blocks.
        later: of the full blocks that its answer completes.
        done: prompt tokens whose KV is there; ``hit``: those that a cache held.
        encoded: images that were encoded for it.
        asked: whether its pixels have been asked for, so that they are there in the next step.
    """

    turn: Turn
    work: RequestCost
    keys: list[int]
    later: list[int]
    ticket: Assignment | None = None
    done: int = 0
    hit: int = 0
    encoded: int = 0
    asked: bool = False
    room: int = 0
    """Blocks of its own, which have no key."""
    ends: int = 0
    """Number of the step that draws its last token."""


def keys_of(session: Session, count: int, block: int) -> list[int]:
    """Keys of the session's first ``count`` blocks: equal keys are equal content with an equal past."""
    ident, end = hash((1, session.system)), session.system_tokens
    made: list[int] = []
    for shown in session.images:
        made.extend(hash((ident, i)) & MASK for i in range(len(made), min(end // block, count)))
        ident, end = hash((ident, 2, shown.id)), end + shown.tokens
    made.extend(hash((ident, i)) & MASK for i in range(len(made), min(end // block, count)))
    ident = hash((ident, 3, session.number))
    made.extend(hash((ident, i)) & MASK for i in range(len(made), count))
    return made


def job_of(turn: Turn, block: int) -> Job:
    """The request of a turn. At least one token of a prompt is computed, so a block that ends with it is no prefix."""
    full, whole = turn.prompt // block, (turn.prompt + turn.output - 1) // block
    keys = keys_of(turn.session, whole, block)
    unit = max(128 // block, 1)
    limit = (turn.prompt - 1) // block
    prefixes = [
        RoutedPrefix(keys[i - 1], i * block) for i in range(unit, limit + 1, unit) if is_indexed_prefix(i // unit)
    ]
    images = [RoutedImage(s.id, s.slots, s.offset + s.tokens) for s in turn.session.images]
    return Job(turn, RequestCost(turn.prompt, prefixes, images, turn.output), keys[:full], keys[full:])
