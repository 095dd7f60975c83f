"""What a card would run of a decoder layer of few rows: dependent launches that wait, loads of 16 bytes, no spill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracles.layers.compiled_layers import SCRIPT, apart, facts, wrong
from tools.compiled.assembly import read


@pytest.mark.long
def test_every_launch_of_a_layer(tmp_path: Path) -> None:
    """Products of 3B, 7B, 72B on four cards and Llama 8B, and attention by size of head, in 16 bits."""
    found = facts(apart(SCRIPT, tmp_path, "all", "80", "86", "90", "100", "120"))
    bad = [f"{f['kernel']}, {f['case']}, sm_{f['arch']}: {wrong(f)}" for f in found if wrong(f)]
    assert not bad, "\n".join(bad)
    dependent = sum(f["arch"] >= 90 for f in found)
    products = sum(f["kernel"] == "skinny_kernel" for f in found)
    print(f"\n{len(found)} launches, {dependent} of them dependent; {products} products; all wait and none spills")


def test_instructions_are_read() -> None:
    text = """
        prefetch.global.L2 [%rd1];
        griddepcontrol.wait;
        @%p1 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd2 + 0 ], 0x10, %r3;
        cp.async.ca.shared.global [ %r1 ], [ %rd2 ], 8;
        prefetch.global.L2 [%rd1];
        ld.global.cg.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 ];
        ld.global.b16 { %rs1 }, [ %rd1 ];
        ld.global.L1::evict_first.v2.b32 { %r1, %r2 }, [ %rd1 ];
        ld.shared.v4.b32 { %r1 }, [ %r2 ];
        griddepcontrol.launch_dependents;
    """
    assert read(text) == ({16: 1, 8: 1}, {16: 1, 2: 1, 8: 1}, 1, 1, 1)
