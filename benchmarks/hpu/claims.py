"""The claims about a Gaudi with their bars: each is a question that only a card can answer."""

from __future__ import annotations

from functools import partial

from benchmarks.harness.claims import Claim

_Claim = partial(Claim, program="benchmarks.hpu")

CLAIMS = (
    _Claim("fetches", "device", "results read while the next launch runs that are wrong, of 1,000", 0),
    _Claim("fills", "device", "launches that read another launch's inputs, of 1,000", 0),
    _Claim("fill_us", "device", "filling a DECODE launch of 64 rows, 2,048 blocks: microseconds", 300),
    _Claim("fetch_us", "device", "waiting for 64 sampled tokens: microseconds", 300),
    _Claim("record_us", "device", "filling a launch while a thread waits for a result: microseconds", 600),
    _Claim("thresholds_ms", "device", "thresholds of top-k and top-p, 32 x 151,936: milliseconds", 3),
    _Claim("dispatch_us", "device", "compile mode: the host's time to dispatch a region, microseconds", 120),
    _Claim("experts", "device", "mixture_of_experts has the values of the product over all experts", 1, True),
    _Claim("fp8_experts", "device", "the same by 8-bit floats", 1, True),
    _Claim("pinned", "device", "host memory is pinned, so that copies do not block", 1, True),
    _Claim("oom_text", "device", "the error of a tensor that does not fit is known as a lack of memory", 1, True),
    _Claim("product", "device", "a product of bfloat16 into float32 runs and is exact", 1, True),
    _Claim("attend_ms", "device", "DECODE attention of a 7B's layer, 64 rows, 2,048 blocks: milliseconds", 1),
    _Claim("attend_parts", "device", "the same with TRENCADIS_HPU_DECODE_FUSEDSDPA=1 over without", 1, False, "x"),
    _Claim("experts_ms", "device", "8 of 128 experts of Qwen3-30B-A3B, one token: milliseconds", 0.3),
    _Claim("in_place", "device", "a launch that stores into a large cache over a small one, time", 1.2, False, "x"),
    _Claim("released", "device", "share of a released graph's bytes that come back", 0.9, True),
    _Claim("demo_tokens", "demo", "demo, float32: answers whose tokens are not the CPU's", 0),
    _Claim("demo_top1", "demo", "demo, bf16: top-1 of our own float32 on the CPU, teacher-forced", 99, True, " %"),
    _Claim("graph_breaks", "demo", "parts compiled with graph breaks, or not at all, in start-up and answers", 0),
    _Claim("fallbacks", "demo", "operations that ran on the host, in start-up and answers", 0),
    _Claim("vision_refused", "demo", "image launches that compile-only mode refuses: why they are run instead", 0),
    _Claim("restart", "demo", "recipes compiled by a second start", 0),
    _Claim("captures", "mixed", "graphs captured after warm-up, 10,000 mixed requests", 0),
    _Claim("recompiles", "mixed", "recipes compiled after warm-up, 10,000 mixed requests", 0),
    _Claim("compile_seconds", "three", "random 3B: seconds to compile a bucket, median", 10, False, " s"),
    _Claim("prompt_graphs", "three", "random 3B: memory of prompt graphs away from its prediction", 25, False, " %"),
    _Claim("decode_graphs", "three", "random 3B: memory of decode graphs away from its prediction", 25, False, " %"),
    _Claim("ledger", "three", "ledger away from mem_get_info, share of the card", 1, False, " %"),
    _Claim("step_32", "three", "random 3B, 32 rows of 1,024 tokens: a step over plan --time", 1.25, False, "x"),
    _Claim("step_128", "three", "random 3B, 128 rows of 4,096 tokens: a step over plan --time", 1.25, False, "x"),
    _Claim("idle", "three", "random 3B, 32 rows: share of a step in which the card waits", 5, False, " %"),
    _Claim("tpot", "three", "random 3B, decode TPOT at c=1 over weight bytes / copy bandwidth", 1.5, False, "x"),
    _Claim("all_reduce_us", "ranks", "two cards, all-reduce of a decoding step (64 x 8,192 bf16): microseconds", 150),
    _Claim("all_reduce_eager_us", "ranks", "the same, TRENCADIS_HPU_COLLECTIVES=eager", 150),
    _Claim("ranks_tokens", "ranks", "demo, float32, two cards: answers whose tokens are not one card's", 0),
    _Claim("step_seven", "seven", "random 7B, 32 rows of 4,096 tokens: a step over plan --time", 1.25, False, "x"),
)
"""In the order of the page."""

BY_ID = {c.id: c for c in CLAIMS}
