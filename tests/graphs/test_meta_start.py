"""A start-up without values: the graphs that ``trencadis plan`` counts are those that are captured."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from trencadis.assets import demo_path
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.server.plan.plan_command import make_plan

GAUDI3 = int(126.5 * (1 << 30))


@pytest.mark.parametrize(("length", "rows"), [(512, 2), pytest.param(1024, 4, marks=pytest.mark.long)])
def test_as_many_graphs_as_planned(length: int, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"KIND": "meta", "PROFILE": "gaudi3"}.items():
        monkeypatch.setenv(f"TRENCADIS_HPU_EMULATOR_{name}", value)
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    config = EngineConfig(
        model=str(demo_path()), device="hpu", max_model_len=length, max_num_seqs=rows,
        max_num_batched_tokens=length // 2,
    )  # fmt: skip
    planned = make_plan(config, load_config(demo_path()), GAUDI3)
    begun = time.perf_counter()
    engine = create_engine(config)
    plan = engine.info().graphs
    assert plan is not None and plan.total == GAUDI3
    assert {b.name for b in plan.buckets} == {str(b) for b in planned.plan.buckets}
    assert sum(b.state == "captured" for b in plan.buckets) == sum(len(t) for t in planned.selection.taken.values())
    assert sum(count for _, count in plan.ledger) == plan.total
    print(f"{len(plan.buckets)} graphs in {time.perf_counter() - begun:.1f} s on {os.cpu_count()} cores")
    engine.close()
