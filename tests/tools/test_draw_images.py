"""The figures of docs/images.md are what the code lays out today."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import draw_images

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", draw_images.FIGURES)
def test_a_committed_figure_is_up_to_date_and_shown(name: str) -> None:
    drawn = draw_images.FIGURES[name]()
    assert (ROOT / "docs" / "figures" / f"{name}.svg").read_text() == drawn, "run tools/draw_images.py"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert f"figures/{name}.svg" in (ROOT / "docs" / "images.md").read_text()


def test_sizes_in_the_table() -> None:
    from trencadis.multimodal.patch_packing import count_slots, count_tokens, patch_grid
    from trencadis.multimodal.qwen2_vl.smart_resize import smart_resize

    rows = [line.split("|")[1:5] for line in (ROOT / "docs" / "images.md").read_text().splitlines() if " x " in line]
    found = 0
    for cells in rows:
        sizes = [c.split(" x ") for c in cells[:2]] if len(cells) == 4 else []
        if len(sizes) == 2 and all(len(s) == 2 and all(p.strip().isdigit() for p in s) for s in sizes):
            (w, h), (rw, rh) = ([int(p) for p in s] for s in sizes)
            assert smart_resize(h, w) == (rh, rw)
            grid = patch_grid(rh, rw)
            assert [int(c.replace(",", "")) for c in cells[2:]] == [count_tokens(grid), count_slots(grid)]
            found += 1
    assert found == 5
