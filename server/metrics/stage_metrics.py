"""The time of a request by stage, as metrics and in its last log line; and how many images share launches."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from trencadis.core.process.engine_messages import BucketUse
from trencadis.server.metrics.speculation_metrics import format_drafts
from trencadis.server.prompts.generation import RequestTiming

STAGES = ("turn", "media_fetch", "media_decode", "media_resize", "queue", "encode", "prefill", "decode")
"""Stages in order. Media seconds are summed over a request's images, although these are prepared in parallel."""
SECONDS = (.001, .003, .01, .03, .1, .3, 1, 3, 10, 30, 100, 300)  # fmt: skip
PER_LAUNCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
LABELS = ("model_name", "engine")


def get_stage_seconds(timing: RequestTiming) -> dict[str, float]:
    """Returns the seconds by stage of the slowest choice; stages that the request does not have are left out."""
    found: dict[str, float] = {"turn": timing.fair_queue_seconds} if timing.fair_queue_seconds else {}
    if timing.media:
        found |= {f"media_{name}": seconds for name, seconds in timing.media_seconds.items()}
    stats = timing.slowest
    if stats is not None:
        found["queue"] = stats.queue
        if timing.media:
            found["encode"] = stats.encode
        found["prefill"] = max(stats.prefill - stats.encode, 0.0)
        found["decode"] = stats.decode
    return found


def format_closing(timing: RequestTiming) -> str:
    """Returns the end of a request's last log line: seconds by stage, cache hits, launches, buckets of the slowest
    choice.
    """
    parts = [" ".join(f"{name} {seconds:.3f}" for name, seconds in get_stage_seconds(timing).items())]
    if timing.media:
        kept, encoded = timing.media - timing.prepared, sum(s.image_hits for s in timing.stats)
        parts.append(f"media {timing.media}, {kept} from the processor cache, {encoded} from the encoder cache")
    slowest = timing.slowest
    if slowest is not None:
        launches, misses = sum(s.launches for s in timing.stats), sum(s.misses for s in timing.stats)
        parts.append(f"launches {launches}, {launches - misses} in planned buckets")
        parts.append(f"buckets {_join_names(slowest.first_buckets)}, {_join_names(slowest.last_buckets)}")
        parts += format_drafts(timing.stats)
    return "; ".join(part for part in parts if part)


def _join_names(names: list[str]) -> str:
    return "+".join(names) or "-"


class StageMetrics:
    """``vllm:request_stage_seconds`` and the encoder's launches. ``engines``: the labels of each engine."""

    def __init__(self, registry: CollectorRegistry, engines: Sequence[Sequence[str]]) -> None:
        self._stages = Histogram(
            "vllm:request_stage_seconds", "seconds of a request by stage", (*LABELS, "stage"),
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        for values in engines:
            for name in STAGES:
                self._stages.labels(*values, name)
        self._launches = self._make_counter(registry, "encoder_launches", "launches of the vision tower")
        self._needed = self._make_counter(registry, "encoder_needed_slots", "patch slots that images needed")
        self._launched = self._make_counter(registry, "encoder_launched_slots", "patch slots that were launched")
        self._forward = Histogram(
            "vllm:encoder_forward_seconds", "seconds of a launch of the vision tower", LABELS, buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self._together = Histogram(
            "vllm:encoder_images_per_launch", "images of one launch", LABELS, buckets=PER_LAUNCH, registry=registry
        )
        for values in engines:
            self._forward.labels(*values)
            self._together.labels(*values)

    def record_finished(self, timing: RequestTiming, values: Sequence[str]) -> None:
        """Records a finished request of the engine with these labels."""
        for name, seconds in get_stage_seconds(timing).items():
            self._stages.labels(*values, name).observe(seconds)

    def record_launch(self, use: BucketUse, values: Sequence[str]) -> None:
        """Records a VISION launch of the engine with these labels."""
        self._launches.labels(*values).inc()
        self._needed.labels(*values).inc(use.needed)
        self._launched.labels(*values).inc(use.padded)
        self._forward.labels(*values).observe(use.seconds)
        self._together.labels(*values).observe(use.items)

    @staticmethod
    def _make_counter(registry: CollectorRegistry, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, LABELS, registry=registry)
