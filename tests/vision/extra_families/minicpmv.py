"""MiniCPM-V 4.6 as the tests of tiled families compare it with transformers: checkpoint, processor, sizes, pixels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from tests.fakes import checkpoints
from tests.vision.vision_checkpoints import TEMPLATE, finished

PAD = "<|image_pad|>"
TOKENS = {
    "image_token": PAD, "video_token": "<|video_pad|>", "image_start_token": "<image>", "image_end_token": "</image>",
    "slice_start_token": "<slice>", "slice_end_token": "</slice>", "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}  # fmt: skip
PATCH, SIDE = 14, 4


def minicpmv(
    folder: Path, *, seed: int = 0, scale: int = 112, most: int = 4, insert: int = 1, vision: Any = None,
    settings: Any = None, **text: Any,
) -> Path:  # fmt: skip
    """A MiniCPM-V 4.6 checkpoint: slices of about ``scale`` pixels, a merger behind layer ``insert`` of three."""
    from transformers import MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration

    rope = {
        "rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }  # fmt: skip
    decoder: dict[str, Any] = {
        "model_type": "qwen3_5_text", "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **checkpoints.text_settings(rope_parameters=rope, **{"num_hidden_layers": 3, **text}),
    }  # fmt: skip
    tower = dict(
        hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=2, image_size=84,
        patch_size=PATCH, **(vision or {}),
    )  # fmt: skip
    config = MiniCPMV4_6Config(
        text_config=decoder, vision_config=tower, insert_layer_id=insert, image_token_id=checkpoints.IDS[PAD],
        video_token_id=checkpoints.IDS["<|video_pad|>"], tie_word_embeddings=decoder["tie_word_embeddings"],
        architectures=["MiniCPMV4_6ForConditionalGeneration"],
    )  # fmt: skip
    processor = {
        "image_processor_type": "MiniCPMV4_6ImageProcessor", "max_slice_nums": most, "scale_resolution": scale,
        "patch_size": PATCH, "use_image_id": True, "slice_mode": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        **(settings or {}),
    }  # fmt: skip
    model: Any = MiniCPMV4_6ForConditionalGeneration(config)
    names = [name for name in TOKENS.values() if name not in checkpoints.IDS]
    template = TEMPLATE.replace("<image>", PAD)
    return finished(model, folder, seed, names, processor, template, extra_special_tokens=TOKENS, **TOKENS)


def open_processor(path: Path) -> Any:
    """transformers' processor with Pillow; its video processor, which needs torchvision, is left out."""
    from transformers import AutoTokenizer
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
    from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

    class WithoutVideos(MiniCPMV4_6Processor):
        def check_argument_for_proper_class(self, name: str, given: Any) -> Any:
            return None

    videos = SimpleNamespace(slice_mode=True, downsample_mode="16x")
    images: Any = MiniCPMV4_6ImageProcessorPil.from_pretrained(path)
    return WithoutVideos(images, videos, AutoTokenizer.from_pretrained(path))


def count_tokens(reference: Any, ours: Any, height: int, width: int) -> int:
    """transformers' tokens of an image."""
    rules: Any = reference.image_processor
    shape = {"scale_resolution": ours.scale, "patch_size": PATCH, "downsample_mode": "16x"}
    grid = rules.get_sliced_grid((height, width), ours.most, ours.scale)
    high, wide = rules.find_best_resize((height, width), **shape, allow_upscale=grid is None)
    cells = high * wide
    if grid is not None:
        high, wide = rules.get_refine_size((height, width), grid, **shape, allow_upscale=True)
        cells += high * wide
    return int(cells // (PATCH * SIDE) ** 2)


def same_values(ours: Any, theirs: Any, image: Image.Image) -> None:
    """Holds an image's pixels, normalised as the device does, to transformers' bit for bit, slice by slice."""
    from trencadis.multimodal.minicpmv4_6.processor import nested_coordinates

    made, one = theirs(images=[image], text=PAD, return_tensors="np"), ours.prepare(image, "d")
    values, left = np.asarray(made["pixel_values"])[0], 0
    channel = np.repeat(np.arange(3), PATCH**2)
    sizes = np.asarray(made["target_sizes"]).tolist()
    assert [list(item.grid[1:]) for item in one.items] == sizes, image.size
    for item, (h, w) in zip(one.items, sizes, strict=True):
        patches = values[:, :, left : left + h * w * PATCH].reshape(3, PATCH, h * w, PATCH).transpose(2, 0, 1, 3)
        at = nested_coordinates(h, w)
        wanted = patches.reshape(h * w, -1)[at[:, 0] * w + at[:, 1]]
        assert (ours.normalised_values[channel, item.pixels] == wanted).all(), image.size
        left += h * w * PATCH
    assert left == values.shape[-1]
