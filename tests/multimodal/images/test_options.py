"""Options of parts and requests: where they may stand, what wins, what is refused, and what they do to an image."""

import asyncio
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference

from tests.traffic.media import prepare_now
from trencadis.core.errors import BadRequest, QueueFull
from trencadis.multimodal.images.image_frontend import ImageFrontend
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import (
    MediaOptions,
    MediaPart,
    MediaScope,
    part_options,
    part_uuid,
    request_options,
)
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.sources.media_loader import MediaLoader

PATH = "messages[0].content[1]"
SERVER = Qwen2VLImageProcessor(3136, 1003520)


def noise(width=60, height=40, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture(scope="module")
def front():
    made = ImageFrontend(SERVER, MediaLoader(), ProcessorCache(1 << 26))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("part", "want"),
    [
        ({"image_url": {"url": "u"}}, {}),
        ({"image_url": {"url": "u", "detail": "low"}}, {"detail": "low"}),
        ({"image_url": "u", "detail": "auto"}, {"detail": "auto"}),
        ({"image": "u", "min_pixels": 3136, "max_pixels": 50176.0}, {"min_pixels": 3136, "max_pixels": 50176}),
        ({"image_url": {"url": "u", "max_pixels": 9000}, "max_pixels": 8000}, {"max_pixels": 8000}),
        ({"image": "u", "resized_height": 280, "resized_width": 420}, {"resized_height": 280, "resized_width": 420}),
        ({"video": "u", "fps": 0.5, "max_frames": 8}, {"fps": 0.5, "max_frames": 8}),
    ],
)
def test_a_part_says(part, want):
    assert part_options(part, PATH).given == want


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"image_url": {"url": "u", "detail": "huge"}}, ".image_url.detail"),
        ({"image_url": "u", "detail": ["low"]}, ".detail"),
        ({"image_url": "u", "max_pixels": "many"}, ".max_pixels"),
        ({"image_url": "u", "max_pixels": True}, ".max_pixels"),
        ({"image_url": "u", "max_pixels": 0}, ".max_pixels"),
        ({"image_url": "u", "max_pixels": -1}, ".max_pixels"),
        ({"image_url": "u", "max_pixels": 3.5}, ".max_pixels"),
        ({"image_url": "u", "max_pixels": 10**400}, ".max_pixels"),
        ({"image_url": "u", "max_pixels": float("nan")}, ".max_pixels"),
        ({"image_url": "u", "fps": float("inf")}, ".fps"),
        ({"image_url": "u", "max_pixels": [1]}, ".max_pixels"),
        ({"image_url": "u", "resized_height": 280}, ".resized_height"),
        ({"image_url": "u", "min_pixels": 9000, "max_pixels": 8000}, ".min_pixels"),
        ({"video": "u", "fps": 2, "nframes": 8}, ".fps"),
    ],
    ids=str,
)
def test_a_part_is_refused(part, where):
    with pytest.raises(BadRequest) as caught:
        part_options(part, PATH)
    assert caught.value.param == PATH + where and len(caught.value.message) < 120


@pytest.mark.parametrize(
    ("kwargs", "want"),
    [
        (None, {}),
        ({"min_pixels": None}, {}),
        ({"max_pixels": 9000, "do_resize": True, "patch_size": 14}, {"max_pixels": 9000}),
        ({"size": {"shortest_edge": 1000, "longest_edge": 9000}}, {"min_pixels": 1000, "max_pixels": 9000}),
        ({"images_kwargs": {"max_pixels": 9000}}, {"max_pixels": 9000}),
        ({"videos_kwargs": {"num_frames": 4}}, {"nframes": 4}),
        ({"fps": 1}, {"fps": 1.0}),
    ],
    ids=str,
)
def test_a_request_says(kwargs, want):
    assert request_options(kwargs).given == want


def test_options_of_one_kind_leave_the_other_alone():
    requested = {
        "images_kwargs": {"max_pixels": 9000},
        "videos_kwargs": {"max_pixels": 8000, "fps": 1},
        "min_pixels": 800,
    }
    assert request_options(requested, kind="image").given == {"min_pixels": 800, "max_pixels": 9000}
    assert request_options(requested, kind="video").given == {"min_pixels": 800, "max_pixels": 8000, "fps": 1.0}
    wider = {"images_kwargs": {"max_pixels": 9000}, "max_pixels": 100}
    assert request_options(wider, kind="image").given == {"max_pixels": 9000}, "the nearer one wins"
    with pytest.raises(BadRequest):
        request_options({"videos_kwargs": {"crop": 1}}, kind="image")


@pytest.mark.parametrize(
    ("kwargs", "where"),
    [
        ({"crop_size": 3}, "mm_processor_kwargs.crop_size"),
        ({"do_resize": False}, "mm_processor_kwargs.do_resize"),
        ({"do_normalize": 1.5}, "mm_processor_kwargs.do_normalize"),
        ({"patch_size": 16}, "mm_processor_kwargs.patch_size"),
        ({"size": 4}, "mm_processor_kwargs.size"),
        ({"size": {"height": 4}}, "mm_processor_kwargs.size"),
        ({"images_kwargs": {"size": {"longest_edge": "x"}}}, "mm_processor_kwargs.images_kwargs.size.longest_edge"),
        ({"images_kwargs": 1}, "mm_processor_kwargs.images_kwargs"),
        ({"min_pixels": 9000, "max_pixels": 8000}, "mm_processor_kwargs.min_pixels"),
        ({"x" * 300: 1}, "mm_processor_kwargs." + "x" * 100),
    ],
    ids=lambda v: str(v)[:60],
)
def test_a_request_is_refused(kwargs, where):
    with pytest.raises(BadRequest) as caught:
        request_options(kwargs)
    assert caught.value.param == where and len(caught.value.message) < 120


def test_the_part_wins_over_the_request():
    base = MediaOptions(min_pixels=4000, max_pixels=9000, fps=1.0)
    assert MediaOptions(max_pixels=5000).merge_over(base) == MediaOptions(min_pixels=4000, max_pixels=5000, fps=1.0)
    assert MediaOptions(max_pixels=5000).merge_over(MediaOptions()) == MediaOptions(max_pixels=5000)
    assert MediaOptions(nframes=4).merge_over(base).fps is None, (
        "they exclude each other: the request's rate has no say"
    )
    assert MediaOptions(fps=2.0).merge_over(MediaOptions(nframes=8)) == MediaOptions(fps=2.0)
    assert MediaOptions(max_pixels=5).key != MediaOptions(min_pixels=5).key != MediaOptions(nframes=5).key


@pytest.mark.parametrize("uuid", ["", "x" * 129, 5, "a\0b", ["a"]])
def test_a_wrong_uuid(uuid):
    with pytest.raises(BadRequest) as caught:
        part_uuid({"uuid": uuid}, PATH)
    assert caught.value.param == f"{PATH}.uuid"


@pytest.mark.parametrize("size", [(640, 480), (20, 3000), (100, 100), (1500, 1500), (31, 900)])
@pytest.mark.parametrize(
    ("options", "low", "high"),
    [
        (MediaOptions(max_pixels=50176), 3136, 50176),
        (MediaOptions(min_pixels=200_000), 200_000, 1003520),
        (MediaOptions(min_pixels=784, max_pixels=784 * 4), 784, 784 * 4),
        (MediaOptions(max_pixels=1000), 1000, 1000),
        (MediaOptions(detail="low"), 3136, 512 * 512),
        (MediaOptions(detail="low", max_pixels=9000), 3136, 9000),
        (MediaOptions(detail="high"), 3136, 1003520),
        (MediaOptions(detail="auto", max_pixels=400_000), 3136, 400_000),
    ],
    ids=lambda v: v.key if isinstance(v, MediaOptions) else str(v),
)
def test_pixels_equal_the_reference_under_these_limits(size, options, low, high):
    image = noise(size[0], size[1], seed=sum(size))
    ours = SERVER.with_options(options)
    got = ours.prepare(image, "")
    want = Qwen2VLImageProcessorPil(size={"shortest_edge": low, "longest_edge": high})(image, return_tensors="np")
    assert list(got.grid) == want["image_grid_thw"][0].tolist() and got.original == (size[1], size[0])
    channel = np.arange(1176) // (2 * 14 * 14)
    assert np.array_equal(ours.normalised_values[channel[None], got.pixels], want["pixel_values"])
    assert got.slots <= SERVER.largest_slots and got.tokens <= SERVER.largest_tokens


@pytest.mark.parametrize(("height", "width"), [(280, 420), (300, 431), (28, 28), (1, 1), (56, 5000), (900, 1001)])
@pytest.mark.parametrize("alignment", ["pad", "resize"])
def test_a_fixed_size_is_rounded_as_the_reference_does(height, width, alignment):
    server = Qwen2VLImageProcessor(3136, 1003520, alignment=alignment)
    got = server.with_options(MediaOptions(resized_height=height, resized_width=width)).prepare(noise(), "")
    assert got.resized == reference(height, width, server.factor, 3136, 1 << 40)
    assert got.slots <= server.largest_slots and got.tokens <= server.largest_tokens


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (MediaOptions(max_pixels=1003521), "max_pixels"),
        (MediaOptions(max_pixels=783), "max_pixels"),
        (MediaOptions(min_pixels=1003521), "min_pixels"),
        (MediaOptions(resized_height=1400, resized_width=1400), "resized_height"),
        (MediaOptions(resized_height=28, resized_width=2**31 - 1), "resized_height"),
        (MediaOptions(resized_height=2**31 - 1, resized_width=2**31 - 1), "resized_height"),
        (MediaOptions(min_pixels=9000, max_pixels=8000), "min_pixels"),
    ],
    ids=lambda v: v.key if isinstance(v, MediaOptions) else str(v),
)
def test_more_than_the_server_allows(options, name):
    with pytest.raises(BadRequest) as caught:
        SERVER.with_options(options, PATH)
    assert caught.value.param == f"{PATH}.{name}" and len(caught.value.message) < 120


def test_a_thin_image_cannot_be_blown_up_beyond_the_plan():
    server = Qwen2VLImageProcessor(3136, 50176)
    thin = noise(6000, 30)
    assert server.prepare(thin, "").slots <= server.largest_slots
    for low in (10_000, 30_000, 50_176):
        try:
            got = server.with_options(MediaOptions(min_pixels=low)).prepare(thin, "")
        except BadRequest:
            continue
        assert got.slots <= server.largest_slots and got.tokens <= server.largest_tokens
    with pytest.raises(BadRequest, match="thin image"):
        Qwen2VLImageProcessor(3136, 401408).with_options(MediaOptions(min_pixels=401408)).prepare(thin, "")


def test_options_that_change_nothing_share_the_image(front):
    image = noise(300, 200)
    alike: list[dict[str, Any]] = [
        {},
        {"detail": "high"},
        {"detail": "auto"},
        {"max_pixels": 1003520},
        {"min_pixels": 3136, "detail": "low"},
    ]
    others: list[dict[str, Any]] = [
        {"max_pixels": 30_000},
        {"resized_height": 56, "resized_width": 56},
        {"min_pixels": 200_000},
    ]
    parts = [MediaPart(image, "p", MediaOptions(**o)) for o in alike + others]
    digests = [p.digest for p in prepare_now(front, parts)]
    assert len(set(digests[:4])) == 1 and len(set(digests)) == 5  # low detail is another limit here
    same = prepare_now(front, [(image, "p")], MediaScope(options=MediaOptions(max_pixels=30_000)))
    assert same[0].digest == digests[5]


def test_errors_name_part_or_request(front):
    wrong = MediaOptions(max_pixels=1 << 30)
    for part, scope, param in [
        (MediaPart(noise(), PATH, wrong), MediaScope(), f"{PATH}.max_pixels"),
        (MediaPart(noise(), PATH), MediaScope(options=wrong), "mm_processor_kwargs.max_pixels"),
    ]:
        with pytest.raises(BadRequest) as caught:
            prepare_now(front, [part], scope)
        assert caught.value.param == param


def test_pixels_are_charged_before_decoding(front, monkeypatch):
    requested = []

    def charge(pixels):
        requested.append(pixels)
        raise QueueFull("full", retry_after=3)

    monkeypatch.setattr(front.decoder, "prepare", lambda *a: pytest.fail("decoded although there was no room"))
    from io import BytesIO

    out = BytesIO()
    noise(500, 300, seed=9).save(out, "PNG")
    with pytest.raises(QueueFull) as caught:
        asyncio.run(front.prepare([MediaPart(out.getvalue(), PATH)], MediaScope(charge=charge)))
    assert requested == [308 * 504] and caught.value.retry_after == 3 and caught.value.param == PATH
