"""What a graph of the twin takes: the most that lives at a time within a launch."""

from __future__ import annotations

import torch

from trencadis.backends.cuda.twin.tape import TwinTape

MIB = 1 << 20


def test_a_view_of_what_stood_before_the_launch_costs_nothing() -> None:
    cache, rows = torch.zeros(64 * MIB, dtype=torch.uint8), torch.ones(4, MIB, dtype=torch.uint8)
    with TwinTape() as tape:
        block = cache.view(64, MIB)[2:6]
        block.copy_(rows)
        out = (block + rows).view(-1)[:MIB] * 2
    tape.close(out)
    assert tape.bytes == 5 * MIB, "a sum of 4 MiB, and a product of 1 MiB while the sum lives"


def test_views_of_what_a_launch_made_share_its_memory() -> None:
    rows = torch.ones(4, MIB, dtype=torch.uint8)
    with TwinTape() as tape:
        made = rows + 1
        out = made.view(-1)[:MIB].view(2, -1)
    tape.close(out)
    assert tape.bytes == 4 * MIB


def test_what_a_launch_returns_of_memory_that_stood_before_is_not_kept_twice() -> None:
    cache = torch.zeros(4 * MIB, dtype=torch.uint8)
    with TwinTape() as tape:
        out = cache.view(4, MIB)[1], cache[:MIB] + 1
    tape.close(out)
    assert (tape.bytes, tape.kept) == (MIB, MIB)
