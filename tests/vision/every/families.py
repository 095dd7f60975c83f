"""Small random checkpoints of every family that sees, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.fakes import checkpoints
from tests.vision import forms
from tests.vision.cross import mllama
from tests.vision.tiled import COMPARED

WRITERS: dict[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": checkpoints.qwen2_5_vl,
    "qwen2_vl": checkpoints.qwen2_vl,
    "qwen3_vl": forms.qwen3_vl,
    "qwen3_vl_moe": partial(forms.qwen3_vl, experts=True),
    "llava": forms.llava,
    "gemma3": forms.gemma3,
    "mllama": mllama.write,
    **{name: partial(one.write, **next(iter(one.forms.values()))) for name, one in COMPARED.items()},
}
