"""Qwen2.5-VL's rotary positions as transformers computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

MODEL: Any = Qwen2_5_VLModel
"""Its methods are called on a stand-in that has the configuration alone."""


def reference(kinds, grids, seconds, tokens_per_second):
    """kinds: int per token, 0 text, 1 image, 2 video."""
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=tokens_per_second)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = lambda *a, **k: MODEL.get_vision_position_ids(model, *a, **k)
    of = {1: [], 2: []}
    for grid, second in zip(grids, seconds, strict=True):
        of[1 if second is None else 2].append(grid)
    given = [s for s in seconds if s is not None]
    ids, delta = MODEL.get_rope_index(
        model,
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds]),
        torch.tensor(of[1]) if of[1] else None,
        torch.tensor(of[2]) if of[2] else None,
        torch.tensor(given) if given else None,
    )
    return ids[:, 0].numpy(), int(delta)
