"""Starts of models with recurrent layers over a grid of utilisations and reserves: none fails because of graphs.

As ``test_grid``: each size starts once on an emulated card without values, and then at every utilisation and reserve on
a card that books what that start recorded. Sequences and snapshots of states share the memory with the KV cache.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.meta_start import GIB, config_of, on_paper, run
from tests.fakes.recorded_card import Records
from tests.graphs.test_grid import RESERVES, SHORT, UTILISATIONS, Grid, card
from tests.plan.test_states import EXPERTS, LARGE
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig

TEXT = ImageNeeds()
SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "0.8B": (
        {
            "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
            "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
        }, 1,
    ),
    "9B": (
        {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
            "linear_num_value_heads": 32,
        }, 1,
    ),
    "27B": ({}, 1),
    "27B, two ranks": ({}, 2),
    "35B-A3B": (EXPERTS, 1),
}  # fmt: skip
"""Name of a size -> (keys of config.json that differ from Qwen3.6-27B's, number of ranks)."""
LINES: dict[str, dict[str, Any]] = {
    "two sequences": SHORT,
    "as many as fit": {"max_model_len": 4096, "max_num_seqs": None, "max_num_batched_tokens": 2048},
    "no snapshots": {**SHORT, "max_num_seqs": 16, "state_snapshot_memory": 0.0},
}


def model_of(folder: Path, keys: dict[str, Any]) -> ModelConfig:
    """A model of these sizes, of which there is no file but config.json."""
    (folder / "config.json").write_text(json.dumps(LARGE | keys))
    return load_config(folder)


def play(folder: Path, size: str, line: dict[str, Any], layers: int = 0, every: int = 1) -> Counter[str]:
    """How many of the grid's starts came up, were refused with a setting that does, and cannot fit at all.

    ``every``: of so many starts one; every second on a card on which little is left beside the weights.
    """
    keys, ranks = SIZES[size]
    model = model_of(folder, keys | ({"num_hidden_layers": layers} if layers else {}))
    started = run(model, config_of(**line, graph_reserved_mem=0.5), TEXT, card(65536 * GIB), ranks)
    records = Records()
    records.take(started)
    taken = on_paper(model, config_of(**line), TEXT, 96 * GIB, ranks).ledger.memory_in_use.taken
    totals = 96 * GIB, taken + (512 << 20)
    large, small = (Grid((model, ranks), TEXT, line, records, total) for total in totals)
    cases = list(enumerate(itertools.product(UTILISATIONS, RESERVES)))[::every]
    return Counter((small if i % 2 else large).play(*case, i) for i, case in cases)


@pytest.fixture(autouse=True)
def first_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start is a model's first."""
    monkeypatch.setenv("TRENCADIS_CACHE", "/dev/null/none")


def test_a_few_starts(tmp_path: Path) -> None:
    found = play(tmp_path, "0.8B", LINES["two sequences"], layers=4, every=5)
    assert sum(found.values()) == 8 and found["starts"] >= 3, found


@pytest.mark.long
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("size", SIZES)
def test_all_starts(size: str, line: str, tmp_path: Path) -> None:
    found = play(tmp_path, size, LINES[line])
    print(f"{size}, {line}: {dict(found)}")
    assert sum(found.values()) == 40
