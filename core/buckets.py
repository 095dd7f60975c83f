"""Buckets: the kinds of launches, their padded shapes, the default sizes, and how sizes are rounded up.

Pure Python: no torch, no numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

DEFAULT_VISION_SLOTS = (256, 576, 1024, 1600, 3136, 4096, 6400, 7744, 9216, 12544)
"""Slots of the default VISION buckets.

Above the last, sizes grow by 1.5 up to the largest need. Each corresponds to a square image of whole windows.
"""


ENCODER_SLOTS = 12544
"""Most slots of a launch that several images share; a larger image gets a launch of its own."""


POOL_ROWS = 512
"""Rows of a POOL launch, unless more requests run at a time.

MEAN pooling sums a prompt's tokens in slices of this size.
"""


WIDE_ROWS = 8
"""Rows of one SAMPLE launch that reports more ids than a launch which draws."""


DRAFTED_ROWS = 64
"""Most rows of SAMPLE in a step with drafts, unless more requests run at a time."""


LORA = "lora"
"""Variant of text buckets whose rows may have LoRA adapters."""


def align_up(width: int, unit: int) -> int:
    """Returns the next multiple of ``unit``: the width after zero padding."""
    return -(-width // unit) * unit


class Stage(IntEnum):
    """Kinds of launches. A backend's policy lists the stages that it supports and their axes."""

    PREFILL = 1
    DECODE = 2
    FRESH = 3
    CONTEXT = 4
    VISION = 5
    SAMPLE = 6
    RESET = 7
    POOL = 8
    VERIFY = 9


MIXED_AXES = {
    Stage.PREFILL: ("tokens", "rows"),
    Stage.DECODE: ("rows",),
    Stage.VISION: ("slots",),
    Stage.SAMPLE: ("rows",),
    Stage.RESET: ("rows",),
    Stage.POOL: ("rows",),
}
"""Axes of each stage on devices whose ragged launches mix prefill and decode rows."""


@dataclass(frozen=True, order=True)
class Bucket:
    """One planned shape; used as an entry of the warm-up list, a dictionary key and a metric label."""

    stage: Stage
    dims: tuple[int, ...]
    variant: str = ""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.dims))
        return f"{self.stage.name.lower()}[{shape}]{'/' + self.variant if self.variant else ''}"


def verify_variant(width: int) -> str:
    """Returns the variant of VERIFY buckets whose rows have up to ``width`` tokens: a last token and its drafts."""
    return f"w{width}"


def verified_width(bucket: Bucket) -> int:
    """Returns the tokens of a row of a VERIFY bucket."""
    return int(target_bucket(bucket).variant.removeprefix("w"))


DRAFT = "draft"
"""End of the variants of buckets that a draft model runs."""


def drafting_bucket(bucket: Bucket) -> Bucket:
    """Returns the bucket of the draft model's launches whose inputs have the sizes of ``bucket``."""
    return replace(bucket, variant=f"{bucket.variant}-{DRAFT}".removeprefix("-"))


def is_drafting(bucket: Bucket) -> bool:
    """Returns True if a draft model runs the bucket."""
    return bucket.variant.endswith(DRAFT)


def target_bucket(bucket: Bucket) -> Bucket:
    """Returns the bucket without the mark of a draft model; its inputs have the same sizes."""
    return replace(bucket, variant=bucket.variant.removesuffix(DRAFT).removesuffix("-"))


AHEAD = "ahead"


def ahead_variant(drafts: int) -> str:
    """Returns the variant of SAMPLE whose rows have penalties and up to ``drafts`` drafts before them."""
    return f"{AHEAD}{drafts}"


def drafts_ahead(bucket: Bucket) -> int:
    """Returns the columns of ``HeadInputs.ahead`` in a SAMPLE bucket; 0: it has none."""
    return int(bucket.variant.removeprefix(AHEAD)) if bucket.variant.startswith(AHEAD) else 0


WIDE = "top"


def wide_variant(ids: int) -> str:
    """Returns the variant of SAMPLE that reports ``ids`` top ids, more than a launch which draws does."""
    return f"{WIDE}{ids}"


def wide_ids(bucket: Bucket) -> int:
    """Returns the top ids that a SAMPLE bucket of its own for them reports; 0: it is none."""
    return int(bucket.variant.removeprefix(WIDE)) if bucket.variant.startswith(WIDE) else 0


def padded_tokens(bucket: Bucket) -> int:
    """Returns the text tokens, slots or rows that a launch of ``bucket`` computes, padding included."""
    if bucket.stage is Stage.VERIFY:
        return bucket.dims[0] * verified_width(bucket)
    return bucket.dims[0] * bucket.dims[1] if bucket.stage is Stage.FRESH else bucket.dims[0]
