"""Options, uuids and sizes over HTTP: what reaches the image side, and what usage and /metrics say."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trencadis.core.process.engine_messages import EngineInfo, EngineStats
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions

URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
SIZE = {"width": 84, "height": 56, "grid": [1, 4, 6], "tokens": 6, "original_width": 90, "original_height": 60}


def test_options_reach_the_image_side(harness: Any) -> None:
    part = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}, "max_pixels": 9000, "uuid": "one"}
    body = {"mm_processor_kwargs": {"min_pixels": 4000}, "cache_salt": "s"}
    assert harness.chat([part], **body).status_code == 200
    seen, scope = harness.images.parts[0], harness.images.scope
    assert seen.options == MediaOptions(max_pixels=9000, detail="low") and seen.uuid == "one" and seen.source == URL
    assert scope.options == MediaOptions(min_pixels=4000) and scope.salt == "s" and scope.tenant == ""


def test_tenants_are_distinguished_by_their_key(harness: Any) -> None:
    tenants = []
    for headers in ({"authorization": "Bearer a"}, {"authorization": "bearer  a"}, {"x-api-key": "a"}, {}):
        harness.call("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, headers=headers)
        tenants.append(harness.images.scope.tenant)
    assert len(set(tenants[:3])) == 1 and tenants[0] != tenants[3] == "" and tenants[0] != "a"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "uuid": "one"},
        {"type": "image_url", "image_url": None, "uuid": "one"},
        {"type": "image_url", "image_url": {"url": None}, "uuid": "one"},
        {"type": "image", "uuid": "one"},
    ],
)
def test_a_uuid_may_stand_alone(harness: Any, part: Any) -> None:
    assert harness.chat([part]).status_code == 200
    assert harness.images.parts[0].source is None and harness.images.parts[0].uuid == "one"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "messages[0].content[0]"),
        ({"type": "image_url", "image_url": 5, "uuid": "one"}, "messages[0].content[0]"),
        ({"type": "image_url", "image_url": URL, "uuid": 5}, "messages[0].content[0].uuid"),
        ({"type": "image_url", "image_url": URL, "uuid": "x" * 129}, "messages[0].content[0].uuid"),
        (
            {"type": "image_url", "image_url": {"url": URL, "detail": "ultra"}},
            "messages[0].content[0].image_url.detail",
        ),
        ({"type": "image", "image": "a/" * 2049}, "messages[0].content[0]"),
        ({"type": "video", "video": ["a.png", "/" * 4097]}, "messages[0].content[0]"),
        ({"type": "image", "image": URL, "max_pixels": "1e9"}, "messages[0].content[0].max_pixels"),
        ({"type": "image", "image": URL, "resized_width": 28}, "messages[0].content[0].resized_height"),
    ],
)
def test_a_wrong_part_is_named(harness: Any, part: Any, param: str) -> None:
    response = harness.chat([part])
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_usage_counts_image_tokens_and_sizes_where_asked(harness: Any) -> None:
    plain = harness.chat([IMAGE]).json()["usage"]["prompt_tokens_details"]
    assert plain["image_tokens"] == 6 and "images" not in plain
    assert harness.chat([IMAGE, IMAGE], return_image_sizes=True).json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 3, "image_tokens": 12, "multimodal_tokens": {"image": 12}, "images": [SIZE, SIZE],
    }  # fmt: skip
    assert harness.chat("text").json()["usage"]["prompt_tokens_details"]["image_tokens"] == 0


def test_a_stream_ends_with_them(harness: Any) -> None:
    for fields in ({"stream_options": {"include_usage": True}}, {}):
        last = harness.events(harness.chat([IMAGE], stream=True, return_image_sizes=True, **fields))[-1]
        assert last["choices"] == [] and last["usage"]["prompt_tokens_details"]["images"] == [SIZE]
        assert last["usage"]["prompt_tokens_details"]["image_tokens"] == 6
    counted = harness.events(harness.chat([IMAGE], stream=True, stream_options={"include_usage": True}))[-1]
    assert "images" not in counted["usage"]["prompt_tokens_details"]
    assert "usage" not in harness.events(harness.chat([IMAGE], stream=True))[-1]


def test_tokenize_takes_the_same_parts(harness: Any) -> None:
    messages = [{"role": "user", "content": [IMAGE]}]
    body = harness.call("/tokenize", {"messages": messages, "mm_processor_kwargs": {"max_pixels": 9000}})
    assert body.json()["tokens"].count(harness.service.config.image_token) == 6
    assert harness.images.scope.options == MediaOptions(max_pixels=9000)
    assert harness.call("/tokenize", {"messages": messages, "cache_salt": "a/b"}).status_code == 400
    assert harness.made.state.trencadis.admission.inside == [0, 0, 0]


def test_metrics_of_three_caches(harness: Any) -> None:
    harness.engine.info = EngineInfo(
        "cpu", "float32", 1024, 16, 100, 1000, 64, kv_bytes=102 * 512, arena_bytes=64 * 256
    )
    harness.engine.stats = EngineStats(
        prefix_queries=50, prefix_hits=20, host_hits=8, prompt_cached=20,
        kv_cached=7, kv_evictions=2, mm_queries=9, mm_hits=4,
        arena_used=10, image_evictions=1,
    )  # fmt: skip
    cache = harness.images.cache
    cache.queries, cache.hits, cache.evictions, cache.bytes, cache.max_bytes = 8, 5, 3, 1234, 4096
    text = harness.call("/metrics").text
    got = dict(re.findall(r"^vllm:cache_(\w+{[^}]*})  ?([0-9.]+)$", text, re.M))
    want = {
        "processor": (5, 3, 3, 1234, 4096), "encoder": (4, 5, 1, 2560, 16384), "prefix": (20, 30, 2, 3584, 51200),
    }  # fmt: skip
    names = ("hits_total", "misses_total", "evictions_total", "bytes", "capacity_bytes")
    for name, values in want.items():
        for figure, value in zip(names, values, strict=True):
            assert float(got[f'{figure}{{cache="{name}",engine="0",model_name="m"}}']) == value, (name, figure)
    sources = re.findall(r'^vllm:prompt_tokens_cached_by_source_total{.*source="(\w+)"} ([0-9.]+)$', text, re.M)
    assert sources[:2] == [("device", "12.0"), ("host", "8.0")]
