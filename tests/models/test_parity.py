"""Logits equal transformers' in float32, whatever the chunks, the padding and the packing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.hand_driven_model import HandDrivenModel
from trencadis.core.buckets import Stage
from trencadis.core.step import Encode
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "vl": ("qwen2_5_vl", {}),
    "vl-gqa7": ("qwen2_5_vl", {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "vl-tied": ("qwen2_5_vl", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("policy", "ops"), [("serving", "fast"), ("padded", "fast"), ("padded", "reference")])
def test_text_logits(checkpoint: Callable[..., Path], oracle: Any, case: str, policy: str, ops: str) -> None:
    kind, changes = CASES[case]
    path = checkpoint(kind, **changes)
    ids = np.random.default_rng(0).integers(0, 300, 90).tolist()
    with torch.no_grad():
        want = oracle(path)(input_ids=torch.tensor([ids])).logits[0]
    harness = HandDrivenModel(path, policy, ops)
    for chunk in (1, 7, 90) if ops == "fast" else (7, 90):
        close(harness.prefill(ids, chunk), want)


GRIDS = [(4, 4), (8, 8), (2, 2), (10, 6), (18, 34), (16, 8)]


@pytest.mark.parametrize("ops", ["fast", "reference"])
def test_images_packed_together(vl_checkpoint: Path, oracle: Any, ops: str) -> None:
    rng = np.random.default_rng(1)
    harness, model = HandDrivenModel(vl_checkpoint, ops=ops), oracle(vl_checkpoint)
    visual = model.model.visual
    mean, std = _clip()
    images, wants, row = [], [], 2
    for h, w in GRIDS:
        pixels = rng.integers(0, 256, (h * w, PATCH_VALUES), dtype=np.uint8)
        rows = np.arange(row, row + h * w // 4, dtype=np.int32)
        images.append(Encode(f"{h}x{w}", (1, h, w), count_slots((1, h, w)), pixels, rows))
        values = (torch.from_numpy(pixels).float() / 255 - mean) / std
        with torch.no_grad():
            wants.append(visual(values, grid_thw=torch.tensor([[1, h, w]])).pooler_output)
        row += h * w // 4
    for chosen in ([0], [1], [3, 2], [0, 1, 2, 3, 4, 5], [5, 4]):
        need = sum(images[i].slots for i in chosen)
        harness.arena.zero_()
        for spare in (0, 128):
            packed = harness.model.pack([images[i] for i in chosen], need + spare)
            harness.run(Stage.VISION, harness.model.vision, packed, need + spare)
            for i in chosen:
                close(harness.arena[images[i].rows.tolist()], wants[i])
        assert not harness.arena[0].any()


def _clip() -> tuple[torch.Tensor, torch.Tensor]:
    from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP_MEAN, CLIP_STD

    return torch.tensor(CLIP_MEAN).repeat_interleave(392), torch.tensor(CLIP_STD).repeat_interleave(392)


def test_image_tokens_and_three_axes(vl_checkpoint: Path, oracle: Any) -> None:
    rng = np.random.default_rng(2)
    n = 40
    ids, rows = rng.integers(0, 300, n), np.zeros(n, np.int32)
    rows[5:17] = 2 + rng.permutation(12)
    positions = rng.integers(0, 500, (3, n)).astype(np.int32)
    harness, model = HandDrivenModel(vl_checkpoint, "padded"), oracle(vl_checkpoint)
    harness.arena.copy_(torch.from_numpy(rng.standard_normal(harness.arena.shape, np.float32)))
    harness.arena[0] = 0
    with torch.no_grad():
        x = model.get_input_embeddings()(torch.from_numpy(ids))
        x[5:17] = harness.arena[rows[5:17].tolist()]
        hidden = model.model.language_model(
            inputs_embeds=x[None], position_ids=torch.from_numpy(positions)[:, None].long()
        ).last_hidden_state
        want = model.lm_head(hidden[0])
    for chunk in (7, n):
        close(harness.prefill(ids.tolist(), chunk, positions, rows), want)
