"""Images and videos in one conversation: places, spans, pixels, usage, and templates that take text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.checkpoints import TEMPLATE
from trencadis.core.errors import BadRequest
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions, MediaPart
from trencadis.multimodal.processor_interface import PreparedImage, PreparedVideo
from trencadis.server.prompts.multimodal_inputs import PlaceholderJoiner, arrange_media
from trencadis.server.prompts.prompt_and_chat_messages import read_part
from trencadis.server.text.chat_template import ChatTemplate

IMAGE = {"type": "image", "image": "data:image/png;base64,AAAA"}
VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}, "fps": 1.0}


def item(digest: str, tokens: int = 6) -> PreparedImage:
    pixels = np.zeros((tokens * 4, 1176), np.uint8)
    return PreparedImage(digest, pixels, (1, 4, tokens), tokens, 64, (56, 14 * tokens), (60, 90))


class FakeImages:
    async def prepare(self, parts: Sequence[MediaPart], scope: Any = None) -> list[PreparedImage]:
        return [item(f"i{i}") for i in range(len(parts))]


class FakeVideos:
    """Every video has three temporal patches of two tokens, the first like the last."""

    def __init__(self) -> None:
        self.rooms: list[int] = []

    async def prepare(self, parts: Sequence[MediaPart], tokens_left: int, scope: Any = None) -> list[PreparedVideo]:
        self.rooms.append(tokens_left)
        patches = (item("p0", 2), item("p1", 2), item("p0", 2))
        return [PreparedVideo(f"v{i}", patches, (0, 1, 2, 3, 4, 5), 1.0, 2.0, 9) for i in range(len(parts))]


@pytest.fixture
def both(harness: Any) -> Any:
    service = harness.service
    service.images, service.videos, service._join = FakeImages(), FakeVideos(), PlaceholderJoiner(service.config)
    service.limits = replace(service.limits, max_images=2, max_videos=2)
    service.template = ChatTemplate(TEMPLATE, harness.tokenizer)
    return harness


def test_spans_follow_the_conversation(both: Any) -> None:
    content = [VIDEO, {"type": "text", "text": "and <|video_pad|>"}, IMAGE, VIDEO, {"type": "text", "text": "?"}]
    reply = both.chat(content, return_image_sizes=True)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    request, pixels = both.engine.submitted[0]
    image, video = both.service.config.image_token, both.service.config.video_token
    assert [s.digest for s in request.spans] == ["p0", "p1", "p0", "i0", "p0", "p1", "p0"]
    assert [len(p) for p in pixels] == [8, 8, 8, 24, 8, 8, 8]
    for span in request.spans:
        token = image if span.digest == "i0" else video
        assert request.tokens[span.offset : span.offset + span.length] == [token] * span.length
    assert (request.tokens.count(image), request.tokens.count(video)) == (6, 12)
    places = np.frombuffer(request.positions, "<i4").reshape(3, -1)
    start = request.spans[0].offset
    # Two tokens a second (the checkpoint's), two seconds between patches: times 0, 4, 8 from where the video stands.
    assert places[0, start : start + 6].tolist() == [start, start, start + 4, start + 4, start + 8, start + 8]
    details = body["usage"]["prompt_tokens_details"]
    assert (details["image_tokens"], details["video_tokens"]) == (6, 12)
    assert [v["frames"] for v in details["videos"]] == [[0, 1, 2, 3, 4, 5]] * 2 and len(details["images"]) == 1
    assert both.service.videos.rooms == [1024 - len(request.tokens) + 18 - 3]


def test_too_many_and_none_at_all(both: Any) -> None:
    for content, param in (([VIDEO] * 3, "video"), ([IMAGE] * 3, "image")):
        reply = both.chat(content)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    both.service.videos = None
    assert both.chat([VIDEO]).json()["error"]["message"] == "At most 0 video(s) may be provided in one prompt."


def test_a_text_template(both: Any) -> None:
    both.service.template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", both.tokenizer)
    assert both.chat([{"type": "text", "text": "a"}, VIDEO, IMAGE]).status_code == 200
    shown = both.tokenizer.decode(both.engine.submitted[0][0].tokens, False)
    video, image = "<|video_pad|>" * 6, "<|image_pad|>" * 6
    assert shown == f"<|vision_start|>{video}<|vision_end|>\n<|vision_start|>{image}<|vision_end|>\na"


def test_raw_prompts_take_each_kind_in_its_order(both: Any) -> None:
    service = both.service
    image, video = service.config.image_token, service.config.video_token
    parts = [MediaPart("a", "x", kind="image"), MediaPart("b", "y", kind="video"), MediaPart("c", "z", kind="image")]
    prompt = asyncio.run(service.make_media_prompt([5, image, 6, image, 7, video], parts))
    assert [s.digest for s in prompt.expanded.spans] == ["i0", "i1", "p0", "p1", "p0"]
    assert [len(p) for p in prompt.pixels] == [24, 24, 8, 8, 8]
    for tokens in ([5, image, video], [image, image], [image, image, video, video]):
        with pytest.raises(BadRequest, match="placed"):
            asyncio.run(service.make_media_prompt(tokens, parts))


def test_arranged_keeps_what_it_cannot_place() -> None:
    clip = PreparedVideo("v", (item("p"),), (0, 0), 1.0, 2.0, 1)
    one_image = item("i")
    assert arrange_media([9, 8], 8, 9, [one_image, clip]) == [clip, one_image]
    assert arrange_media([8], 8, 9, [one_image, clip]) == [one_image, clip]


@pytest.mark.parametrize(
    ("part", "source", "kind"),
    [
        ({"type": "image", "image": "a b/c.png"}, Path("a b/c.png"), "image"),
        ({"image": "/x.png"}, Path("/x.png"), "image"),
        ({"type": "image", "image": Path("x.png")}, Path("x.png"), "image"),
        ({"type": "image", "image": "data:image;base64,AA"}, "data:image;base64,AA", "image"),
        ({"type": "video", "video": "x.mp4"}, Path("x.mp4"), "video"),
        ({"video_url": "https://e.org/x.mp4"}, "https://e.org/x.mp4", "video"),
        ({"type": "video", "video": ["a.png", "https://e.org/b.png"]}, [Path("a.png"), "https://e.org/b.png"], "video"),
        ({"type": "video", "video": [{"url": "https://e.org/b.png"}]}, ["https://e.org/b.png"], "video"),
    ],
)
def test_conventions_of_qwen_vl_utils(part: Any, source: Any, kind: str) -> None:
    found = read_part({**part, "min_pixels": 5000, "max_pixels": 9000}, "m")
    assert isinstance(found, MediaPart) and (found.source, found.kind) == (source, kind)
    assert found.options == MediaOptions(min_pixels=5000, max_pixels=9000)


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": "a.png"}, {"type": "video_url", "video_url": "a.mp4"}]
)
def test_urls_are_no_paths(part: Any) -> None:
    with pytest.raises(BadRequest, match="HTTP, data or file URL"):
        read_part(part, "m")
