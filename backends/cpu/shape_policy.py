"""Launch shapes of the CPU: every size is its own bucket; and a padded policy for tests."""

from __future__ import annotations

from dataclasses import replace
from platform import machine

from trencadis.backends.cpu.native import kernel_choice_by_cpu
from trencadis.core.buckets import DEFAULT_VISION_SLOTS, MIXED_AXES, Stage
from trencadis.core.device_shape_policy import Policy
from trencadis.core.errors import StartupError
from trencadis.core.kv_cache_format import FP8, INT8
from trencadis.core.quant.quantised_weight_layout_and_bytes import PANELS, ROWS8
from trencadis.core.vision_config import WINDOW_SLOTS

INVARIANT_ROWS = 4
"""Products of row counts that are multiples of this give a row the same bits: MKL's kernels take 4 rows at a time."""

ENCODER_SLOTS = 1024
"""Slots of one image of 448 x 448 pixels. Larger launches are hardly faster per slot, and decoding rows wait for them.
"""

KEPT = ROWS8 if machine().lower() in ("x86_64", "amd64") else ""
"""Form of quantised weights without own kernels: torch's fbgemm, which multiplies integers, exists for x86 only."""

CODES = {INT8: "int8", FP8: "uint8"}
"""Dtype of the codes of an 8-bit KV cache; torch has no scatter of its float8 dtypes here."""

SERVING = Policy(
    axes=MIXED_AXES,
    alignment={
        Stage.PREFILL: (1, 1),
        Stage.DECODE: (1,),
        Stage.VISION: (WINDOW_SLOTS,),
        Stage.SAMPLE: (1,),
        Stage.RESET: (1,),
        Stage.POOL: (1,),
    },
    invariant_rows=INVARIANT_ROWS,
    encoder_slots=ENCODER_SLOTS,
    quantised=KEPT,
    kv_codes=CODES,
    masked_head=True,
    best_head=True,
    split_head=True,
    drafts=True,
    adapters=True,
    windows=True,
    upto=True,
    sinks=True,
    encoder_data_parallel=True,
    cross_attention=True,
    stages=True,
    recurrent=True,
)

PADDED = replace(
    SERVING,
    alignment={
        Stage.PREFILL: (16, 4),
        Stage.DECODE: (4,),
        Stage.VISION: (WINDOW_SLOTS,),
        Stage.SAMPLE: (4,),
        Stage.RESET: (4,),
        Stage.POOL: (4,),
    },
    boundaries={Stage.VISION: (DEFAULT_VISION_SLOTS,)},
    encoder_slots=Policy.encoder_slots,
    host_kv=True,
)

POLICIES = {"serving": SERVING, "padded": PADDED}


def policy(name: str) -> Policy:
    """Returns the policy called ``name``; empty means serving."""
    found = POLICIES.get(name or "serving")
    if found is None:
        raise StartupError(f"the cpu backend has no policy {name!r}; policies: {', '.join(POLICIES)}")
    return replace(found, quantised=PANELS) if kernel_choice_by_cpu.chosen_table().number else found
