"""Starts of a model whose layers attend to images, on cards of many sizes: none fails.

The whole 11B starts once on an emulated card without values; then the whole start-up runs at 2,000 utilisations on
cards that book the bytes which that start recorded. What cannot fit is refused with a setting that does start.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.meta_start import GIB, card, config_of, on_paper, run
from tests.fakes.recorded_card import Records
from tests.graphs import test_grid
from tests.vision.cross_attention.test_plans import HUB
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs

LINE: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 2, "max_num_batched_tokens": 128}
RESERVES = (0.0, 0.1, 0.2, 0.4, 0.6)


@pytest.fixture(autouse=True)
def first_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start is a model's first."""
    monkeypatch.setenv("TRENCADIS_CACHE", "/dev/null/none")


class Cards(test_grid.Grid):
    """A shorter context has other buckets, beside those that are recorded: nearly full cards could not record all."""

    def known(self, ranks: int, other: tuple[tuple[str, Any], ...]) -> Records:
        held = self.records[self.ranks, ()].of if ranks == self.ranks else {}
        return self.records.setdefault((ranks, other), Records(dict(held)))


def started(folder: Path, raw: dict[str, Any], count: int) -> Counter[str]:
    """How ``count`` starts went: on a large card, and on three that the model nearly fills."""
    (folder / "config.json").write_text(json.dumps(raw))
    model = load_config(folder)
    needs, records = image_needs(model, {}), Records()
    for more in ({}, {"encoder_cache_images": 2}):  # as refusals propose
        records.take(run(model, config_of(**LINE, **more, graph_reserved_mem=0.5), needs, card(65536 * GIB)))
    taken = on_paper(model, config_of(**LINE), needs, 256 * GIB).ledger.memory_in_use.taken
    totals = (96 * GIB, taken + (256 << 20), taken + (512 << 20), taken + (2 << 30))
    grids = [Cards((model, 1), needs, LINE, records, total) for total in totals]
    found = Counter[str]()
    for i, utilisation in enumerate(np.linspace(0.5, 0.99, count).tolist()):
        found[grids[i % len(grids)].play(utilisation, RESERVES[i // len(grids) % len(RESERVES)], i)] += 1
    return found


@pytest.mark.long
def test_two_thousand_starts_of_the_11b(tmp_path: Path) -> None:
    begun = time.perf_counter()
    found = started(tmp_path, HUB, 2000)
    print(f"\n{dict(found)} in {time.perf_counter() - begun:.0f} s")
    assert found.total() == 2000 and found["starts"] >= 1000 and found["refused"] >= 300
