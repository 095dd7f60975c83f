"""Small random checkpoints of every family that sees, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.fakes import checkpoints
from tests.vision import vision_checkpoints
from tests.vision.cross_attention import mllama_oracle
from tests.vision.tiled_families import COMPARED

WRITERS: dict[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": checkpoints.qwen2_5_vl,
    "qwen2_vl": checkpoints.qwen2_vl,
    "qwen3_vl": vision_checkpoints.qwen3_vl,
    "qwen3_vl_moe": partial(vision_checkpoints.qwen3_vl, experts=True),
    "llava": vision_checkpoints.llava,
    "gemma3": vision_checkpoints.gemma3,
    "mllama": mllama_oracle.write,
    **{name: partial(one.write, **next(iter(one.forms.values()))) for name, one in COMPARED.items()},
}
