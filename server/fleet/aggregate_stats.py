"""Combines counters of several engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from trencadis.core.process.engine_messages import EngineInfo, EngineStats, GraphCounters

Number = TypeVar("Number", int, float)


def _sum_by_name(parts: Sequence[Mapping[str, Number]]) -> dict[str, Number]:
    """Returns the sums by name."""
    found: dict[str, Number] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found[name] + value if name in found else value
    return found


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Returns the sums of counters and gauges. Lists, which contain only new entries, are left empty."""
    made = EngineStats()
    for one in dataclasses.fields(EngineStats):
        if isinstance(getattr(made, one.name), int):
            setattr(made, one.name, sum(getattr(s, one.name) for s in stats))
    warming = [s.graphs.warming for s in stats if s.graphs.warming is not None]
    made.graphs = GraphCounters(
        sum(s.graphs.lazy_compiles for s in stats),
        sum(s.graphs.recompiles for s in stats),
        _sum_by_name([s.graphs.bytes for s in stats]),
        min(warming, key=lambda w: w.fraction, default=None),
        _sum_by_name([s.graphs.capture_seconds for s in stats]),
        sum(s.graphs.graph_breaks for s in stats),
    )
    return made


def merge_infos(infos: Sequence[EngineInfo | None]) -> EngineInfo | None:
    """Merges the engine infos: smallest ``max_model_len``, sum of blocks; None until one engine is up."""
    known = [info for info in infos if info is not None]
    if not known:
        return None
    return dataclasses.replace(
        known[0],
        max_model_len=min(info.max_model_len for info in known),
        num_blocks=sum(info.num_blocks for info in known),
        arena_rows=sum(info.arena_rows for info in known),
        kv_bytes=sum(info.kv_bytes for info in known),
        arena_bytes=sum(info.arena_bytes for info in known),
    )
