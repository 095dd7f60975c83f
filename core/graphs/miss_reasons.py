"""Reasons why a launch had no graph: the ``reason`` label of ``graph_bucket_misses_total``. Torch-free."""

from __future__ import annotations

UNPLANNED = "unplanned"
SKIP = "skip"
WARMING = "warming"
POOL_FULL = "pool_full"
FAILED = "failed"
RELEASED = "released"
EAGER = "eager"
NO_GRAPHS = "no_graphs"
LARGE = "large"

MEANINGS = {
    UNPLANNED: "the need lies above every planned bucket",
    SKIP: "warm-up was skipped and this is the bucket's first use",
    WARMING: "background warm-up has not come to the bucket yet",
    POOL_FULL: "its pool, or the device, cannot pay for the graph",
    FAILED: "its capture or compilation failed, or an earlier start ended in it",
    RELEASED: "the graph was given up when memory ran out",
    EAGER: "--enforce-eager",
    LARGE: "the launch is too large to gain from a graph",
    NO_GRAPHS: "the device has no graphs in this mode",
}
