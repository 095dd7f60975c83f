"""Starts with quantised weights over a grid of utilisations: none fails, the ledger adds up, `plan` says the same."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.meta_start import GIB, card, config_of, on_paper, run
from tests.fakes.recorded_card import Records
from tests.graphs.test_grid import SHORT, Grid, images_of, of_sizes
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.quant_config import online
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.kv_cache_format import RESERVED_BLOCKS, parse_kv_format
from trencadis.core.memory.memory_estimator import MemoryEstimator

PIXELS = 50_176


@pytest.fixture(autouse=True)
def first_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every start is a model's first."""
    monkeypatch.setenv("TRENCADIS_CACHE", "/dev/null/none")
    thaw = gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    yield
    thaw()


def in_fp8(index: int) -> tuple[ModelConfig, int]:
    """A model whose weights and cache become 8-bit floats, and its ranks."""
    model, ranks = of_sizes(index)
    text = dataclasses.replace(model.text, kv=parse_kv_format("fp8", model.text.head_dim, model.text.qkv_bias))
    return dataclasses.replace(model, text=text, quant=online("fp8")), ranks


def grid_of(index: int, total: int) -> Grid:
    """Starts of a model in 8-bit floats; checks that ``plan`` prices what the first one holds."""
    model, ranks = in_fp8(index)
    plain = of_sizes(index)[0]
    started = run(model, config_of(**SHORT, graph_reserved_mem=0.5), images_of(PIXELS), card(4096 * GIB), ranks)
    paper = dict(on_paper(model, config_of(**SHORT), images_of(PIXELS), 4096 * GIB, ranks).ledger.rows())
    assert paper["weights"] == started.rows["weights"]
    blocks = started.cache.num_blocks + RESERVED_BLOCKS
    block = started.start.paper.estimator.block_bytes(128)
    assert started.rows["KV cache"] == blocks * block and 1.85 * block < MemoryEstimator(plain, 2, ranks).block_bytes(
        128
    )
    wide = dict(on_paper(plain, config_of(**SHORT), images_of(PIXELS), 4096 * GIB, ranks).ledger.rows())
    assert paper["weights"] < wide["weights"]
    records = Records()
    records.take(started)
    return Grid((model, ranks), images_of(PIXELS), SHORT, records, total)


@pytest.mark.long
def test_a_start_with_floats_of_8_bits() -> None:
    """Of weights and cache."""
    grid = grid_of(1, 96 * GIB)
    assert {grid.play(utilisation, 0.1, i) for i, utilisation in enumerate((0.50, 0.99))} == {"starts"}


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 2, 5, 8, 12])
def test_every_utilisation_with_floats_of_8_bits(index: int) -> None:
    """Of weights and cache: 0.50 to 0.99 on a card that holds little more than the weights, and on a large one."""
    quantised, ranks = in_fp8(index)
    taken = on_paper(quantised, config_of(**SHORT), images_of(PIXELS), 4096 * GIB, ranks).ledger.memory_in_use.taken
    found = Counter(
        grid.play(percent / 100, reserve, percent)
        for grid in (grid_of(index, taken + (1 << 30)), grid_of(index, 96 * GIB))
        for percent in range(50, 100)
        for reserve in (0.1, 0.4)
    )
    print(f"model {index}: {dict(found)}")
    assert sum(found.values()) == 200 and found["starts"] >= 50


@pytest.mark.long
@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_every_utilisation_of_the_twin(method: str, vl_checkpoint: Path) -> None:
    """With a cache in fp8, or in int8 where weights are integers."""
    flags: dict[str, Any] = {
        "device": "cuda", "policy": "twin", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "block_size": 16, "encoder_cache_images": 2, "quantization": method,
        "kv_cache_dtype": "fp8" if method == "fp8" else "int8",
        "num_gpu_blocks_override": 12, "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
    }  # fmt: skip
    for percent in range(50, 100, 7):
        engine = create_engine(EngineConfig(model=str(vl_checkpoint), gpu_memory_utilization=percent / 100, **flags))
        try:
            captures: Any = engine._watch.captures  # type: ignore[union-attr]
            captures.observe()
            rows, memory = dict(captures.ledger.rows()), engine.executor._rank.graphs.backend.memory  # type: ignore[attr-defined]
            assert sum(rows.values()) == memory.total()
            assert memory.free() == rows["margin"] + rows["graph reserve unused"]
        finally:
            engine.close()
