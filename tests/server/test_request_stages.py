"""Stages of a request in /metrics and in its closing line; launches of the encoder."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trencadis.core.process.engine_messages import BucketUse, EngineStats
from trencadis.core.request import RequestStats
from trencadis.server.engine.engine_client_and_request_timing import RequestTiming
from trencadis.server.metrics.prometheus import ThroughputLog
from trencadis.server.metrics.request_record_logs_and_metrics import STAGES, format_closing, get_stage_seconds


class Ended:
    """A stream of which only the statistics matter."""

    def __init__(self, stats: RequestStats | None) -> None:
        self.stats = stats


def timing(media: int = 2, *stats: RequestStats | None) -> RequestTiming:
    made = RequestTiming("r", 0.0, 10, 5, 5, 1, streams=[Ended(s) for s in stats])  # type: ignore[misc]
    made.media, made.prepared = media, 1
    made.media_seconds = {"fetch": 0.1, "decode": 0.2, "resize": 0.3}
    return made


def waited(made: RequestTiming) -> RequestTiming:
    """``made``, of a request whose tenant had to wait for its turn."""
    made.fair_queue_seconds = 0.05
    return made


def test_stages_do_not_overlap_and_belong_to_the_slowest_choice() -> None:
    slow = RequestStats(queue=1.0, prefill=3.0, decode=4.0, encode=2.5, images=2, image_hits=1, launches=7, misses=2)
    found = get_stage_seconds(waited(timing(2, RequestStats(0.5, 1, 1), slow)))
    assert tuple(found) == STAGES
    assert list(found.values()) == [0.05, 0.1, 0.2, 0.3, 1.0, 2.5, 0.5, 4.0]
    assert set(get_stage_seconds(timing(0, slow))) == {"queue", "prefill", "decode"}
    assert get_stage_seconds(timing(0, None)) == {}


def test_the_closing_line() -> None:
    stats = RequestStats(queue=1.0, prefill=3.0, decode=4.0, encode=2.5, image_hits=1, launches=7, misses=2)
    stats.first_buckets = ["vision[64]", "prefill[8]"]
    assert format_closing(timing(2, stats)) == (
        "media_fetch 0.100 media_decode 0.200 media_resize 0.300 queue 1.000 encode 2.500 prefill 0.500 decode 4.000; "
        "media 2, 1 from the processor cache, 1 from the encoder cache; launches 7, 5 in planned buckets; "
        "buckets vision[64]+prefill[8], -"
    )
    assert format_closing(timing(0, None)) == ""


def test_over_http(harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trencadis.server"):
        harness.chat([{"type": "image_url", "image_url": "data:image/png;base64,A"}])
    assert "queue 0.100" in caplog.text and "media 1" in caplog.text
    use = BucketUse("vision", 3000, 3136, 0.1, items=3, needed=3072)
    harness.engine.observers[0](EngineStats(buckets=[use, BucketUse("decode", 3, 4, 0.1)]))
    text = harness.call("/metrics").text
    label = 'engine="0",model_name="m"'
    assert f'vllm:request_stage_seconds_count{{{label},stage="turn"}} 0.0' in text, "nobody waited for one"
    for name in STAGES[1:]:
        assert f'vllm:request_stage_seconds_count{{{label},stage="{name}"}} 1.0' in text, name
    for line in (
        f"vllm:encoder_launches_total{{{label}}} 1.0",
        f"vllm:encoder_needed_slots_total{{{label}}} 3072.0",
        f"vllm:encoder_launched_slots_total{{{label}}} 3136.0",
        f"vllm:encoder_images_per_launch_sum{{{label}}} 3.0",
    ):
        assert line in text, line


def test_gaps_and_pace_are_each_choices_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("trencadis.server.prompts.generation_stream.time.monotonic", lambda: now[0])
    one = timing(0)
    for _ in range(3):  # two choices, a token each every second
        for choice in (0, 1):
            one.add_tokens(choice, 1)
        now[0] += 1.0
    assert one.gaps == [1.0] * 4 and one.generated == 6
    assert one.seconds_per_token() == [1.0, 1.0], "seconds per token of a choice, whatever the others do"
    one.add_tokens(0, 0)
    assert one.generated == 6 and one.gaps == [1.0] * 4, "a delta without a token is no token"


def test_throughput_is_not_negative_after_an_engine_restart() -> None:
    line = ThroughputLog()
    line.format_line(EngineStats(prompt_tokens=5000, generation_tokens=900, running=1))
    again = line.format_line(EngineStats(prompt_tokens=50, generation_tokens=9, running=1))
    assert again is not None and "throughput: -" not in again
    more = line.format_line(EngineStats(prompt_tokens=6000, generation_tokens=1000, running=1), restarts=1)
    assert more is not None and float(more.split("prompt throughput: ")[1].split()[0]) > 0
