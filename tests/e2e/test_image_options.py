"""Options, salts, names and sizes of images through ``LLM``, with a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from trencadis import LLM, SamplingParams
from trencadis.core.errors import BadRequest, Conflict

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(vl_checkpoint: Path) -> Iterator[LLM]:
    made = LLM(
        vl_checkpoint, task="generate", pipeline_parallel_size=1, quantization=None, dtype=torch.float32,
        kv_cache_memory_bytes=16 << 20, max_model_len=1024, threads=1, mm_processor_kwargs={"max_pixels": 200_704},
    )  # fmt: skip
    yield made
    made.close()


def noise(seed: int, height: int = 120, width: int = 200) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def ask(llm: LLM, image: Any, text: str = "What?", part: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    content = [{"type": "image", "image": image, **(part or {})}, {"type": "text", "text": text}]
    return llm.chat([{"role": "user", "content": content}], GREEDY, **kwargs)[0]


def test_sizes_come_back_and_options_hold(llm: LLM) -> None:
    plain, image = ask(llm, noise(1)), noise(1)
    (size,) = plain.images
    assert (size.width, size.height, size.original_width, size.original_height) == (196, 112, 200, 120)
    assert size.grid == (1, 8, 14) and plain.num_image_tokens == size.tokens == 28
    assert ask(llm, image, mm_processor_kwargs={"max_pixels": 6000}).num_image_tokens == 6
    assert ask(llm, image, part={"max_pixels": 6000}, mm_processor_kwargs={"max_pixels": 9000}).num_image_tokens == 6
    fixed = ask(llm, image, part={"resized_height": 140, "resized_width": 56})
    assert (fixed.images[0].height, fixed.images[0].width, fixed.num_image_tokens) == (140, 56, 10)
    again = ask(llm, image)
    assert again.num_cached_tokens > 28 and again.outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(BadRequest) as caught:
        ask(llm, image, part={"max_pixels": 1 << 20})
    assert caught.value.param == "messages[0].content[0].max_pixels"


def test_a_salt_parts_all_three_caches(llm: LLM) -> None:
    image, cache = noise(2), llm.service.images.cache
    first = ask(llm, image)
    encoded, hits = llm.engine.stats().images_encoded, cache.hits
    salted = ask(llm, image, cache_salt="s")
    assert salted.num_cached_tokens == 0 and cache.hits == hits
    assert llm.engine.stats().images_encoded == encoded + 1
    assert ask(llm, image, cache_salt="s").num_cached_tokens > 28 and cache.hits == hits + 1
    assert llm.engine.stats().images_encoded == encoded + 1
    assert salted.outputs[0].token_ids == first.outputs[0].token_ids


def test_names(llm: LLM) -> None:
    image = noise(3)
    first = ask(llm, image, part={"uuid": "a"})
    named = llm.chat(
        [{"role": "user", "content": [{"type": "image_url", "uuid": "a"}, {"type": "text", "text": "What?"}]}], GREEDY
    )[0]
    assert named.outputs[0].token_ids == first.outputs[0].token_ids and named.images == first.images
    with pytest.raises(Conflict):
        ask(llm, noise(4), part={"uuid": "a"})
    prompt = {"prompt": "<|vision_start|><|image_pad|><|vision_end|>Hi", "multi_modal_data": {"image": noise(5)}}
    whole = llm.generate({**prompt, "multi_modal_uuids": {"image": "b"}, "cache_salt": "t"}, GREEDY)[0]
    reused = {**prompt, "multi_modal_data": {"image": [None]}, "multi_modal_uuids": {"image": ["b"]}}
    assert llm.generate({**reused, "cache_salt": "t"}, GREEDY)[0].outputs[0].token_ids == whole.outputs[0].token_ids
    with pytest.raises(BadRequest, match="Cache miss for image at index 0 but data is not provided"):
        llm.generate(reused, GREEDY)
    with pytest.raises(BadRequest, match="came with 2 uuids"):
        llm.generate({**prompt, "multi_modal_uuids": {"image": ["b", "c"]}}, GREEDY)


def test_arrays_are_images(llm: LLM) -> None:
    image = noise(6)
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    want = ask(llm, image)
    for form in (array, tensor, tensor.float() / 255):
        assert ask(llm, form).outputs[0].token_ids == want.outputs[0].token_ids
    prompt = "<|vision_start|><|image_pad|><|vision_end|>" * 2 + "Hi"
    pair = [image, noise(7)]
    forms = [pair, [np.asarray(p) for p in pair], np.stack([np.asarray(p) for p in pair])]
    made = llm.generate([{"prompt": prompt, "multi_modal_data": {"image": form}} for form in forms], GREEDY)
    assert all(m.outputs[0].token_ids == made[0].outputs[0].token_ids and m.num_image_tokens == 56 for m in made)
    embeds = torch.randn(28, 32)
    for data in ({"image": {"image_embeds": embeds}}, {"image": embeds}, {"image": embeds[None]}, {"image": [embeds]}):
        with pytest.raises(BadRequest, match=r"mbed.* not supported"):
            llm.generate({"prompt": prompt, "multi_modal_data": data}, GREEDY)
    with pytest.raises(BadRequest, match="image_embeds"):
        llm.generate({"prompt": prompt, "multi_modal_data": {"image_embeds": embeds}}, GREEDY)
    with pytest.raises(BadRequest, match="image_embeds are not supported"):
        llm.chat([{"role": "user", "content": [{"type": "image_embeds", "image_embeds": embeds}]}], GREEDY)


def test_a_template_from_a_file_is_its_text(llm: LLM, tmp_path: Path) -> None:
    text = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    (tmp_path / "own.jinja").write_text(text)
    conversation = [{"role": "user", "content": "Hi"}]
    made = [llm.chat(conversation, GREEDY, chat_template=t)[0].prompt for t in (text, tmp_path / "own.jinja")]
    assert (
        made == ["<Hi>"] * 2
        and llm.chat(conversation, GREEDY, chat_template=str(tmp_path / "own.jinja"))[0].prompt == "<Hi>"
    )
    with pytest.raises(BadRequest, match="no such file"):
        llm.chat(conversation, GREEDY, chat_template="/no/such.jinja")
