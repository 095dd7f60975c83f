"""Ranks on cards of different sizes divide the memory of the smallest."""

from __future__ import annotations

from pathlib import Path

import pytest

from trencadis.assets import demo_path
from trencadis.core.engine.engine_builder import open_rank
from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor.multiproc_executor import MultiprocExecutor
from trencadis.core.startup_progress_and_warmup_pacing import SilentProgress

GAUDI2, GAUDI3 = int(94.62 * (1 << 30)), int(126.5 * (1 << 30))
HCCL = 384 << 20
"""Bytes that a card of a group leaves to HCCL (``PT_HCCL_MEMORY_ALLOWANCE_MB``)."""


def test_the_smallest_card_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Gaudi 3 and a Gaudi 2."""
    report = tmp_path / "report"
    for name, value in {
        "SMALL_CARD_REPORT": str(report), "TRENCADIS_HPU_EMULATOR": "1",
        "TRENCADIS_HPU_EMULATOR_PROFILE": "gaudi3", "TRENCADIS_CACHE": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    config = EngineConfig(
        model=str(demo_path()), device="hpu", tensor_parallel_size=2, max_model_len=512, max_num_seqs=4,
        max_num_batched_tokens=256, warmup="skip", mm_processor_kwargs={"max_pixels": 50_176},
    )  # fmt: skip
    group = MultiprocExecutor(config, "tests.fakes.small_card:make")
    try:
        opened = group.start(lambda place: open_rank(config, place, SilentProgress()))
        assert opened.watch is not None and opened.watch.captures is not None
        ledger, division = opened.watch.captures.ledger, opened.watch.captures.memory_split
        assert report.read_text() == f"{division} {opened.plan.num_blocks}"
        assert ledger.memory_in_use.total == GAUDI3 - HCCL and division.kv + division.graphs < GAUDI2
        assert sum(count for _, count in ledger.rows()) == GAUDI3 - HCCL
    finally:
        group.close()
