"""What a graph of the twin takes: the most that lives at a time within a launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trencadis.backends.cuda.cpu_twin.twin_recording import TwinRecording

MIB = 1 << 20


def test_a_view_of_what_stood_before_the_launch_costs_nothing() -> None:
    cache, rows = torch.zeros(64 * MIB, dtype=torch.uint8), torch.ones(4, MIB, dtype=torch.uint8)
    with TwinRecording() as tape:
        block = cache.view(64, MIB)[2:6]
        block.copy_(rows)
        out = (block + rows).view(-1)[:MIB] * 2
    tape.close(out)
    assert tape.bytes == 5 * MIB, "a sum of 4 MiB, and a product of 1 MiB while the sum lives"


def test_views_of_what_a_launch_made_share_its_memory() -> None:
    rows = torch.ones(4, MIB, dtype=torch.uint8)
    with TwinRecording() as tape:
        made = rows + 1
        out = made.view(-1)[:MIB].view(2, -1)
    tape.close(out)
    assert tape.bytes == 4 * MIB


def test_what_a_launch_returns_of_memory_that_stood_before_is_not_kept_twice() -> None:
    cache = torch.zeros(4 * MIB, dtype=torch.uint8)
    with TwinRecording() as tape:
        out = cache.view(4, MIB)[1], cache[:MIB] + 1
    tape.close(out)
    assert (tape.bytes, tape.kept) == (MIB, MIB)


LINE, SOME = torch.arange(6.0), torch.tensor([0, 2])
UNFIT: dict[str, Callable[[], object]] = {
    "a value": lambda: float(LINE.sum()),
    "rows by a mask": lambda: LINE[LINE > 2],
    "stores by a mask": lambda: LINE.index_put((LINE > 2,), torch.zeros(3)),
    "places of a mask": lambda: torch.where(LINE > 2),
    "a length from values": lambda: LINE[:2].repeat_interleave(SOME),
    "counts": lambda: torch.bincount(SOME),
    "a list that becomes a tensor": lambda: torch.tensor([1, 2]),
    "a list of rows": lambda: LINE[[0, 2]],
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_capture_does_not_permit(name: str) -> None:
    """torch would wait for the card: to know a length, or as it copies from pageable memory."""
    with pytest.raises(RuntimeError, match="capture"), TwinRecording():
        UNFIT[name]()


def test_what_a_capture_permits() -> None:
    def body(x: Tensor) -> Tensor:
        x = x[SOME].repeat_interleave(SOME, output_size=2) + torch.where(LINE > 2, LINE, 0.0)[:2]
        x[0] = 1.0
        return x.masked_fill(x > 2, 0.0)

    with TwinRecording() as tape:
        out = body(LINE)
    tape.close(out)
    assert out.tolist() == [1.0, 2.0]
