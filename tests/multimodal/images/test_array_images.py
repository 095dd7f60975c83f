"""Images and frames as arrays of numpy and torch: what is taken, and that it is the image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.traffic.media import prepare_now
from trencadis.core.errors import BadRequest
from trencadis.multimodal.images.image_decode_client import array_to_frames, array_to_image
from trencadis.multimodal.images.image_frontend import ImageFrontend
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.sources.media_loader import MediaLoader

RGB = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
TENSOR = torch.from_numpy(RGB)
CLEAR = np.dstack([RGB, np.full((40, 60), 128, np.uint8)])

FORMS: dict[str, Any] = {
    "rows first": RGB,
    "channels first": RGB.transpose(2, 0, 1),
    "floats": RGB.astype(np.float32) / 255,
    "doubles, channels first": RGB.transpose(2, 0, 1) / 255,
    "not contiguous": np.asfortranarray(RGB),
    "a tensor": TENSOR,
    "a tensor of torchvision's form": TENSOR.permute(2, 0, 1).float() / 255,
    "a tensor that learns": (TENSOR.permute(2, 0, 1).float() / 255).requires_grad_(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_image(form: str) -> None:
    made = array_to_image(FORMS[form])
    assert made.mode == "RGB" and np.array_equal(np.asarray(made), RGB)


def test_half_precision_is_the_nearest_level() -> None:
    for dtype, away in ((torch.float16, 0), (torch.bfloat16, 1)):
        made = np.asarray(array_to_image((TENSOR.float() / 255).to(dtype))).astype(int)
        assert np.abs(made - RGB).max() <= away


def test_a_fourth_channel_is_transparency() -> None:
    assert array_to_image(CLEAR).mode == array_to_image(torch.from_numpy(CLEAR).permute(2, 0, 1)).mode == "RGBA"


def test_where_both_ends_could_be_channels_arrays_end_with_them_and_tensors_begin() -> None:
    both = np.random.default_rng(1).integers(0, 256, (3, 8, 4), np.uint8)
    assert array_to_image(both).size == (8, 3) and array_to_image(both).mode == "RGBA"
    assert array_to_image(torch.from_numpy(both)).size == (4, 8)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (RGB[..., 0], r"uint8 \[40, 60\]"),
        (RGB[..., :2], r"uint8 \[40, 60, 2\]"),
        (RGB.astype(np.int64), "int64"),
        (RGB[:0], "0, 60, 3"),
        (RGB.astype(np.float32), "between 0 and 1; convert"),
        (RGB / 255 - 0.1, "between 0 and 1; convert"),
        (np.where(RGB > 3, np.nan, 0.5), "between 0 and 1; convert"),
        (torch.randn(1, 64, 32), "float32 .1, 64, 32.. Embeddings are not supported"),
        (torch.randn(64, 32), "Embeddings are not supported"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_anything_else_is_one_line(source: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        array_to_image(source)


def test_frames_have_one_axis_more() -> None:
    clip = np.stack([RGB, RGB[::-1]])
    for form in (clip, torch.from_numpy(clip).permute(0, 3, 1, 2).float() / 255):
        assert [np.array_equal(np.asarray(p), want) for p, want in zip(array_to_frames(form), clip, strict=True)] == [
            True
        ] * 2
    with pytest.raises(BadRequest, match="An array of frames"):
        array_to_frames(RGB)


def test_an_array_is_prepared_as_the_image_it_is() -> None:
    front = ImageFrontend(Qwen2VLImageProcessor(3136, 1003520), MediaLoader(), ProcessorCache(1 << 26))
    try:
        sources = [array_to_image(RGB), *FORMS.values()]
        first, *others = prepare_now(front, [(s, f"p[{i}]") for i, s in enumerate(sources)])
        assert {p.digest for p in others} == {first.digest}
        for source in ({"image_embeds": TENSOR}, 7, torch.randn(2, 64, 32)):
            with pytest.raises(BadRequest, match=r"mbed.* not supported") as caught:
                prepare_now(front, [(source, "multi_modal_data.image[0]")])  # type: ignore[list-item]
            assert caught.value.param == "multi_modal_data.image[0]"
    finally:
        front.close()
