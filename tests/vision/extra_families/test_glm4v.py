"""GLM-4.1V: sampled positions, sizes of images, greedy answers about images, mistakes that show, keys refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.vision import vision_checkpoints
from trencadis import LLM, SamplingParams
from trencadis.backends.conformance.check_model.transformers_oracle import TransformersAnswers
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_processor, image_sizes
from trencadis.core.errors import StartupError
from trencadis.multimodal.glm4v.config import sampled_positions

SIZES = ((20, 300), (84, 84), (140, 56), (500, 333), (28, 1400), (11, 11))


@pytest.mark.parametrize("grid", [(2, 2), (4, 10), (12, 6), (24, 24)])
def test_positions_are_sampled_as_torch_samples_them(grid: tuple[int, int]) -> None:
    side, (h, w), merge = 5, grid, 2
    table = torch.randn(side * side, 8, generator=torch.Generator().manual_seed(0))
    near, share = sampled_positions(h, w, side, merge)
    got = (table[torch.from_numpy(near).long()] * torch.from_numpy(share)[..., None]).sum(1)
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    at = torch.stack([(x + 0.5) / w * 2 - 1, (y + 0.5) / h * 2 - 1], -1)[None]
    image = table.view(1, side, side, 8).permute(0, 3, 1, 2)
    want = torch.nn.functional.grid_sample(image, at, mode="bicubic", padding_mode="border", align_corners=False)
    by_cell = want[0].permute(1, 2, 0).view(h // 2, 2, w // 2, 2, 8).permute(0, 2, 1, 3, 4).reshape(-1, 8)
    assert (got - by_cell).abs().max() < 1e-5


def test_sizes_are_transformers_sizes(tmp_path: Path) -> None:
    import transformers

    library: Any = transformers
    path = vision_checkpoints.glm4v(tmp_path / "glm4v")
    config, theirs = load_config(path), library.AutoImageProcessor.from_pretrained(path, backend="pil")
    ours, rule = image_processor(config, {}), image_sizes(config, {})
    rng = np.random.default_rng(0)
    for height, width in (*SIZES, *(tuple(int(n) for n in rng.integers(8, 900, 2)) for _ in range(60))):
        if max(height, width) > 150 * min(height, width):
            continue
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        made = ours.prepare(image, "digest")
        want = theirs(images=[image], return_tensors="np")
        assert (1, made.grid[1], made.grid[2]) == tuple(want["image_grid_thw"][0]), (height, width)
        assert rule(height, width).resized == made.resized


def ask(path: Path, images: list[list[Image.Image]], **flags: Any) -> list[Any]:
    llm = LLM(
        str(path), dtype="float32", max_model_len=512, kv_cache_memory_bytes=16 << 20, limit_mm_per_prompt={"image": 2},
        **flags,
    )  # fmt: skip
    try:
        chats = []
        for some in images:
            shown = [{"type": "image", "image": image} for image in some]
            chats.append([{"role": "user", "content": [*shown, {"type": "text", "text": "?"}]}])
        return llm.chat(chats, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    finally:
        llm.close()


@pytest.mark.parametrize("name", ["Glm4v", "Glm46V", "GlmOcr"])
def test_answers_about_images_are_transformers_answers(tmp_path: Path, name: str) -> None:
    path = vision_checkpoints.glm4v(tmp_path / "glm", name=name, num_key_value_heads=1 if name == "Glm46V" else 2)
    rng = np.random.default_rng(1)
    images = [
        [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sizes]
        for sizes in (((84, 140),), ((60, 200), (112, 112)), ((300, 90),))
    ]
    oracle = TransformersAnswers(path, vision_checkpoints.IMAGE, ())
    for out, some in zip(ask(path, images, max_num_batched_tokens=64), images, strict=True):
        assert list(out.outputs[0].token_ids) == oracle.answer(out.prompt_token_ids, some, 6)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("vision_config", "patch_size", 16), ("vision_config", "out_hidden_size", 32),
        ("vision_config", "num_heads", 3),
        ("text_config", "rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
        ("text_config", "rope_parameters", {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}),
        ("text_config", "is_causal", False),
    ],
)  # fmt: skip
def test_keys_that_are_not_served_are_refused_by_name(tmp_path: Path, part: str, key: str, value: Any) -> None:
    path = vision_checkpoints.glm4v(tmp_path / "glm4v")
    held = json.loads((path / "config.json").read_text())
    held[part][key] = value
    (path / "config.json").write_text(json.dumps(held))
    named = next(iter(value)) if isinstance(value, dict) else key
    with pytest.raises(StartupError, match=named):
        load_config(path)
