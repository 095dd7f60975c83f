"""Launch shapes for NVIDIA devices as data: ragged launches, prefill and decode mixed, graphs that share one workspace.

Torch-free; ``core.buckets.Policy`` explains each number.
"""

from __future__ import annotations

from trencadis.backends.cuda.launches.input_sizes import cross_attention_bytes, input_bytes
from trencadis.backends.cuda.libraries.workspace_sizes import FLASH_ATTN, FLASHINFER, flash_bytes, infer_bytes
from trencadis.core.buckets import MIXED_AXES, AxisRule, Density, GraphMemory, Policy, Stage
from trencadis.core.errors import StartupError
from trencadis.core.kv_cache_format import FP8, INT8
from trencadis.core.quant.scheme import CODES
from trencadis.core.shared_constants import WINDOW_SLOTS

_FINE = 1 << 30

INVARIANT_ROWS = 128
"""Rows of every product under ``--batch-invariant``; fewer would not fill a card's tiles."""

ALIGNED = 32
"""Number of 16-bit values in 64 bytes: rows that begin on 16 bytes have the fast products, and load in whole sectors.
"""

WORKSPACE = 32 << 20
"""Bytes of torch's cuBLAS workspace from sm_90 on; 8 MiB before that."""

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
    utilisation_of="total",
    pool_cost="max",
    aligned=ALIGNED,
    drawn_head=True,
    drafts=True,
    attention={FLASH_ATTN: flash_bytes, FLASHINFER: infer_bytes},
    graph_memory=GraphMemory(library=WORKSPACE),
    ridge=300.0,
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
)

POLICIES = {"serving": SERVING, "twin": SERVING}
"""Policies by name; ``twin``: the same shapes, on the CPU twin of a card."""


def policy(name: str) -> Policy:
    """Returns the policy called ``name``; empty means serving."""
    found = POLICIES.get(name or "serving")
    if found is None:
        raise StartupError(f"the cuda backend has no policy {name!r}; policies: {', '.join(POLICIES)}")
    return found
