"""Gemma-4: sizes of images, rows of both towers on every device, greedy answers about images, keys refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.oracles.transformers_model import make_image
from tests.vision import vision_checkpoints
from tests.vision.family_harness import DEVICES, VARIANTS, FamilyHarness, Shown
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs, image_processor
from trencadis.core.errors import StartupError
from trencadis.multimodal.gemma4.processor import TOKENS

UNIT = 48
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "12B": {"unified": True},
    "small": {
        "use_bidirectional_attention": None, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 344,
        "num_kv_shared_layers": 2, "attention_k_eq_v": False, "use_double_wide_mlp": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda form: vision_checkpoints.gemma4(tmp_path_factory.mktemp("gemma4"), **FORMS[form]))


class Pixels:
    """What transformers' processor makes of an image; that of the 12B model needs torchvision, and is made of the
    other's patches here.
    """

    def __init__(self, path: Path) -> None:
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        held = json.loads((path / "preprocessor_config.json").read_text())
        self.large = "Unified" in held.pop("image_processor_type")
        self.processor: Any = Gemma4ImageProcessorPil(**held)

    def __call__(self, image: Image.Image) -> dict[str, torch.Tensor]:
        found = self.processor(images=[image], return_tensors="pt")
        given = {key: found[key] for key in ("pixel_values", "image_position_ids")}
        if not self.large:
            return given
        real = (given["image_position_ids"][0] >= 0).all(-1)
        places, patches = given["image_position_ids"][0][real], given["pixel_values"][0][real]
        columns, rows = (int(n) + 1 for n in places.max(0).values)
        whole = patches.view(rows // 3, 3, columns // 3, 3, 16, 16, 3).permute(0, 2, 1, 4, 3, 5, 6)
        y, x = torch.meshgrid(torch.arange(rows // 3), torch.arange(columns // 3), indexing="ij")
        at = torch.stack([x.flatten(), y.flatten()], -1)[None]
        return {"pixel_values": whole.reshape(1, -1, UNIT * UNIT * 3), "image_position_ids": at}


def test_sizes_are_transformers_sizes() -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    from trencadis.multimodal.gemma4.processor import Gemma4ImageProcessor

    rng = np.random.default_rng(0)
    for tokens in TOKENS:
        rule = Gemma4ImageProcessor(image=UNIT, patch=16, merge=3, tokens=tokens)
        for _ in range(60):
            height, ratio = int(rng.integers(1, 4000)), float(np.exp(rng.uniform(-5.2, 5.2)))
            width = max(int(height * ratio), 1)
            if max(height, width) > 200 * min(height, width):
                continue
            want = get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
            found = rule.compute_geometry(height, width)
            assert found.resized == want, (height, width, tokens)
            assert tokens // 2 <= found.tokens <= tokens and found.slots % 64 == 0


def shown(path: Path, model: Any, image: Image.Image) -> Shown:
    given, one = Pixels(path)(image), image_processor(load_config(path), {}).prepare(image, "d")
    with torch.no_grad():
        want = torch.cat(list(model.get_image_features(**given).pooler_output))
    return Shown(one.grid, one.slots, one.pixels, want)


@pytest.mark.parametrize("form", ["dense", "12B"])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_the_tower_equal_transformers(form: str, device: str, made: Any, oracle: Any) -> None:
    path, rng = made(form), np.random.default_rng(2)
    model = oracle(path)
    harness = FamilyHarness(path, device, 2048, 20)
    some = [shown(path, model.model, make_image(rng, high=200)) for _ in range(2)]
    assert harness.worst(some, rng, 128) <= 1e-5


def chats(path: Path, model: Any, seeds: range, **flags: Any) -> None:
    """Greedy answers about two images of random sizes, and about none."""
    rng, pixels = np.random.default_rng(seeds.start), Pixels(path)
    llm = LLM(
        str(path), dtype="float32", max_model_len=512, kv_cache_memory_bytes=32 << 20, max_num_seqs=4,
        limit_mm_per_prompt={"image": 2}, **{"max_num_batched_tokens": 96, **flags},
    )  # fmt: skip
    try:
        asked = [[make_image(rng, high=200) for _ in range(seed % 3)] for seed in seeds]
        messages = [
            [
                {
                    "role": "user",
                    "content": [*({"type": "image", "image": i} for i in some), {"type": "text", "text": "?"}],
                }
            ]
            for some in asked
        ]
        got = llm.chat(messages, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
        for out, some in zip(got, asked, strict=True):
            assert list(out.outputs[0].token_ids) == answer(model, pixels, out.prompt_token_ids, some, 5)
        llm.engine.scheduler.check()
    finally:
        llm.close()


def answer(model: Any, pixels: Pixels, prompt: list[int], images: list[Image.Image], length: int) -> list[int]:
    """transformers' greedy tokens."""
    given = dict[str, Any]()
    for image in images:
        for key, value in pixels(image).items():
            given[key] = value if key not in given else _joined(given[key], value)
    ids = torch.tensor([prompt])
    given |= {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == vision_checkpoints.IMAGE).long()}
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=1, **given
        )
    answered: list[int] = found[0, len(prompt) :].tolist()
    return answered


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Both images, the smaller one with the padding that processors add."""
    most, fill = max(first.shape[1], second.shape[1]), -1 if first.shape[-1] == 2 else 0
    padded = [torch.nn.functional.pad(t, (0, 0, 0, most - t.shape[1]), value=fill) for t in (first, second)]
    return torch.cat(padded)


@pytest.mark.parametrize("form", FORMS)
def test_answers_about_images_are_transformers_answers(form: str, made: Any, oracle: Any) -> None:
    chats(made(form), oracle(made(form)), range(3))


@pytest.mark.parametrize(("form", "variant"), [("dense", "emulated hpu"), ("experts", "cuda twin")])
def test_answers_on_cards(form: str, variant: str, made: Any, oracle: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(made(form), oracle(made(form)), range(2, 4), **VARIANTS[variant])


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_long(form: str, variant: str, made: Any, oracle: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(made(form), oracle(made(form)), range(30), **{**VARIANTS[variant], "max_num_batched_tokens": 96})


def test_steps_smaller_than_an_image_are_for_text_alone(made: Any) -> None:
    flags: dict[str, Any] = dict(dtype="float32", max_model_len=256, max_num_seqs=2, max_num_batched_tokens=7)
    path = made(next(iter(FORMS)))
    with pytest.raises(StartupError, match="--max-num-batched-tokens \\(7\\) must be at least"):
        LLM(str(path), kv_cache_memory_bytes=8 << 20, **flags)
    llm = LLM(str(path), kv_cache_memory_bytes=8 << 20, limit_mm_per_prompt={"image": 0}, **flags)
    try:
        (out,) = llm.generate([list(range(3, 40))], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert out.outputs[0].token_ids
    finally:
        llm.close()


def test_needs_of_images_are_one_of_five(made: Any, tmp_path: Path) -> None:
    for tokens in TOKENS:
        path = vision_checkpoints.gemma4(tmp_path / str(tokens), tokens=tokens) if tokens == 1120 else None
        needs = image_needs(load_config(path or made("dense")), {})
        assert needs.tokens == (1120 if path else 70) and needs.slots == -(-needs.tokens // 7) * 64


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("vision_config", "use_clipped_linears", True), ("vision_config", "pooling_kernel_size", 2),
        ("vision_config", "num_key_value_heads", 2), ("text_config", "use_bidirectional_attention", "all"),
        ("text_config", "num_kv_shared_layers", 4), ("text_config", "final_logit_softcapping", 0),
        ("text_config", "per_layer_config", {"0": {"head_dim": 8}}),
        ("text_config", "rope_parameters", {"full_attention": {"rope_type": "yarn"}}),
    ],
)  # fmt: skip
def test_keys_that_are_not_served_are_refused_by_name(
    made: Any, tmp_path: Path, part: str, key: str, value: Any
) -> None:
    held = json.loads((made("dense") / "config.json").read_text())
    held[part][key] = value
    (tmp_path / "config.json").write_text(json.dumps(held))
    with pytest.raises(StartupError, match="rope_type" if key == "rope_parameters" else key):
        load_config(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("max_soft_tokens", 100), ("do_normalize", True), ("resample", 2)])
def test_settings_of_the_processor_are_refused_by_name(made: Any, tmp_path: Path, key: str, value: Any) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        held = json.loads((made("dense") / name).read_text())
        (tmp_path / name).write_text(json.dumps(held if name == "config.json" else held | {key: value}))
    with pytest.raises(StartupError, match=key):
        image_processor(load_config(tmp_path), {})
