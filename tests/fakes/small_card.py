"""A rank whose card has less memory than rank 0's; what it was divided into goes to a file."""

from __future__ import annotations

import os
from pathlib import Path

from trencadis.core.engine.engine_builder import OpenedRank, rank_of
from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor.rank_info_and_fingerprint import RankInfo
from trencadis.core.startup_progress_and_warmup_pacing import Progress


def make(config: EngineConfig, place: RankInfo, progress: Progress) -> OpenedRank:
    """``core.engine.engine_builder.rank_of`` on a smaller card."""
    os.environ["TRENCADIS_HPU_EMULATOR_PROFILE"] = "gaudi2"
    opened = rank_of(config, place, progress)
    assert opened.watch is not None and opened.watch.captures is not None
    Path(os.environ["SMALL_CARD_REPORT"]).write_text(f"{opened.watch.captures.memory_split} {opened.plan.num_blocks}")
    return opened
