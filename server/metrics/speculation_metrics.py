"""Metrics of speculation, by vLLM's names, and its parts of log lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Metric

from trencadis.core.engine_stats import EngineStats
from trencadis.core.request import RequestStats

LABELS = ("model_name", "engine")


def make_speculation_families(values: Sequence[str], stats: EngineStats) -> Iterator[Metric]:
    """Yields the counters of drafts, of their tokens, of accepted tokens, and of these by their place in the draft."""
    for name, text, count in (
        ("drafts", "drafts of sequences that steps have verified", stats.spec_drafts),
        ("draft_tokens", "tokens of these drafts", stats.spec_draft_tokens),
        ("accepted_tokens", "those of them that became part of an answer", stats.spec_accepted),
    ):
        counter = CounterMetricFamily(f"vllm:spec_decode_num_{name}", text, labels=LABELS)
        counter.add_metric(values, count)
        yield counter
    places = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "accepted tokens by their place in the draft, from 0",
        labels=(*LABELS, "position"),
    )  # fmt: skip
    for place, count in enumerate(stats.spec_accepted_at or [0]):
        places.add_metric((*values, str(place)), count)
    yield places


def format_acceptance(stats: EngineStats, last: EngineStats) -> list[str]:
    """Returns the part of the throughput line about drafts since ``last``; empty if none was verified."""
    drafted, accepted = stats.spec_draft_tokens - last.spec_draft_tokens, stats.spec_accepted - last.spec_accepted
    if drafted <= 0:
        return []
    steps = max(stats.spec_drafts - last.spec_drafts, 1)
    return [
        f"Mean acceptance length: {1 + accepted / steps:.2f}",
        f"Draft acceptance rate: {100 * accepted / drafted:.1f}%",
    ]


def format_drafts(choices: Sequence[RequestStats]) -> list[str]:
    """Returns the part of a request's closing line about its drafts; empty if none was verified."""
    drafted = sum(choice.drafted for choice in choices)
    return [f"drafts {drafted}, {sum(choice.accepted for choice in choices)} accepted"] if drafted else []
