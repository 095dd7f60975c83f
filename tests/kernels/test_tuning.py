"""What is measured on a GPU computes the right thing, and the tuner tries and writes what the tables hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.kernels import attention_cases as cases
from benchmarks.kernels import layer_cases
from tools import tune_kernels
from trencadis.backends.cuda.kernels import tile_sizes


def test_benchmark_launches_agree_with_torch(device: torch.device) -> None:
    checked = 0
    for case in cases.cases(device, small=True):
        assert case.bytes > 0 and case.bound in ("bytes", "flops")
        if case.check is not None:
            assert case.check() < (1e-4 if "float32" in case.name else 2e-2), case.name
            checked += 1
    assert checked == 9


def test_layers_and_experts_of_the_benchmark_agree_with_torch(device: torch.device) -> None:
    checked = [case.check() for case in layer_cases.cases(device, small=True) if case.check is not None and case.bytes]
    assert len(checked) == 7 and max(checked) < 1e-4, checked


@pytest.mark.parametrize("kernel", tune_kernels.GRIDS)
def test_present_tiles_are_among_the_candidates(kernel: str) -> None:
    for entry in tile_sizes.table(kernel):
        if entry.arch >= 80:
            assert entry.tile in set(tune_kernels.candidates(kernel, entry)), entry


def test_every_table_is_tuned() -> None:
    assert set(tune_kernels.GRIDS) == {path.stem for path in tile_sizes.FOLDER.glob("*.csv")}


def test_tiles_like_the_present_one_are_tried_first() -> None:
    entry = next(e for e in tile_sizes.table("attend_prefill") if e.arch == 90 and e.length == "long")
    first, *rest = tune_kernels.candidates("attend_prefill", entry)
    apart = [tune_kernels.unlikeness(tile, entry.tile) for tile in rest]
    assert first == entry.tile and apart == sorted(apart) and apart[0] > 0


def test_a_list_of_heads_leaves_out_no_product() -> None:
    for kernel in tune_kernels.GRIDS:
        found = list(tune_kernels.wanted_entries(kernel, 90, (128, 80), 16))
        entries = tune_kernels.all_entries(kernel, 90)
        assert found and all(entries[i].arch == 90 and entries[i].bits == 16 for i in found), kernel
        if kernel not in tune_kernels.PRODUCTS:
            assert {entries[i].head for i in found} <= {128, 80}


def test_tables_survive_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {kernel: tile_sizes.table(kernel) for kernel in tune_kernels.GRIDS}
    text = {kernel: (tile_sizes.FOLDER / f"{kernel}.csv").read_text() for kernel in before}
    monkeypatch.setattr(tile_sizes, "FOLDER", tmp_path)
    for kernel, entries in before.items():
        tune_kernels.write(kernel, list(entries))
        assert (tmp_path / f"{kernel}.csv").read_text() == text[kernel]


def test_a_forced_tile_is_used(device: torch.device) -> None:
    q = torch.empty(1, 1, 64, device=device)
    found = tile_sizes.pick("attend_decode", q, 1)
    tile_sizes.FORCED["attend_decode"] = other = tile_sizes.Tile(16, 64, 8, 2)
    try:
        assert tile_sizes.pick("attend_decode", q, 1) == other != found
    finally:
        tile_sizes.FORCED.clear()


def test_lines_of_any_length_come_after_those_of_each_class() -> None:
    """A long prompt over codes has the tile of its heads, not the one of the largest heads, whose line is for all."""
    for arch in (80, 90):
        long = tile_sizes.find("attend_prefill_codes", arch, 16, 64, 7, "long")
        assert tile_sizes.find("attend_prefill_codes", arch, 16, 64, 7, "plain", "long") == long
        assert long.m == 64
