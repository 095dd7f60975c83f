"""What graphs keep, by the formula, beside logs of warm-ups that were published (docs/hpu-internals.md, "Memory").

The logs are of vllm-fork and an 8B model on a Gaudi 2. Its source of that time cuts a layer before and after attention;
which tensors are alive there was read in it, and that the residual stream counts twice is what the prompt graphs of the
first log say. The constant of a graph comes from its decode graphs. The other logs were not used.
"""

from __future__ import annotations

import pytest

from trencadis.core.memory.launch_memory import kept_by_cuts
from trencadis.core.memory.memory_estimator import GRAPH

pytestmark = pytest.mark.part("gaudi")

MIB, GIB = 1 << 20, 1 << 30
LAYERS, HIDDEN, HEADS, KV_HEADS, D = 32, 4096, 32, 8, 128
LENGTHS = [128 * n for n in range(1, 9)]
ROWS = (1, 2, 4)

LAYER = 2 * (2 * HIDDEN + (HEADS + 2 * KV_HEADS) * D + (HEADS + KV_HEADS) * D + HEADS * D)
"""Bytes of a token that the cuts of one of its layers keep: 23 x 1024 values."""


def cost(tokens: list[int]) -> int:
    """Bytes of graphs with these many tokens."""
    return sum(kept_by_cuts(n, LAYER, LAYERS) + GRAPH for n in tokens)


PROMPTS = sorted(r * n for r in ROWS for n in LENGTHS)
"""Tokens of the 24 prompt buckets, smallest first, as they are captured."""

DECODES = [r for r in ROWS for _ in range(16)]
"""Rows of the 48 decode buckets: 16 lengths each."""


def near(found: float, published: float, share: float = 0.25) -> bool:
    print(f"{found / MIB:.2f} MiB by formula, {published / MIB:.2f} published: {100 * (found / published - 1):+.2f} %")
    return abs(found - published) <= share * published


def test_prompt_graphs_of_the_first_log() -> None:
    """17:37 on 2 August 2024: 15 prompt graphs, 9,984 tokens, 14.03 GiB."""
    assert sum(PROMPTS[:15]) == 9984
    assert near(cost(PROMPTS[:15]), 14.03 * GIB)


def test_decode_graphs_of_the_first_log() -> None:
    """48 graphs of 112 rows, 161.9 MiB."""
    assert near(cost(DECODES), 161.9 * MIB)


def test_prompt_graphs_of_a_second_log() -> None:
    """15:30 of that day, with a larger share for prompts: 26.63 of 27.16 GiB are taken when the next does not fit."""
    captured = max(n for n in range(25) if cost(PROMPTS[:n]) <= 27.16 * GIB)
    assert captured == 20
    assert near(cost(PROMPTS[:captured]), 26.63 * GIB)


def test_each_graph_of_the_first_log() -> None:
    """Free memory before each of four captures: 1.44 GiB for 4 x 256 tokens, 1.43 for 2 x 512, 1.45 for 1 x 1024."""
    for published in (47.35 - 45.91, 45.91 - 44.48, 44.48 - 43.03):
        assert near(cost([1024]), published * GIB, 0.05)


def test_graphs_without_a_tensor_cache() -> None:
    """24 September 2024, the cache off: inputs and outputs alone. 24 prompt graphs 67.72 MiB, a decode graph 64 KiB.

    A prompt graph's inputs hold three indices of 8 bytes a token, and a mask and a bias of its rows (1 and 2 bytes a
    pair); a decode graph's a bias of 2 bytes for each place of 128 blocks. Outputs are hidden states of last tokens.
    """
    hidden = 2 * HIDDEN
    prompts = sum(3 * r * n * n + 24 * r * n + hidden * r for r in ROWS for n in LENGTHS)
    assert near(prompts, 67.72 * MIB)
    assert near(128 * 128 * 2 + 4 * hidden, 64 << 10)
