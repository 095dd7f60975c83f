"""The claims about an NVIDIA card with their bars."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.claims import Claim

CLAIMS = (
    Claim("decode_top1", "decode", "decoded tokens that a prompt of the same ids would not choose", 0),
    Claim("decode_gap", "decode", "decoded log-probabilities from those of prompts: largest, in noise", 2, False, "x"),
    Claim("decode_mean", "decode", "decoded log-probabilities from those of prompts: mean, in noise", 2, False, "x"),
    Claim(
        "layer_error", "layers", "layers of 3B and 7B, 1 to 16 rows: largest error over bfloat16's noise", 2, False, "x"
    ),
    Claim(
        "layer_mean", "layers", "layers of 3B and 7B, 1 to 16 rows: mean error over bfloat16's noise", 1.5, False, "x"
    ),
    Claim("layer_cache", "layers", "slots of the cache that a layer changed beside its own", 0),
    Claim("layer_moved", "layers", "runs of a layer whose bits differ, of 2,000 of each", 0),
    Claim("layer_early", "layers", "runs whose bits differ from those without dependent launches", 0),
    Claim("kernel_moved", "repeats", "runs of a kernel whose bits differ, of 100 of each case", 0),
    Claim("serves_demo", "demo", "the demo checkpoint answers texts and images", 1, True),
    Claim("serves_three", "three", "a random 3B answers texts and images", 1, True),
    Claim("demo_top1", "demo", "demo, bf16: top-1 of float32 transformers, teacher-forced", 99, True, " %"),
    Claim("three_rate", "three", "random 3B, bf16: mismatches above transformers' bf16, in deviations", 2),
    Claim("three_gap", "three", "random 3B: largest gap of a mismatch over the noise measured", 1, False, "x"),
    Claim("replay", "three", "answers whose tokens or log-probabilities differ between graphs and eager", 0),
    Claim("captures", "mixed", "graphs captured after warm-up, 10,000 mixed requests", 0),
    Claim("jit", "mixed", "kernels compiled after warm-up, 10,000 mixed requests", 0),
    Claim("tpot", "three", "3B, decode TPOT at c=1 over weight bytes / copy bandwidth", 1.35, False, "x"),
    Claim("paces", "paces", "3B, TPOT at 16 to 256 rows over the roofline of the run, worst", 1.6, False, "x"),
    Claim("prompts", "paces", "3B, TTFT at 2k, 8k and 32k over the roofline of the run, worst", 1.6, False, "x"),
    Claim("served", "serve", "serve answers a streamed chat over HTTP", 1, True),
    Claim("encoder", "three", "encoder p99 with graphs below eager, up to 512 image tokens", 30, True, " %"),
    Claim("graphs", "three", "memory of graphs away from its prediction", 10, False, " %"),
    Claim("ledger", "three", "ledger away from mem_get_info, share of the card", 1, False, " %"),
    Claim(
        "gemv8", "quantised", "products of 8-bit weights, 1 row: share of the bandwidth of reading, worst", 0.7, True
    ),
    Claim(
        "gemv4", "quantised", "products of 4-bit weights, 1 row: share of the bandwidth of reading, worst", 0.7, True
    ),
    Claim("tpot8", "quantised", "3B, TPOT at c=1 with int8 weights over bfloat16", 0.62, False, "x"),
    Claim("tpot4", "quantised", "3B, TPOT at c=1 with int4 weights over bfloat16", 0.45, False, "x"),
    Claim(
        "fp8_prefill",
        "quantised",
        "fp8 by fp8, 4,096 rows: times cuBLAS in bfloat16, worst",
        1.3,
        True,
        "x",
    ),
    Claim(
        "block_prefill",
        "quantised",
        "fp8 in blocks of 128, 4,096 rows: times cuBLAS in bfloat16, worst",
        1.3,
        True,
        "x",
    ),
    Claim("drafts1", "drafts", "3B, a predicted answer at c=1: tokens/s over those without drafts", 2, True, "x"),
    Claim("drafts128", "drafts", "3B, predicted answers at c=128: tokens/s over those without", 0.97, True, "x"),
    Claim("adapters32", "adapters", "3B, 8 adapters of rank 16 at c=32: tokens/s over the base's", 0.85, True, "x"),
    Claim("adapter_step", "adapters", "3B: steps with an adapter that comes, over the median", 50, False, " ms"),
    Claim("decode16", "kernels", "decode attention, 16 rows, 2k context: share of copy bandwidth", 0.75, True),
    Claim("decode1", "kernels", "decode attention, 1 row, 32k context: share of copy bandwidth", 0.6, True),
    Claim("prefill", "kernels", "prefill attention, 4k to 16k, bf16: share of torch's best SDPA, worst", 0.75, True),
    Claim("windows", "kernels", "vision windows over SDPA with a mask, worst", 2, True, "x"),
    Claim("head", "kernels", "head over 256 x 151,936: times one read of the logits, worst", 2, False, "x"),
    Claim("small", "kernels", "fused small ops: share of copy bandwidth, worst", 0.8, True),
)
"""In the order of the page."""

BY_ID = {c.id: c for c in CLAIMS}
SMALL_OPS = ("norm", "silu", "rope", "embed", "rows", "patches")
LARGE = 4096
"""Fewest rows or slots at which a small op is judged by bandwidth; below, launching dominates."""


def kernel_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Values of the kernels' claims from the cases of ``kernels.json``; leaves out a claim without cases or with a
    failed one."""
    broken = {r["kernel"] for r in rows if "error" in r}
    rows = [r for r in rows if "error" not in r and r["kernel"] not in broken]

    def named(pattern: str) -> list[Mapping[str, Any]]:
        return [r for r in rows if re.search(pattern, r["name"])]

    def times(r: Mapping[str, Any]) -> list[float]:
        """The best baseline over ours."""
        known = [v for v in r["baselines"].values() if isinstance(v, float | int)]
        return [min(known) / r["microseconds"]] if known else []

    wide = named(r"^quantised (int8|fp8), 1 rows")
    small = [r for r in rows if r["kernel"] in SMALL_OPS and largest(r["name"]) >= LARGE]
    found = {
        "decode16": [r["share"] for r in named(r"^decode .* 16 rows x 2048$")],
        "decode1": [r["share"] for r in named(r"^decode .* 1 rows x 32768$")],
        "prefill": [t for r in named(r"^prefill .* (4096|16384) tokens$") for t in times(r)],
        "windows": [t for r in named(r"^windows ") for t in times(r)],
        "head": [-1 / r["share"] for r in named(r"^head .* 256 x ")],
        "small": [r["share"] for r in small],
        "gemv8": [r["share"] for r in wide],
        "gemv4": [r["share"] for r in named(r"^quantised int4, 1 rows")],
        "fp8_prefill": [t for r in named(r"^quantised fp8 by fp8, 4096 rows") for t in times(r)],
        "block_prefill": [t for r in named(r"^quantised fp8 in blocks, 4096 rows") for t in times(r)],
    }
    return {name: abs(min(values)) for name, values in found.items() if values}


def largest(name: str) -> int:
    """The first size in a case's name: 8192 of ``norm with residual 8192 x 2048``; 0 without one."""
    found = re.search(r"(\d+) (?:x|tokens|slots)", name)
    return int(found[1]) if found else 0
