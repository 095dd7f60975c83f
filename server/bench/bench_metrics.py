"""Computes the figures of vLLM's benchmark from timed requests, under its names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.core.json_types import JsonObject
from trencadis.server.bench.stream_timing import BenchTiming

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
GOALS = ("ttft", "tpot", "e2el")


def collect_series(good: Sequence[BenchTiming]) -> dict[str, list[float]]:
    """Returns the values of every metric in seconds, over the requests that succeeded."""
    return {
        "ttft": [one.ttft for one in good],
        "tpot": [one.tpot for one in good if one.tokens > 1],
        "itl": [gap for one in good for gap in one.itl],
        "e2el": [one.latency for one in good],
        "client_queue_time": [one.queued for one in good],
        "e2el_including_client_queue": [one.latency + one.queued for one in good],
    }


def meets_goals(one: BenchTiming, goals: dict[str, float]) -> bool:
    """Returns True if a request meets ``goals`` (milliseconds by metric)."""
    took = {"ttft": one.ttft, "tpot": one.tpot, "e2el": one.latency}
    return all(1000 * took[name] <= goal for name, goal in goals.items())


def compute_result(
    requests: Sequence[BenchTiming],
    seconds: float,
    chosen: Sequence[str],
    percentiles: Sequence[float],
    goals: dict[str, float],
) -> JsonObject:
    """Computes the figures of a run of ``seconds``; times in milliseconds, lists of single requests in seconds."""
    good = [one for one in requests if not one.error]
    given, made = sum(one.prompt_tokens for one in good), sum(one.tokens for one in good)
    found: JsonObject = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(requests) - len(good),
        "total_input_tokens": given,
        "total_output_tokens": made,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(meets_goals(one, goals) for one in good) / seconds if goals else None,
        "output_throughput": made / seconds,
        "total_token_throughput": (given + made) / seconds,
        "input_lens": [one.prompt_tokens for one in requests],
        "output_lens": [0 if one.error else one.tokens for one in requests],
        "ttfts": [one.ttft for one in requests],
        "itls": [one.itl for one in requests],
        "latencies": [one.latency for one in requests],
        "start_times": [one.sent for one in requests],
        "queue_times": [one.queued for one in requests],
        "generated_texts": [one.text for one in requests],
        "errors": [one.error for one in requests],
        "max_output_tokens_per_s": max_tokens_per_second(good),
        "max_concurrent_requests": max_concurrency(good),
        "rtfx": 0.0,
    }
    held = collect_series(good)
    for name in chosen:
        found |= compute_statistics(name, held[name], percentiles)
    return found


DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "queue_times", "generated_texts",
           "errors")  # fmt: skip
"""Fields that only ``--save-detailed`` saves."""


def compute_statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Returns ``mean_X_ms``, ``median_X_ms``, ``std_X_ms`` and ``pN_X_ms``; zeros without measurements."""
    values = 1000 * np.asarray(seconds if len(seconds) else [0.0])
    found = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for p in percentiles:
        found[f"p{p:g}_{name}_ms"] = float(np.percentile(values, p))
    return found


def max_tokens_per_second(good: Sequence[BenchTiming]) -> float:
    """Returns the most pieces with tokens in one second, counting seconds from the first request."""
    if not good:
        return 0.0
    start = min(one.sent for one in good)
    arrived = [
        np.concatenate(([one.sent + one.ttft - start], one.sent + one.ttft - start + np.cumsum(one.itl)))
        for one in good
    ]
    return float(np.bincount(np.concatenate(arrived).astype(int)).max())


def max_concurrency(good: Sequence[BenchTiming]) -> int:
    """Returns the most requests that ran at a time; one that ends when another begins does not overlap with it."""
    moments = sorted([(one.sent, 1) for one in good] + [(one.sent + one.latency, -1) for one in good])
    return int(max(np.cumsum([step for _, step in moments]), default=0))
