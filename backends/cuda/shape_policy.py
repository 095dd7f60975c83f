"""Launch shapes for NVIDIA devices as data: ragged launches, prefill and decode mixed, graphs that share one workspace.

Torch-free; ``core.device_shape_policy.Policy`` explains each number. Also the working memory of attention libraries in
bytes, one workspace per stage, and that of sums over ranks.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.backends.cuda.launches.bucket_capacity import cross_attention_bytes, input_bytes
from trencadis.core import envs
from trencadis.core.buckets import MIXED_AXES, Bucket, Stage, padded_tokens
from trencadis.core.device_shape_policy import (
    AxisRule,
    DecodedPieces,
    Density,
    GraphMemory,
    InputSizes,
    Policy,
    WarmupTimes,
    no_bytes,
)
from trencadis.core.errors import StartupError
from trencadis.core.kv_cache_format import FP8, INT8
from trencadis.core.quant.quantised_weight_layout_and_bytes import CODES, DECODED_BYTES, DECODED_ROWS
from trencadis.core.vision_config import WINDOW_SLOTS

FLASH_ATTN, FLASHINFER, OWN_KERNELS = "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"
"""Values of ``--attention-backend``; the last one asks for this engine's own kernels."""

FLASH_3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
"""Modules in which the wheels of FlashAttention 3 put it."""

ALIGNMENT = 256
PROCESSORS = 132
"""Streaming multiprocessors of an H100, assumed by the planner without a card."""

MOST_FLOATS = 256 << 20
"""Maximum bytes of partial results: FlashInfer reserves memory for all tiles of a captured launch. Launches that would
need more do not cut keys.
"""

SPARE_INTS = 64 << 10
"""Bytes added to the arrays of a plan whose sizes are known here."""

HOPPER_ARRAYS = 8
"""Arrays of a plan of FlashInfer's FlashAttention-3 kernels, with a value for each tile of queries of each head
(flashinfer/attention/scheduler.cuh, ``PrefillSM90Plan``); DECODE does not use them.
"""

SLOTS, TILES = 2, (16, 64, 128)
"""Programs per processor, and choices of queries per program, of FlashInfer's scheduler."""


def tiles_of(bucket: Bucket, group: int, kv_heads: int, processors: int) -> tuple[int, int]:
    """Returns (programs per KV head that a captured launch reserves memory for, queries of one program).

    The bounds are those of ``PrefillSplitQOKVIndptr`` in flashinfer/attention/scheduler.cuh.
    """
    tokens, rows = padded_tokens(bucket), rows_of(bucket)
    longest = max(tokens - rows + 1, 1) if bucket.stage is Stage.DECODE else tokens
    queries = next((t for t in TILES if longest * group <= t), TILES[-1])
    bound = -(-tokens * group // queries) + rows - 1
    return max(SLOTS * processors // max(kv_heads, 1), bound), queries


def rows_of(bucket: Bucket) -> int:
    """Returns the rows of a plan: a launch of prompts has one more, for its surplus tokens."""
    return bucket.dims[-1] + (bucket.stage is not Stage.DECODE)


def plan_bytes(
    bucket: Bucket, group: int, kv_heads: int, head_dim: int, processors: int = PROCESSORS
) -> tuple[int, int]:
    """Returns (bytes of partial results, bytes of a plan's integers) of FlashInfer; no partial results if keys are not
    cut.
    """
    tiles, queries = tiles_of(bucket, group, kv_heads, processors)
    floats = 4 * group * kv_heads * tiles * queries * (head_dim + 1)
    ints = 4 * (3 * tiles + rows_of(bucket) + padded_tokens(bucket)) + tiles + SPARE_INTS
    works = (-(-padded_tokens(bucket) // TILES[-1]) + rows_of(bucket) - 1) * group * kv_heads
    hopper = HOPPER_ARRAYS * 4 * works + SPARE_INTS if bucket.stage is not Stage.DECODE else 0
    return (floats if floats <= MOST_FLOATS else 0), align_up(max(ints, hopper))


def align_up(size: int) -> int:
    """Rounds ``size`` up to the alignment of tensors."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def flash_bytes(bucket: Bucket, sizes: InputSizes) -> int:
    """Returns 0: FlashAttention and own kernels allocate their working memory from the pool of a graph."""
    return 0


def infer_bytes(bucket: Bucket, sizes: InputSizes) -> int:
    """Returns the bytes of FlashInfer's workspace in addition to a bucket's inputs: partial results, a plan, row
    starts.
    """
    if bucket.stage not in (Stage.PREFILL, Stage.DECODE, Stage.VERIFY):
        return 0
    floats, ints = plan_bytes(bucket, sizes.group, sizes.kv_heads, sizes.head_dim)
    return align_up(floats) + ints + 3 * align_up(4 * (rows_of(bucket) + 1))


_FINE = 1 << 30

INVARIANT_ROWS = 128
"""Rows of every product under ``--batch-invariant``; fewer would not fill a card's tiles."""

ALIGNED = 32
"""Number of 16-bit values in 64 bytes: rows that begin on 16 bytes have the fast products, and load in whole sectors.
"""

WORKSPACE = 32 << 20
"""Bytes of torch's cuBLAS workspace from sm_90 on; 8 MiB before that."""

WARMUP = WarmupTimes(bucket=0.05, layer=0.006, stage=10.0)
"""Logs of vLLM's captures say 0.06 to 0.4 seconds a graph of 16 to 36 layers (vllm-project/vllm, pull requests 11349,
22897 and 46389). The dozen kernels of a stage are compiled once for all of its shapes, at 0.8 seconds each on a core of
an EPYC Zen 5 (``tools/kernel_resources.py``); later starts find them in Triton's cache.
"""
PEER_SUMS = "TRENCADIS_CUDA_PEER_SUMS"

SUMS_ONCE, SUMS_TWICE = 512 << 10, 4 << 20
"""Bytes of the longest messages that ranks sum over each other's memory in one step and in two."""


def sum_bytes(ranks: int) -> int:
    """Returns the bytes of a card that sums over peer memory take (kernels/peers; a test compares): two messages and
    flags for one step; for two, which three ranks or more have, a message, its sums and flags. 0: NCCL sums, or
    gloo on the twin of a card.
    """
    twin = envs.get_bool("TRENCADIS_CUDA_TWIN")
    if not 2 <= ranks <= 8 or twin or not envs.get_bool(PEER_SUMS):
        return 0
    block = 1024
    once = 2 * SUMS_ONCE + 4 * ranks * (SUMS_ONCE // 2 // block)
    count = -(-(SUMS_TWICE // 2) // (block * ranks))
    twice = SUMS_TWICE + 4 * block * count + 4 * ranks * count
    return align_up(once) + (align_up(twice) if ranks > 2 else 0)


SERVING = Policy(
    axes={**MIXED_AXES, Stage.VERIFY: ("rows",)},
    alignment={
        Stage.PREFILL: (16, 1),
        Stage.DECODE: (1,),
        Stage.VISION: (WINDOW_SLOTS,),
        Stage.SAMPLE: (1,),
        Stage.RESET: (1,),
        Stage.POOL: (1,),
        Stage.VERIFY: (1,),
    },
    rules={
        Stage.PREFILL: (AxisRule(minimum=16, step=16, density=(Density(_FINE, 4),)), AxisRule()),
        Stage.DECODE: (AxisRule(density=(Density(_FINE, 2),)),),
        Stage.VISION: (AxisRule(minimum=WINDOW_SLOTS, step=WINDOW_SLOTS),),
        Stage.SAMPLE: (AxisRule(),),
        Stage.RESET: (AxisRule(),),
        Stage.POOL: (AxisRule(),),
        Stage.VERIFY: (AxisRule(),),
    },
    depth=1,
    overlaps=True,
    block_sizes=(16, 32, 64, 128, 256),
    captures=True,
    capture_order="descending",
    capture_limit={Stage.PREFILL: 2048},
    capture_operations=2.7e13,  # 2,048 tokens of a 7B, for which a card computes some 50 ms
    utilisation_of="total",
    pool_cost="max",
    aligned=ALIGNED,
    drawn_head=True,
    drafts=True,
    fused_tokens=16,  # kernels/layers/fused_layer.py; a test compares
    attention={FLASH_ATTN: flash_bytes, FLASHINFER: infer_bytes, OWN_KERNELS: flash_bytes},
    graph_memory=GraphMemory(library=WORKSPACE),
    warmup=WARMUP,
    ridge=300.0,
    decoded=DecodedPieces(DECODED_ROWS, DECODED_BYTES),
    inputs=input_bytes,
    invariant_rows=INVARIANT_ROWS,
    quantised=CODES,
    host_kv=True,
    host_weights=True,
    kv_codes={INT8: "int8", FP8: "uint8"},
    windows=True,
    upto=True,
    sinks=True,
    cross_attention=True,
    cross_attention_bytes=cross_attention_bytes,
    stages=True,
    adapters=True,
    encoder_data_parallel=True,
    recurrent=True,
    sum_bytes=sum_bytes,
)

POLICIES = {"serving": SERVING, "twin": replace(SERVING, sum_bytes=no_bytes)}
"""Policies by name; ``twin``: the same shapes, on the CPU twin of a card."""


def policy(name: str) -> Policy:
    """Returns the policy called ``name``; empty means serving."""
    found = POLICIES.get(name or "serving")
    if found is None:
        raise StartupError(f"the cuda backend has no policy {name!r}; policies: {', '.join(POLICIES)}")
    return found
