"""What is measured on a GPU computes the right thing, and the tuner tries and writes what the tables hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import attention_cases as cases
from tools import tune_kernels
from trencadis.backends.cuda.kernels import tiles

SMALL = cases.Model(4, 2, 16, torch.float32)


def test_benchmark_launches_agree_with_torch(device: torch.device) -> None:
    for case in (cases.decode(SMALL, 3, 40, device), cases.prefill(SMALL, 20, device)):
        assert case.check is not None and case.check() < 1e-4, case.name
        assert case.bytes > 0 and case.flops > 0
    tiny = cases.vision(True, 128, 1, device, heads=1, d=16)
    mine, torchs = tiny.run(), tiny.baselines["sdpa with a mask"]()
    assert isinstance(mine, torch.Tensor) and isinstance(torchs, torch.Tensor)
    torch.testing.assert_close(mine, torchs[0].transpose(0, 1), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", tune_kernels.GRIDS)
def test_present_tiles_are_among_the_candidates(kernel: str) -> None:
    for entry in tiles.table(kernel):
        if entry.arch >= 80:
            assert entry.tile in set(tune_kernels.candidates(kernel, entry)), entry


def test_tables_survive_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {kernel: tiles.table(kernel) for kernel in tune_kernels.GRIDS}
    text = {kernel: (tiles.FOLDER / f"{kernel}.csv").read_text() for kernel in before}
    monkeypatch.setattr(tiles, "FOLDER", tmp_path)
    for kernel, entries in before.items():
        tune_kernels.write(kernel, list(entries))
        assert (tmp_path / f"{kernel}.csv").read_text() == text[kernel]


def test_a_forced_tile_is_used(device: torch.device) -> None:
    q = torch.empty(1, 1, 64, device=device)
    found = tiles.pick("attend_decode", q, 1)
    tiles.FORCED["attend_decode"] = other = tiles.Tile(16, 64, 8, 2)
    try:
        assert tiles.pick("attend_decode", q, 1) == other != found
    finally:
        tiles.FORCED.clear()
