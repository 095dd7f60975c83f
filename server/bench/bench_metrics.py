"""Figures of ``bench serve``, under the names of vLLM's benchmark: times of tokens, statistics, and the report.

The tokens of an answer and their times follow vLLM's definitions. The report has printed lines and a JSON file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject
from trencadis.server.bench.http_client import Exchange

Json = JsonObject


@dataclass(slots=True)
class BenchTiming:
    """Timing of one request, in seconds.

    Args:
        queued: wait in this client because of ``--max-concurrency``.
        ttft: from sending to the first piece with a token.
        itl: times between pieces with tokens.
        latency: from sending to the last piece with a token.
    """

    sent: float = 0.0
    queued: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; 0 for a single token."""
        return (self.latency - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0


def compute_request_timing(exchange: Exchange, prompt_tokens: int) -> BenchTiming:
    """Computes the timing of an exchange; ``prompt_tokens`` is used if the server does not report usage."""
    found = BenchTiming(exchange.sent, exchange.sent - exchange.started, prompt_tokens=prompt_tokens)
    found.error = exchange.error
    if exchange.status and exchange.status != 200:
        found.error = _describe_refusal(exchange)
    elif not found.error:
        try:
            _read(found, exchange)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            found.error = "an event of the stream is no JSON"
    return found


def _describe_refusal(exchange: Exchange) -> str:
    try:
        error = msgspec.json.decode(exchange.body)["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError):
        said = exchange.body[:200].decode("utf-8", "replace")
    return f"{exchange.status}: {' '.join(str(said).split())[:200]}"


def _read(found: BenchTiming, exchange: Exchange) -> None:
    times: list[float] = []
    texts: list[str] = []
    for at, data in split_events(exchange.pieces):
        event = msgspec.json.decode(data)
        if not isinstance(event, dict):
            continue
        if event.get("error"):
            error = event["error"]
            found.error = str(error.get("message", error) if isinstance(error, dict) else error)[:200]
            return
        usage = event.get("usage")
        if usage:
            found.prompt_tokens = usage.get("prompt_tokens") or found.prompt_tokens
            found.tokens = usage.get("completion_tokens") or found.tokens
        piece = get_token_text(event)
        if piece is not None:
            times.append(at)
            texts.append(piece)
    if not times:
        found.error = "the answer has no token"
        return
    found.ttft, found.latency = times[0] - exchange.sent, times[-1] - exchange.sent
    found.itl = [b - a for a, b in itertools.pairwise(times)]
    found.tokens = found.tokens or len(times)
    found.text = "".join(texts)


def split_events(pieces: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Returns (time, data) of server-sent events; an event's time is that of its last byte."""
    found, torn = [], b""
    for at, piece in pieces:
        *whole, torn = (torn + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for one in whole:
            data = one.strip().removeprefix(b"data:").strip()
            if one.strip().startswith(b"data:") and data != b"[DONE]":
                found.append((at, data))
    return found


def get_token_text(event: Json) -> str | None:
    """Returns the text of an event with a token; it may be empty, if a token is not a whole character.

    None for events without a token: only the role, only the end, or the usage.
    """
    choices = event.get("choices")
    if not choices:
        return None
    choice = choices[0]
    if "text" in choice:
        text = choice["text"] or ""
        return None if not text and choice.get("finish_reason") else text
    delta = choice.get("delta") or {}
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    if text or delta.get("tool_calls"):
        return str(text)
    return None if delta.get("role") or choice.get("finish_reason") else ""


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


WIDTH = 50
NAMED = 10
"""Maximum kinds of failures that are listed."""
LATE_SHARE = 0.05


def format_lines(args: argparse.Namespace, found: JsonObject) -> Iterator[str]:
    """Yields the lines of the report, in vLLM's wording."""
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    yield _format_line("Successful requests:", found["completed"])
    yield _format_line("Failed requests:", found["failed"])
    if args.max_concurrency:
        yield _format_line("Maximum request concurrency:", args.max_concurrency)
    if not math.isinf(args.request_rate):
        yield _format_line("Request rate configured (RPS):", float(args.request_rate))
    yield _format_line("Benchmark duration (s):", found["duration"])
    yield _format_line("Total input tokens:", found["total_input_tokens"])
    yield _format_line("Total generated tokens:", found["total_output_tokens"])
    yield _format_line("Request throughput (req/s):", found["request_throughput"])
    if args.goals:
        yield _format_line("Request goodput (req/s):", found["request_goodput"])
    yield _format_line("Output token throughput (tok/s):", found["output_throughput"])
    yield _format_line("Peak output token throughput (tok/s):", found["max_output_tokens_per_s"])
    yield _format_line("Peak concurrent requests:", float(found["max_concurrent_requests"]))
    yield _format_line("Total token throughput (tok/s):", found["total_token_throughput"])
    for name in args.metrics:
        short, title = TITLES[name]
        yield f"{title:-^{WIDTH}}"
        yield _format_line(f"Mean {short} (ms):", found[f"mean_{name}_ms"])
        yield _format_line(f"Median {short} (ms):", found[f"median_{name}_ms"])
        for p in args.percentiles:
            yield _format_line(f"P{p:g} {short} (ms):", found[f"p{p:g}_{name}_ms"])
    yield f"{'This client':-^{WIDTH}}"
    yield _format_line("CPU a piece of a stream (us):", found["client_cpu_us_per_piece"])
    yield _format_line("Median lateness (ms):", found["client_loop_lag_p50_ms"])
    yield _format_line("P99 lateness (ms):", found["client_loop_lag_p99_ms"])
    yield "=" * WIDTH


def _format_line(label: str, value: float) -> str:
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
    return f"{label:<40} {shown}"


def format_failures(errors: Sequence[str]) -> Iterator[str]:
    """Yields a line for each kind of failure, with its count."""
    counted = Counter(error for error in errors if error)
    for error, count in counted.most_common(NAMED):
        yield f"failed, {count} times: {error}"
    if len(counted) > NAMED:
        yield f"failed, {len(counted) - NAMED} further kinds"


def format_client_delay(found: JsonObject) -> str:
    """Returns a warning if this client, or its machine, was late enough to affect the figures; else ""."""
    late, pace = found["client_loop_lag_p99_ms"], found.get("median_tpot_ms") or found.get("median_ttft_ms") or 0.0
    if not pace or late < LATE_SHARE * pace:
        return ""
    what = f"this client was up to {late:.1f} ms late (p99), beside {pace:.1f} ms of what it measured"
    return f"warning: {what}; run it on a quieter machine, or with less load."


def make_result_object(args: argparse.Namespace, found: JsonObject, model: str, tokenizer: str) -> JsonObject:
    """Returns the JSON object of a run."""
    made: JsonObject = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": args.num_prompts,
        **args.more,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness if math.isfinite(args.burstiness) else "inf",
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy:
        made |= {name: getattr(args, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    made |= found
    if not args.save_detailed:
        for name in DETAILS:
            made.pop(name, None)
    return made


def make_result_path(args: argparse.Namespace, model: str, date: str) -> Path:
    """Returns the path of the result file."""
    folder = Path(args.result_dir or ".").expanduser()
    if args.result_filename:
        return folder / str(args.result_filename)
    most = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    rate = f"{args.request_rate}qps"
    if args.ramp_up_strategy:
        rate = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps}qps-{args.ramp_up_end_rps}qps"
    return folder / f"{args.label or args.backend}-{rate}{most}-{model.rstrip('/').split('/')[-1]}-{date}.json"


def save(path: Path, made: JsonObject, append: bool) -> None:
    """Writes the JSON file, or appends a line to it.

    Raises:
        StartupError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(made)
        if append and path.exists() and path.stat().st_size:
            text = "\n" + text
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}.") from None
