"""What Phi-3.5-vision alone has: numbered marks, texts encoded apart, num_crops, values of three bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from tests.hostile.altered_config import altered
from tests.oracles.transformers_model import QUESTIONS, assert_same, make_image
from tests.pooling.oracle import LEAST_COSINE, cosine
from tests.vision.extra_families.phi3_v import BOS, Composed, Processor, phi3_v
from tests.vision.tiled_families import COMPARED, ask
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs, image_processor
from trencadis.core.errors import BadRequest, StartupError
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions
from trencadis.multimodal.pixel_normalisation_and_fixed_point import UNIT, downscale_bicubic, encode_fixed_point

BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=1024, max_num_seqs=4, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256
)
GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return phi3_v(tmp_path_factory.mktemp("phi3_v"), seed=5)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    made = LLM(str(folder), **BASE)
    yield made
    made.close()


def raw(text: str, *images: Image.Image) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def test_numbers_say_which_image_stands_where(folder: Path, llm: Any, oracle: Any) -> None:
    """In any order, and more than once, as the published processor takes them."""
    rng = np.random.default_rng(1)
    images = [make_image(rng, high=200) for _ in range(2)]
    texts = ["<|image_2|>\nand <|image_1|> Which?", "x <|image_1|><|image_2|> again <|image_1|>"]
    wanted = [ask(COMPARED["phi3_v"], folder, oracle(folder), text, images, 5) for text in texts]
    assert [ids.count(BOS) for ids, _ in wanted] == [3, 4]
    got = llm.generate([raw(text, *images) for text in texts], GREEDY, use_tqdm=False)
    assert [one.prompt_token_ids for one in got] == [ids for ids, _ in wanted]
    assert_same([(one.outputs[0].token_ids, answer) for one, (_, answer) in zip(got, wanted, strict=True)])


@pytest.mark.parametrize("text", ["<|image_1|>", "<|image_1|> <|image_3|>", "<|image_0|> <|image_1|>",
                                  "<|image_1000000001|> <|image_1|>", "no mark"])  # fmt: skip
def test_numbers_that_are_not_those_of_the_images_are_refused(text: str, llm: Any) -> None:
    image = Image.new("RGB", (60, 40))
    with pytest.raises(BadRequest, match=r"names [12] images and has 2|placed 0 of 2 images"):
        llm.generate(raw(text, image, image), GREEDY, use_tqdm=False)


def test_typed_marks_stay_text(folder: Path, llm: Any) -> None:
    """In a chat the image stands where its part does; what looks like a mark, also inside another, is the user's."""
    image, typed = make_image(np.random.default_rng(2), high=100), "<|image_1|> <|ima<|image|>ge_1|> <|image|>?"
    parts = [{"type": "image", "image": image}, {"type": "text", "text": typed}]
    got = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)[0]
    encode = Processor(folder).encoder
    rows = image_processor(load_config(folder), {}).compute_geometry(image.height, image.width).tokens
    assert got.num_image_tokens == got.prompt_token_ids.count(336) == rows
    assert encode.decode([t for t in got.prompt_token_ids if t != 336]).count(typed) == 1
    plain = llm.chat([{"role": "user", "content": typed}], GREEDY, use_tqdm=False)[0]
    assert 336 not in plain.prompt_token_ids and encode.decode(plain.prompt_token_ids).count(typed) == 1


def test_num_crops_at_the_start_and_of_a_request(folder: Path, oracle: Any) -> None:
    """A request may take fewer tiles than the server plans for, and no more."""
    config = load_config(folder)
    assert image_needs(config, {}).tokens == 5 * 4 and image_needs(config, {"num_crops": 16}).tokens == 17 * 4
    made, reference = image_processor(config, {"num_crops": 9}), Processor(folder)
    for crops in (1, 2, 9):
        reference.crops = crops
        requested = made.with_options(MediaOptions(num_crops=crops))
        assert [requested.compute_geometry(h, w).tokens for h, w in ((50, 90), (300, 70))] == [
            reference.count(50, 90), reference.count(300, 70)]  # fmt: skip
    assert made.with_options(MediaOptions(num_crops=1)).fingerprint != made.fingerprint
    with pytest.raises(BadRequest, match="num_crops=10 is above this server's 9"):
        made.with_options(MediaOptions(num_crops=10), "mm_processor_kwargs")
    with pytest.raises(StartupError, match="num_crops=300 is above 64"):
        image_needs(config, {"num_crops": 300})
    with LLM(str(folder), mm_processor_kwargs={"num_crops": 16}, **BASE) as llm:
        wide = make_image(np.random.default_rng(3), low=90, high=200)
        counts = [
            llm.generate({**raw("<|image_1|>?", wide), "mm_processor_kwargs": kwargs}, GREEDY, use_tqdm=False)[0]
            for kwargs in (None, {"num_crops": 1})
        ]
        reference.crops = 16
        assert counts[0].num_image_tokens == reference.count(wide.height, wide.width)
        reference.crops = 1
        assert counts[1].num_image_tokens == reference.count(wide.height, wide.width) < counts[0].num_image_tokens


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2_vl"])
def test_other_models_refuse_num_crops(kind: str, checkpoint: Any) -> None:
    config = load_config(checkpoint(kind))
    with pytest.raises(StartupError, match="num_crops does not apply"):
        image_processor(config, {"num_crops": 4})
    with pytest.raises(BadRequest, match="num_crops does not apply"):
        image_processor(config, {}).with_options(MediaOptions(num_crops=4))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 2), (1, 5), (16, 1), (4, 4)])
def test_the_whole_image_is_interpolated_as_torch_does(shape: tuple[int, int]) -> None:
    """Also where neighbours differ by all of a byte, and values leave its range."""
    rng, side = np.random.default_rng(4), 28
    pixels = rng.choice(np.array([0, 255], np.uint8), (shape[0] * side, shape[1] * side, 3))
    made = downscale_bicubic(pixels, side)
    values = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
    want = functional.interpolate(values, size=(side, side), mode="bicubic")[0].permute(1, 2, 0).numpy()
    assert np.abs(made / UNIT - want).max() < 1e-9
    high, middle, low = np.split(encode_fixed_point(made).astype(np.int64), 3, axis=-1)
    assert ((high << 16 | middle << 8 | low) - 128 * UNIT == made).all()


def test_embeddings_of_images_are_those_of_the_last_row(folder: Path) -> None:
    """VLM2Vec-Full: the last token's row, behind the prompt that it was trained on."""
    model, reference = Composed.read(folder), Processor(folder)
    image = make_image(np.random.default_rng(6), high=150)
    given: Any = reference([image], "<|image_1|> Represent the given image.", "pt")
    with LLM(str(folder), runner="pooling", **BASE) as llm:
        made = llm.embed([raw("<|image_1|> Represent the given image.", image)], use_tqdm=False)[0]
    assert made.prompt_token_ids == given["input_ids"][0].tolist()
    assert cosine(made.outputs.embedding, model.last_row(given)) > LEAST_COSINE


@pytest.mark.parametrize(("key", "value", "named"), [
    ("embd_layer", {}, "embedding_cls"), ("img_processor", {}, "name"), ("embd_layer", None, "embedding_cls"),
    ("img_processor.num_attention_heads", 3, "num_attention_heads"), ("rope_scaling.type", "linear", "type"),
])  # fmt: skip
def test_a_file_that_says_less_or_other_things_is_refused(
    key: str, value: Any, named: str, folder: Path, tmp_path: Any
) -> None:
    with pytest.raises(StartupError) as refused:
        load_config(altered(folder, tmp_path / "altered", "config.json", key, value))
    assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "hpu"])
def test_a_hundred_pairs_of_embeddings(device: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, texts, and both, all at once and in chunks."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    model, reference, rng, worst = Composed.read(folder), Processor(folder), np.random.default_rng(10), 1.0
    requested: list[Any] = []
    for _ in range(200):
        images = [make_image(rng, high=250)] * int(rng.integers(2))
        text = f"Represent the given input: {QUESTIONS[int(rng.integers(len(QUESTIONS)))]}"
        requested.append(raw(f"<|image_1|> {text}", *images) if images else {"prompt": text})
    flags = {"device": device, "warmup": "skip", "block_size": 64} if device == "hpu" else {}
    with LLM(str(folder), runner="pooling", **{**BASE, "max_num_batched_tokens": 64, **flags}) as llm:
        made = llm.embed(requested, use_tqdm=False)
    for one, output in zip(requested, made, strict=True):
        images = one.get("multi_modal_data", {}).get("image")
        given: Any = (
            reference(images, one["prompt"], "pt") if images else reference.encoder(one["prompt"], return_tensors="pt")
        )
        assert output.prompt_token_ids == given["input_ids"][0].tolist()
        worst = min(worst, cosine(output.outputs.embedding, model.last_row(dict(given))))
    print(f"\nVLM2Vec-Full, {device}: least cosine of 200 embeddings {worst:.9f}")
    assert worst > LEAST_COSINE


def test_the_template_of_vlm2vec_full_puts_images_among_the_texts(folder: Path) -> None:
    template = Path(__file__).parents[3] / "examples" / "templates" / "vlm2vec_full.jinja"
    image, text = make_image(np.random.default_rng(7), high=100), "Represent the given image."
    parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    given: Any = Processor(folder)([image], f"<|image_1|> {text}", "pt")
    with LLM(str(folder), chat_template=str(template), **BASE) as llm:
        got = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)[0]
    assert got.prompt_token_ids == given["input_ids"][0].tolist()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_separators_of_quantised_weights(kind: str, folder: Path, llm: Any) -> None:
    """They pass the projector as it is stored; answers begin alike."""
    image = make_image(np.random.default_rng(8), high=100)
    first = SamplingParams(temperature=0, max_tokens=1, logprobs=1)

    def best(one: LLM) -> float:
        made: Any = one.generate(raw("<|image_1|>What?", image), first, use_tqdm=False)[0].outputs[0]
        return float(made.logprobs[0].logprob)

    with LLM(str(folder), quantization=kind, **BASE) as other:
        assert abs(best(other) - best(llm)) < (0.1 if kind == "int8" else 0.5)
